"""Squared per-sample gradients against a loop over samples, in float64, for every architecture the papers use."""

import copy
import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers as T
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isoreg.corpus import TextBatches, sample_losses
from isoreg.dropout import gaussian_dropout, load_scores
from isoreg.experiments.measure import agreement
from isoreg.experiments.toy import toy_corpus, toy_model_path
from isoreg.fisher import TAPED, FisherEstimate, _Squares, empirical_fisher, squared_norms
from isoreg.states import model_fingerprint
from isoreg.trainer import split_by_length

pytestmark = pytest.mark.filterwarnings("ignore:.*left to autograd")

V, H = 50, 16
BASE = dict(vocab_size=V, hidden_size=H, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
TEXT = BASE | dict(max_position_embeddings=28)
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GEMMA = TEXT | ENDS | dict(num_key_value_heads=1, head_dim=8)
DEBERTA = dict(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm")
DEBERTA |= dict(share_att_key=True, type_vocab_size=0, pad_token_id=0)
DISTIL = dict(vocab_size=V, dim=H, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=24)
GPT2 = dict(vocab_size=V, n_embd=H, n_layer=2, n_head=2, n_positions=24, bos_token_id=1, eos_token_id=2)
T5 = dict(vocab_size=V, d_model=H, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
MODELS = {  # family, head, settings
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "bert-eager": ("Bert", "ForMaskedLM", TEXT | dict(attn_implementation="eager")),
    "bert-untied": ("Bert", "ForMaskedLM", TEXT | dict(tie_word_embeddings=False)),
    "roberta": ("Roberta", "ForMaskedLM", TEXT | dict(pad_token_id=1)),
    "albert": ("Albert", "ForMaskedLM", TEXT | dict(num_hidden_layers=3, embedding_size=8)),
    "distilbert": ("DistilBert", "ForMaskedLM", DISTIL),
    "electra": ("Electra", "ForMaskedLM", TEXT | dict(embedding_size=8)),
    "modernbert": ("ModernBert", "ForMaskedLM", TEXT | ENDS | dict(local_attention=8, cls_token_id=1, sep_token_id=2)),
    "mpnet": ("MPNet", "ForMaskedLM", TEXT),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "llama": ("Llama", "ForCausalLM", TEXT | dict(num_key_value_heads=1)),
    "t5": ("T5", "ForConditionalGeneration", T5 | dict(relative_attention_num_buckets=8)),
    "gemma": ("Gemma", "ForCausalLM", GEMMA),
    "gemma2": ("Gemma2", "ForCausalLM", GEMMA | dict(sliding_window=8)),
    "gemma3": ("Gemma3", "ForCausalLM", GEMMA | dict(sliding_window=8)),
    "deberta-v2": ("DebertaV2", "ForMaskedLM", TEXT | DEBERTA),
}
LOSS = dict.fromkeys(["gpt2", "llama", "gemma", "gemma2", "gemma3"], "clm") | {"t5": "seq2seq"}
SLOW = {"deberta-v2", "bert-untied"}  # some of whose parameters, or all, go through autograd


def made(name: str, **changed) -> nn.Module:
    family, head, config = MODELS[name]
    return getattr(T, family + head)(getattr(T, family + ("Text" * (name == "gemma3")) + "Config")(**config | changed))


def model_of(name: str, **changed) -> nn.Module:
    "Random weights large enough to matter, no two tensors alike, biases and scales away from 0 and 1."
    torch.manual_seed(0)
    model, g = made(name, **changed).double().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


def batch_of(loss: str, lengths=(9, 5, 12, 9), seed=0) -> dict:
    g = torch.Generator().manual_seed(seed)
    n, t = len(lengths), max(lengths)
    mask = (torch.arange(t) < torch.tensor(lengths)[:, None]).long()
    # few different tokens: rows of the embedding occur several times
    ids = torch.randint(5, 12, (n, t), generator=g) * mask
    if loss == "clm":
        labels = ids.clone()
    elif loss == "seq2seq":
        behind = torch.arange(6) >= torch.tensor([3, 6, 4, 5])[:n, None]
        labels = torch.randint(3, V, (n, 6), generator=g).masked_fill(behind, -100)
    else:
        labels = torch.full_like(ids, -100)
        for i, length in enumerate(lengths):
            at = torch.randperm(length, generator=g)[: 1 + i % 3 + length // 6]
            labels[i, at] = torch.randint(3, V, (len(at),), generator=g)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def one_loss(model, batch, i, loss, reduction="mean"):
    "The loss of one sequence without its padding, with the model's full logits."
    length, labels = int(batch["attention_mask"][i].sum()), batch["labels"][i]
    row = {k: batch[k][i : i + 1, :length] for k in ("input_ids", "attention_mask")}
    logits = model(**row, **({"labels": labels[None]} if loss == "seq2seq" else {})).logits[0]
    if loss != "seq2seq":
        labels = labels[:length]
    if loss == "clm":
        logits, labels = logits[:-1], labels[1:]
    return F.cross_entropy(logits, labels, reduction=reduction)


def by_loop(model, batches, loss="mlm", reduction="mean") -> dict:
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for batch in batches:
        for i in range(len(batch["input_ids"])):
            model.zero_grad()
            one_loss(model, batch, i, loss, reduction).backward()
            for n, p in model.named_parameters():
                if p.grad is not None:
                    sums[n] += p.grad.square()
    model.zero_grad()
    return sums


def agree(ours: FisherEstimate, loop: dict, rtol=1e-6):
    assert set(ours.sums) == set(loop)
    largest = max(float(v.mean()) for v in loop.values())
    for n, v in loop.items():
        v = v if ours.level == "diagonal" else v.sum()
        floor = 1e-12 * largest * (1 if ours.level == "diagonal" else ours.numel[n])
        torch.testing.assert_close(ours.sums[n].to(v), v, rtol=rtol, atol=floor, msg=lambda m: f"{n}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_equals_a_loop_over_samples(name):
    model, loss = model_of(name), LOSS.get(name, "mlm")
    batches = [batch_of(loss), batch_of(loss, (7, 11), seed=3), batch_of(loss, (6,), seed=4)]
    before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    loop = by_loop(model, batches, loss)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)  # the caller's, which stays
    for level in ("tensor", "diagonal"):
        ours = empirical_fisher(model, batches, level, loss)
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == before  # ties as they were
        agree(ours, loop)
        assert ours.n_samples == 7 and bool(ours.by_function) == (name in SLOW)
    assert all(bool((p.grad == 3).all()) for p in model.parameters())


def test_each_class_that_the_tape_knows_is_compared_with_a_loop():
    assert {model_of(name).config.model_type for name in MODELS} >= TAPED


class Operations(TorchDispatchMode):
    "Counts what starts work: no views, no allocations."

    FREE = "view _unsafe_view detach t transpose permute expand select slice unsqueeze squeeze split empty alias"

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen[name] += name not in self.FREE.split()
        return func(*args, **kwargs or {})


def operations(run) -> Counter:
    with Operations() as count:
        run()
    return count.seen


@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_operations_of_a_batch(level):
    "A batch starts a few operations for each linear layer, however many samples it has, and reads no value back."
    found = {}
    for layers in (2, 4):
        model = made("bert", num_hidden_layers=layers).eval()
        plain = lambda b: torch.autograd.grad(sample_losses(model, b).sum(), list(model.parameters()))
        for samples in (4, 16):
            one, two = (batch_of("mlm", [9, 5, 12, 9] * (samples // 4), seed) for seed in range(2))
            alone, both = (operations(lambda: empirical_fisher(model, b, level)) for b in ([one], [one, two]))
            ours = both - alone
            price = alone.total() - ours.total()  # zeros to begin with, and the check of the sums, read at once
            assert price <= (4 if level == "diagonal" else 2) * len(list(model.parameters())) + 10
            assert alone["_local_scalar_dense"] == 1
            theirs = operations(lambda: plain(two))
            assert ours["_local_scalar_dense"] <= theirs["_local_scalar_dense"], samples
            found[layers, samples] = ours.total() - theirs.total()
    assert found[2, 4] == found[2, 16] and found[4, 4] == found[4, 16]
    # 6 linear layers, each with its bias, and 2 LayerNorms
    assert found[4, 4] - found[2, 4] <= 2 * 6 * 11 and found[2, 4] <= 300


def test_blocks_of_rows_do_not_matter(monkeypatch):
    model, batch = model_of("bert"), batch_of("mlm")
    whole = empirical_fisher(model, [batch], "diagonal")
    monkeypatch.setattr("isoreg.fisher.BLOCK", {"cpu": 300})  # some matrices are larger
    for n, v in empirical_fisher(model, [batch], "diagonal").sums.items():
        torch.testing.assert_close(v, whole.sums[n], rtol=1e-10, atol=1e-18)


def _tensors() -> list[torch.Tensor]:
    "All tensors that live."
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def _held() -> int:
    "Bytes of the tensors that live."
    return sum(x.numel() * x.element_size() for x in _tensors())


@pytest.mark.parametrize("name, level", [("bert", "diagonal"), ("deberta-v2", "tensor")])
def test_ten_batches_hold_what_two_hold(name, level):
    model, loss, held = model_of(name), LOSS.get(name, "mlm"), {}
    batches = [batch_of(loss, seed=seed) for seed in range(10)]
    earlier = _tensors()  # none of another test's may go in between

    def watched():
        for done, batch in enumerate(batches):
            held[done] = _held() if done == 2 else 0
            yield batch
        held[10] = _held()

    ours = empirical_fisher(model, watched(), level)
    assert held[10] == held[2] and earlier and not any(s.requires_grad for s in ours.sums.values())


@pytest.mark.parametrize("name, precision, level", [("bert", "bf16", "tensor"), ("deberta-v2", "fp32", "diagonal")])
def test_an_autocast_around_it_changes_nothing(name, precision, level):
    model, calls = model_of(name).float(), []
    batches = [batch_of(LOSS.get(name, "mlm"), seed=seed) for seed in range(2)]
    alone = empirical_fisher(model, batches, level, precision=precision)
    read = lambda batch: calls.append(torch.is_autocast_enabled("cpu")) or batch
    with torch.autocast("cpu", torch.float16):
        model(input_ids=batches[0]["input_ids"])  # leaves copies of the weights in the caller's cache
        ours = empirical_fisher(model, map(read, batches), level, precision=precision)
    assert all(torch.equal(ours.sums[n], v) for n, v in alone.sums.items()) and ours.by_function == alone.by_function
    assert calls == [True, True]  # what is the caller's own runs as the caller has it


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5"])
def test_sum_over_tokens_and_positions(name):
    model, loss = model_of(name), LOSS.get(name, "mlm")
    batch = batch_of(loss)
    agree(empirical_fisher(model, [batch], "diagonal", loss, reduction="sum"), by_loop(model, [batch], loss, "sum"))
    if loss == "clm":
        with pytest.raises(ValueError, match="sample"):
            empirical_fisher(model, [batch], loss=loss, sample="position")
        return
    singles = []
    for i, j in (batch["labels"] != -100).nonzero().tolist():
        one = {k: v[i : i + 1].clone() for k, v in batch.items()}
        if loss == "seq2seq":
            one["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(one["labels"])
        one["labels"][0, torch.arange(one["labels"].shape[1]) != j] = -100
        singles.append(one)
    ours = empirical_fisher(model, [batch], "tensor", loss, sample="position")
    assert ours.n_samples == len(singles) and "position" in ours.unit
    each = [empirical_fisher(model, [s], "tensor", loss) for s in singles]
    for n, v in ours.sums.items():
        torch.testing.assert_close(v, sum(e.sums[n] for e in each), rtol=1e-6, atol=1e-14)


def test_losses_and_layouts_of_ones_own():
    "A weight used twice, a layout that no hook can tell apart, a raw, a frozen and an idle weight, a batch norm."

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.frozen = nn.Linear(H, H), nn.Linear(H, 3), nn.Linear(H, H)
            self.unused = nn.Linear(2, 2)
            self.scale, self.mixed, self.norm = nn.Parameter(torch.rand(H)), nn.Linear(H, H), nn.BatchNorm1d(H)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.a(torch.tanh(self.a(x))) * self.scale + self.frozen(x)
            return self.b(self.norm(self.mixed(x.transpose(0, 1)).transpose(0, 1).mean(1)))

    torch.manual_seed(0)
    model = Odd().double().eval()
    loss = lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")
    batches = [{"x": torch.randn(n, 7, H).double(), "y": torch.randint(0, 3, (n,))} for n in (5, 7)]
    right = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for b in batches:
        for i in range(len(b["y"])):
            model.zero_grad()
            loss(model, {k: v[i : i + 1] for k, v in b.items()}).sum().backward()
            for n in right:
                right[n] += 0 if model.get_parameter(n).grad is None else model.get_parameter(n).grad.square()
    ours = empirical_fisher(model, batches, "diagonal", loss)
    agree(ours, right)
    assert ours.unit == "sum over samples of the squared gradient of what <lambda> gives for a sample"
    assert ours.by_function == sorted(right) and not model.frozen.weight.requires_grad and model.a.weight.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_order_and_batching_do_not_matter(order, cut):
    model, batch = model_of("distilbert"), batch_of("mlm", (9, 5, 12, 9, 4, 7))
    row = lambda at: {k: v[list(at)] for k, v in batch.items()}
    a, b = empirical_fisher(model, [batch]), empirical_fisher(model, [row(order[:cut]), row(order[cut:])])
    for n in a.sums:
        torch.testing.assert_close(a.sums[n], b.sums[n], rtol=1e-9, atol=1e-16)


def test_float32_and_bfloat16_follow_float64():
    right = empirical_fisher(model_of("bert"), [batch_of("mlm")])
    single = empirical_fisher(model_of("bert").float(), [batch_of("mlm")])
    cast = empirical_fisher(model_of("bert").float(), [batch_of("mlm")], precision="bf16")
    half = empirical_fisher(model_of("bert").bfloat16(), [batch_of("mlm")], "diagonal")
    for n, v in right.sums.items():
        if "key.bias" in n:
            continue
        assert float(single.sums[n] / v) == pytest.approx(1, abs=1e-4), n
        assert float(right.mean()[n]) == pytest.approx(float(v) / right.n_samples)
        assert float(cast.sums[n] / v) == pytest.approx(1, abs=0.1), n
        assert float(half.sums[n].sum() / v) == pytest.approx(1, abs=0.25), n
    assert not single.by_function and not cast.by_function and cast.precision == "bf16"
    assert any(not torch.equal(single.sums[n], v) for n, v in cast.sums.items())
    assert {s.dtype for s in half.sums.values()} == {torch.float32}
    assert {s.dtype for s in single.sums.values()} == {torch.float64}


@pytest.mark.parametrize("tokens", [3, 40])  # less and more than the matrix has rows and columns
def test_squares_of_small_gradients_in_half_precision(tokens):
    g, x = 1e-4 * torch.randn(2, tokens, H), 5 + torch.randn(2, tokens, H)
    g -= g.mean(1, keepdim=True)  # of a key, they cancel
    for half in (torch.float16, torch.bfloat16):
        a, b = g.to(half), x.to(half)
        torch.testing.assert_close(squared_norms(a, b), squared_norms(a.float(), b.float()), rtol=0.01, atol=0)


@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_a_model_over_several_devices_has_each_sum_beside_its_weight(level):
    model = made("bert")
    model.bert.encoder.layer[1].to("meta")
    squares = _Squares(model, "mlm", level, "mean", "fp32")
    assert {n: s.device for n, s in squares.sums.items()} == {n: p.device for n, p in model.named_parameters()}


def test_rows_without_a_label_do_not_count():
    model, batch = model_of("bert"), batch_of("mlm")
    batch["labels"][1] = -100
    rest = {k: v[[0, 2, 3]] for k, v in batch.items()}
    ours, right = empirical_fisher(model, [batch]), empirical_fisher(model, [rest])
    assert ours.n_samples == right.n_samples == 3
    for n, v in right.sums.items():
        torch.testing.assert_close(ours.sums[n], v, rtol=1e-9, atol=1e-16)


def test_left_padding_needs_positions():
    model, batch = model_of("gpt2"), batch_of("clm")
    flipped = {k: v.clone() for k, v in batch.items()}
    for i, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        for k in flipped:
            flipped[k][i] = batch[k][i].roll(12 - n)
    with pytest.raises(ValueError, match="padded on the left"):
        empirical_fisher(model, [flipped], loss="clm")
    flipped["position_ids"] = (flipped["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ours, right = empirical_fisher(model, [flipped], loss="clm"), empirical_fisher(model, [batch], loss="clm")
    for n, v in right.sums.items():
        torch.testing.assert_close(ours.sums[n], v, rtol=1e-6, atol=1e-14)


def corpus_of(n=40, **options):
    return TextBatches(toy_corpus(n), tokenizer_of("toy"), batch_size=4, name="toy", **options)


def toy_model():
    return T.AutoModelForMaskedLM.from_pretrained(toy_model_path())


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))])
def test_a_wrapped_model_has_the_scores_of_the_model(wrap):
    ours, expected = empirical_fisher(wrap(toy_model()), corpus_of(8)), empirical_fisher(toy_model(), corpus_of(8))
    torch.testing.assert_close(ours.sums, expected.sums)
    rows, model = list(corpus_of(8)), wrap(toy_model())
    with torch.inference_mode():
        assert empirical_fisher(model, rows).sums.keys() == expected.sums.keys()


def test_agreement_measures():
    model, corpus = toy_model(), corpus_of(120)
    full = empirical_fisher(model, corpus, "diagonal")
    for row in agreement(full, full):
        assert [row["pearson"], row["spearman"]] == pytest.approx([1, 1])
        assert [row["overlap"], row["difference"]] == [1, 0]
    few, many = (agreement(empirical_fisher(model, corpus.draw(s, 1), "diagonal"), full)[0] for s in (0.03, 0.5))
    assert all(few[name] < many[name] < 1 for name in ("spearman", "overlap"))
    assert few["difference"] > many["difference"]
    nn.init.zeros_(model.cls.predictions.bias)
    with pytest.raises(ValueError, match="part: has another fingerprint"):
        agreement(empirical_fisher(model, corpus, "diagonal"), full)
    by_tensor = empirical_fisher(model, corpus)
    with pytest.raises(ValueError, match="full: level is 'tensor'"):
        agreement(by_tensor, by_tensor)
    for key in ("level", "loss", "reduction", "sample", "numel"):
        with pytest.raises(ValueError, match=f"part: has another {key}"):
            agreement(replace(full, **{key: None}), full)


def test_entries_that_are_zero_in_both_do_not_agree():
    full, part = torch.zeros(10_000), torch.zeros(10_000)
    full[:200], part[:100] = 1e-3 * torch.rand(200) + 1e-3, 1e-3 * torch.rand(100) + 1e-3
    about = dict(n_samples=1, level="diagonal", loss="mlm", numel={"w": 10_000})
    one, two = (FisherEstimate({"w": x}, **about) for x in (part, full))
    assert [r["overlap"] for r in agreement(one, two, top=(5, 2))] == [0.5, 0.5]
    assert agreement(one, two, top=(0.01,))[0]["tensors"] == 0  # one entry has no correlation


def tokenizer_of(name: str):
    tokenizer = T.AutoTokenizer.from_pretrained(toy_model_path())
    if name == "t5":
        tokenizer.eos_token = "[SEP]"
        tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(10)], special_tokens=True)
    return tokenizer


causal_model = lambda: made("gpt2", vocab_size=300, n_positions=64)
two_part_model = lambda: made("t5", vocab_size=300)
decoder = lambda: T.BertLMHeadModel(T.BertConfig(**BASE | dict(vocab_size=300), is_decoder=True))
MAKERS = [("gpt2", "clm", causal_model), ("t5", "seq2seq", two_part_model), ("bert", "clm", decoder)]


@pytest.mark.parametrize("name, loss, make", MAKERS)
def test_the_loss_is_that_of_the_batches(name, loss, make):
    model, batches = make(), TextBatches(toy_corpus(12), tokenizer_of(name), loss=loss)
    ours = empirical_fisher(model, batches)
    same = [empirical_fisher(model, b, loss=loss).sums for b in (batches, list(batches))]
    assert ours.loss == loss and same == [ours.sums, ours.sums]


def test_the_file_that_was_saved_is_read(tmp_path):
    model = toy_model()
    estimate, weights = empirical_fisher(model, corpus_of(8)), model_fingerprint(model)
    file = estimate.save(tmp_path / "fish")
    assert estimate.fingerprint == FisherEstimate.load(file).fingerprint == weights
    assert file.name == "fisher.json" and FisherEstimate.load(file).sums == estimate.sums
    assert load_scores(file) == load_scores(str(file.parent)) == (estimate.scores(), estimate.numel)
    plain = tmp_path / "fisher.json"  # scores of one's own, under that name
    plain.write_text('{"a": 1, "b": 0.5}')
    assert load_scores(plain) == ({"a": 1.0, "b": 0.5}, {})
    for text in ('{"a": true}', '{"a": "1"}', "{}", "[1]"):
        plain.write_text(text)
        with pytest.raises(ValueError, match="holds no tensor scores"):
            load_scores(plain)
    tensors = next(file.parent.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-9])
    for read, wrong in ((FisherEstimate.load, plain), (FisherEstimate.load, file), (load_scores, file.parent)):
        with pytest.raises(ValueError, match="folder: .* holds no complete estimate .* compute it again"):
            read(wrong)


def test_an_estimate_hashes_nothing_until_it_is_saved_and_knows_when_the_weights_have_changed(tmp_path, monkeypatch):
    for name in ("isoreg.fisher.model_fingerprint", "isoreg.corpus.TextBatches.describe"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("hashed"))
    model, sums = toy_model(), set()
    weight, early = model.cls.predictions.bias, empirical_fisher(model, corpus_of(8))
    for change in (model.bfloat16, lambda: weight.data.neg_(), lambda: nn.init.normal_(weight)):
        estimate = empirical_fisher(model.float(), corpus_of(8))
        change()
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="its weights have changed since"):
            patch.setattr("isoreg.corpus.TextBatches.describe", lambda _: {"name": "c"})
            estimate.save(tmp_path)
        sums.add(FisherEstimate.load(tmp_path).fingerprint)
    assert len(sums) == 3 and all(name.startswith("sums ") for name in sums)
    estimate = empirical_fisher(model, corpus_of(8))
    monkeypatch.undo()
    assert copy.deepcopy(estimate).fingerprint == model_fingerprint(model) and estimate.of is None  # plain data
    assert estimate.fingerprint == model_fingerprint(model) and estimate.corpora[0]["samples"] == 8
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="part: has another fingerprint"):
        agreement(replace(early, level="diagonal"), replace(estimate, level="diagonal"))


def contrastive(m, b):
    z = F.normalize(m.bert(b["input_ids"]).last_hidden_state.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)), reduction="none")


def not_finite():
    model = model_of("bert")
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight[0].fill_(float("nan"))
    return model


def flat():
    "A layer that is given all tokens in one row, so that no hook tells the samples apart."
    model = model_of("bert")
    model.bert.encoder.layer[0].intermediate.dense.register_forward_pre_hook(lambda m, args: (args[0].flatten(0, 1),))
    return model


def idle():
    "Its only weights with a gradient are in no loss."
    model = model_of("bert").requires_grad_(False)
    model.more = nn.Linear(2, 2).double()
    return model


bert, masked = (lambda: model_of("bert")), (lambda: [batch_of("mlm")])
ahead = lambda: T.BertLMHeadModel(T.BertConfig(**TEXT))
both_ways = lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT, is_causal=False))
seq2seq = lambda: TextBatches(toy_corpus(12), tokenizer_of("t5"), loss="seq2seq")
REFUSED = [  # model, batches, options, message
    (bert, masked, dict(level="row"), "level: 'row'"),
    (bert, masked, dict(loss="mse"), "loss: 'mse'"),
    (bert, masked, dict(reduction="max"), "reduction: 'max'"),
    (bert, masked, dict(sample="token"), "sample: 'token'"),
    (bert, masked, dict(precision="fp8"), "precision: 'fp8'"),
    (bert, masked, dict(loss=contrastive, sample="position"), "sample: 'position'"),
    (bert, masked, dict(loss=contrastive, reduction="sum"), "reduction: 'sum'"),
    (bert, masked, dict(loss=lambda m, b: m(**b).loss), "loss: gave a tensor .* need one loss for each of"),
    (bert, masked, dict(loss=lambda m, b: m(**b).logits[:, :2].sum(2).ravel()), "loss: gave a tensor of shape"),
    (bert, masked, dict(loss=lambda m, b: m(b["input_ids"]).logits.sum((1, 2)).detach()), "loss: no sample alone has"),
    (bert, masked, dict(loss=contrastive), "loss: no sample alone has a gradient"),
    (bert, list, {}, "batches: hold no sample"),
    (bert, lambda: [batch_of("mlm") | {"labels": torch.full((4, 12), -100)}], {}, "batches: hold no sample"),
    (bert, lambda: [{"input_ids": torch.ones(2, 3, dtype=torch.long)}], {}, "batch: has no labels"),
    (lambda: bert().requires_grad_(False), masked, {}, "model: no parameter requires a gradient"),
    (idle, masked, {}, "loss: no sample alone has a gradient"),
    (not_finite, masked, {}, "model: the squared gradient of bert.* is not finite"),
    (lambda: split_by_length(toy_model(), 2), corpus_of, {}, "model: reads its batches in groups"),
    (flat, masked, {}, "model: Linear sees .* rows for 4 samples"),
    (causal_model, lambda: corpus_of(12, loss="clm"), dict(loss="mlm"), "loss: 'mlm', but the batches were made for"),
    (toy_model, seq2seq, {}, "loss: 'seq2seq', but BertForMaskedLM was made for 'mlm'"),
    (lambda: T.T5Model(two_part_model().config), seq2seq, {}, "model: T5Model has no language-model head"),
    (lambda: toy_model().bert, corpus_of, {}, "model: BertModel has no language-model head"),
    (causal_model, lambda: corpus_of(12), {}, "loss: 'mlm', but GPT2LMHeadModel was made for 'clm'"),
    (ahead, lambda: [batch_of("clm")], {}, "loss: 'clm', but .* sees the tokens on the right"),
    (bert, lambda: ["a text"], {}, "batches: need collated batches"),
    (bert, lambda: [[torch.ones(2, 3)]], dict(loss=lambda model, batch: 0), "batches: need collated batches"),
    (both_ways, lambda: [batch_of("clm")], {}, "sees the tokens on the right"),
]


@pytest.mark.parametrize("model, batches, options, message", REFUSED)
def test_what_is_refused(model, batches, options, message):
    model = model()
    state = lambda: [p.requires_grad for p in model.parameters()] + [len(m._forward_hooks) for m in model.modules()]
    before = state()
    with pytest.raises(ValueError, match=message):
        empirical_fisher(model, batches(), **options)
    assert state() == before


def test_noise_that_stays_on_in_evaluation_mode_is_refused():
    model = model_of("bert")
    with gaussian_dropout(model, 0.2, released=True):
        with pytest.raises(ValueError, match="model: has noise that stays on"):
            empirical_fisher(model, [batch_of("mlm", (9, 5, 12))])
    empirical_fisher(model, [batch_of("mlm", (9, 5, 12))])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_head_drawn_at_random_is_noticed(reduction, recwarn):
    corpus, model = corpus_of(24), toy_model()
    empirical_fisher(model, corpus, reduction=reduction)
    assert not [w for w in recwarn if "drawn at random" in str(w.message)]
    with torch.no_grad():
        model.cls.predictions.transform.dense.weight.normal_()
    mean = torch.cat([sample_losses(model, b) for b in corpus]).mean()
    with pytest.warns(UserWarning, match="mean loss of the sample is .* ln V = 5.48; the head") as caught:
        empirical_fisher(model, corpus, reduction=reduction)
    assert mean > 5.48 and (reduction == "sum" or f"{mean:.2f} nats" in str(caught[0].message))
