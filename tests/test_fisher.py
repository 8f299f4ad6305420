"""Squared per-sample gradients against a loop over samples, in float64, for every architecture the papers use."""

import copy
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    DataCollatorForLanguageModeling,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)

from isoreg.corpus import TextBatches
from isoreg.fisher import FisherEstimate, agreement, empirical_fisher, load_scores, sum_over_ranks
from isoreg.noise import gaussian_dropout
from isoreg.toy import toy_corpus, toy_model_path
from isoreg.trainer import split_by_length

V, H = 50, 16
BASE = dict(
    vocab_size=V,
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=24,
)


def two_berts() -> nn.Module:
    "An encoder and a decoder of their own classes and widths: the head belongs to the decoder."
    decoder = BertConfig(**BASE | {"hidden_size": 12, "intermediate_size": 20}, tie_word_embeddings=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**BASE), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config)


MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**BASE)),
    "bert-eager": lambda: BertForMaskedLM(BertConfig(**BASE, attn_implementation="eager")),
    "bert-untied": lambda: BertForMaskedLM(BertConfig(**BASE, tie_word_embeddings=False)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**(BASE | {"max_position_embeddings": 28, "pad_token_id": 1}))),
    "albert": lambda: AlbertForMaskedLM(AlbertConfig(**(BASE | {"num_hidden_layers": 3}), embedding_size=8)),
    "distilbert": lambda: DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=V, dim=H, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=24)
    ),
    "electra": lambda: ElectraForMaskedLM(ElectraConfig(**BASE, embedding_size=8)),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(
            **BASE, pad_token_id=0, local_attention=8, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        )
    ),
    "mpnet": lambda: MPNetForMaskedLM(MPNetConfig(**(BASE | {"max_position_embeddings": 28}))),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=H, n_layer=2, n_head=2, n_positions=24, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**BASE, num_key_value_heads=1)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=H, n_layer=2, n_head=2)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=V,
            d_model=H,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            decoder_start_token_id=0,
        )
    ),
    "bert-to-bert": two_berts,
}
PARTLY = {  # some of whose parameters no hook can tell apart by sample
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **BASE, num_key_value_heads=1, head_dim=8, sliding_window=8, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=V,
            hidden_size=H,
            word_embed_proj_dim=H,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=24,
            max_position_embeddings=24,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "deberta-v2": lambda: DebertaV2ForMaskedLM(
        DebertaV2Config(
            **BASE,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            type_vocab_size=0,
            pad_token_id=0,
        )
    ),
}
LOSS = {"gpt2": "clm", "llama": "clm", "bloom": "clm", "gemma3": "clm", "opt": "clm"}
LOSS |= {"t5": "seq2seq", "bert-to-bert": "seq2seq"}


def model_of(name: str) -> nn.Module:
    "Random weights large enough to matter, no two tensors alike, biases and scales away from 0 and 1."
    torch.manual_seed(0)
    model = (MODELS | PARTLY)[name]().double().eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


def batch_of(loss: str, lengths=(9, 5, 12, 9), seed=0) -> dict:
    g = torch.Generator().manual_seed(seed)
    n, t = len(lengths), max(lengths)
    mask = (torch.arange(t) < torch.tensor(lengths)[:, None]).long()
    ids = (
        torch.randint(5, 12, (n, t), generator=g) * mask
    )  # few different tokens: rows of the embedding occur several times
    if loss == "clm":
        labels = ids.clone()
    elif loss == "seq2seq":
        labels = torch.randint(3, V, (n, 6), generator=g).masked_fill(
            torch.arange(6) >= torch.tensor([3, 6, 4, 5])[:n, None], -100
        )
    else:
        labels = torch.full_like(ids, -100)
        for i, length in enumerate(lengths):
            at = torch.randperm(length, generator=g)[: 1 + i % 3 + length // 6]
            labels[i, at] = torch.randint(3, V, (len(at),), generator=g)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def one_loss(model, batch, i, loss, reduction="mean"):
    "The loss of one sequence without its padding, with the model's full logits."
    length = int(batch["attention_mask"][i].sum())
    row = {
        "input_ids": batch["input_ids"][i : i + 1, :length],
        "attention_mask": batch["attention_mask"][i : i + 1, :length],
    }
    labels = batch["labels"][i : i + 1]
    if loss == "seq2seq":
        logits = model(**row, labels=labels).logits[0]
        return F.cross_entropy(logits, labels[0], reduction=reduction)
    logits = model(**row).logits[0]
    if loss == "clm":
        return F.cross_entropy(logits[:-1], labels[0, 1:length], reduction=reduction)
    return F.cross_entropy(logits, labels[0, :length], reduction=reduction)


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


@pytest.mark.filterwarnings("ignore:.*left to autograd")
@pytest.mark.parametrize("name", MODELS)
def test_equals_a_loop_over_samples(name):
    model, loss = model_of(name), LOSS.get(name, "mlm")
    batches = [batch_of(loss), batch_of(loss, (7, 11), seed=3), batch_of(loss, (6,), seed=4)]
    before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    loop = by_loop(model, batches, loss)
    for level in ("tensor", "diagonal"):
        ours = empirical_fisher(model, batches, level, loss)
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == before  # ties as they were
        agree(ours, loop)
        assert ours.n_samples == 7
        assert not ours.by_function


def _tensors() -> list[torch.Tensor]:
    "All tensors that live."
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def _held() -> tuple[int, int]:
    "Bytes of the tensors that live, and nodes of the graphs behind them."
    tensors = _tensors()
    nodes, todo = set(), [x.grad_fn for x in tensors if x.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        todo += [n for n, _ in node.next_functions]
    return sum(x.numel() * x.element_size() for x in tensors), len(nodes)


@pytest.mark.parametrize("name", PARTLY)
@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_ten_batches_hold_what_two_hold(name, level):
    model, loss, held = model_of(name), LOSS.get(name, "mlm"), {}
    batches = [batch_of(loss, seed=seed) for seed in range(10)]
    earlier = _tensors()  # none of another test's may go in between

    def look(done):
        if done in (2, 10):
            held[done] = _held()

    with pytest.warns(UserWarning, match="left to autograd"):
        ours = empirical_fisher(model, batches, level, progress=look)
    assert held[10] == held[2] and earlier
    assert ours.by_function and not any(s.requires_grad for s in ours.sums.values())
    agree(ours, by_loop(model, batches, loss))


@pytest.mark.filterwarnings("ignore:.*left to autograd")
def test_weights_of_which_a_sample_makes_no_use():
    "An expert that one sample is sent to and another is not, and no other weight that asks."

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return torch.stack([(self.a if v > 0 else self.b) * v for v in x])

    def squares(model):
        ours = empirical_fisher(model, [{"x": torch.tensor([1.0, 2.0, -3.0])}], loss=lambda m, b: m(b["x"]))
        return {n: float(v) for n, v in ours.sums.items()}

    assert squares(Experts()) == {"a": 5, "b": 9}
    one = Experts()
    one.b.requires_grad_(False)
    with torch.no_grad():
        assert squares(one) == {"a": 5}


@pytest.mark.filterwarnings("ignore:.*left to autograd")
@pytest.mark.parametrize("level", ["tensor", "diagonal"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "opt"])
def test_an_autocast_around_it_changes_nothing(name, precision, level):
    model, calls = model_of(name).float(), []
    batches = [batch_of(LOSS.get(name, "mlm"), seed=seed) for seed in range(2)]
    alone = empirical_fisher(model, batches, level, precision=precision)
    progress = lambda _: calls.append(torch.is_autocast_enabled("cpu"))
    with torch.autocast("cpu", torch.float16):
        model(input_ids=batches[0]["input_ids"])  # leaves copies of the weights in the caller's cache
        ours = empirical_fisher(model, batches, level, precision=precision, progress=progress)
    assert all(torch.equal(ours.sums[n], v) for n, v in alone.sums.items()) and ours.by_function == alone.by_function
    assert calls == [True, True]  # what is the caller's own runs as the caller has it


@pytest.mark.filterwarnings("ignore:.*left to autograd")
@pytest.mark.parametrize("loss", ["mlm", "seq2seq"])
def test_positions_that_are_given_the_text(loss):
    """BART counts places itself, so its position tables have other rows than the tape would see; it may also fill
    in masks."""
    torch.manual_seed(0)
    model = (
        BartForConditionalGeneration(
            BartConfig(
                vocab_size=V,
                d_model=H,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                max_position_embeddings=60,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=2,
                forced_eos_token_id=2,
                init_std=0.3,
            )
        )
        .double()
        .eval()
    )
    batches = [batch_of(loss), batch_of(loss, (7, 11), seed=3)]
    ours = empirical_fisher(model, batches, loss=loss)
    agree(ours, by_loop(model, batches, loss))
    assert set(ours.by_function) == {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5"])
@pytest.mark.filterwarnings("ignore:.*left to autograd")
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


def test_other_losses_and_layouts():
    """A classifier with a loss of its own, a pooler that reads one position, a weight used twice, samples in a layout that no hook can tell apart,
    a raw parameter, a frozen one, a batch norm: all as a loop has it."""  # noqa: E501

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.scale, self.frozen = (
                nn.Linear(H, H),
                nn.Linear(H, 3),
                nn.Parameter(torch.rand(H)),
                nn.Linear(H, H),
            )
            self.norm, self.mixed, self.unused = nn.BatchNorm1d(H), nn.Linear(H, H, bias=False), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.a(torch.tanh(self.a(x))) * self.scale + self.frozen(x)
            x = self.mixed(x.transpose(0, 1)).transpose(0, 1)  # (tokens, batch, hidden)
            return self.b(self.norm(x.mean(1)))

    torch.manual_seed(0)
    model = Odd().double().eval()
    loss = lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")
    batches = [
        {"x": torch.randn(n, 7, H, dtype=torch.float64), "y": torch.randint(0, 3, (n,))} for n in (5, 7)
    ]  # 7 samples of 7 tokens: the layouts look alike
    right = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for b in batches:
        for i in range(len(b["y"])):
            model.zero_grad()
            loss(model, {k: v[i : i + 1] for k, v in b.items()}).sum().backward()
            for n, p in model.named_parameters():
                if p.grad is not None:
                    right[n] += p.grad.square()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"^4 parameters .* mixed.weight, norm.bias, norm.weight \.\.\.$"):
        ours = empirical_fisher(model, batches, "diagonal", loss)
    agree(ours, right)
    assert (
        ours.by_function == ["mixed.weight", "norm.bias", "norm.weight", "scale"] and "frozen.weight" not in ours.sums
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (
        all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        and model.a.weight.requires_grad
        and not model.frozen.weight.requires_grad
    )
    classifier = BertForSequenceClassification(BertConfig(**BASE, num_labels=3)).double()
    batch = batch_of("mlm")
    batch["labels"] = torch.tensor([0, 1, 2, 1])
    own = lambda m, b: F.cross_entropy(
        m(b["input_ids"], attention_mask=b["attention_mask"]).logits, b["labels"], reduction="none"
    )
    ours, right = empirical_fisher(classifier, [batch], "diagonal", own), {}
    assert classifier.training and not ours.by_function
    classifier.eval()
    for i in range(4):
        classifier.zero_grad()
        own(classifier, {k: v[i : i + 1] for k, v in batch.items()}).sum().backward()
        for n, p in classifier.named_parameters():
            right[n] = right.get(n, 0) + p.grad.square()
    agree(ours, right)


def test_not_the_square_of_the_sum():
    model, batch = model_of("bert"), batch_of("mlm")
    ours = empirical_fisher(model, [batch], "diagonal")
    one_by_one = sum(one_loss(model, batch, i, "mlm") for i in range(4))
    one_by_one.backward()
    p = model.bert.encoder.layer[0].output.dense.weight
    assert not torch.allclose(ours.sums["bert.encoder.layer.0.output.dense.weight"], p.grad.square(), rtol=0.1)


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
        assert float(cast.sums[n] / v) == pytest.approx(1, abs=0.1), n
        assert float(half.sums[n].sum() / v) == pytest.approx(1, abs=0.25), n
    assert not single.by_function and not cast.by_function and cast.precision == "bf16"
    assert all(s.dtype == torch.float32 for s in half.sums.values()) and all(
        s.dtype == torch.float64 for s in single.sums.values()
    )


@pytest.mark.filterwarnings("ignore:.*left to autograd")
@pytest.mark.parametrize("name", ["bert", "opt"])
def test_gradients_that_the_caller_holds_are_left_as_they_are(name):
    model = model_of(name)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    empirical_fisher(model, [batch_of(LOSS.get(name, "mlm"))])
    assert all(bool((p.grad == 3).all()) for p in model.parameters())


def test_rows_without_a_label_do_not_count():
    model, batch = model_of("bert"), batch_of("mlm")
    batch["labels"][1] = -100
    rest = {k: v[[0, 2, 3]] for k, v in batch.items()}
    ours, right = empirical_fisher(model, [batch]), empirical_fisher(model, [rest])
    assert ours.n_samples == right.n_samples == 3
    for n, v in right.sums.items():
        torch.testing.assert_close(ours.sums[n], v, rtol=1e-9, atol=1e-16)


def test_a_loss_that_couples_samples_is_refused():
    def contrastive(m, b):
        z = F.normalize(m.bert(b["input_ids"]).last_hidden_state.mean(1), dim=-1)
        return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)), reduction="none")

    for lengths in ((9, 9, 9), (9, 5, 12)):
        with pytest.raises(ValueError, match="depends on the other samples"):
            empirical_fisher(model_of("bert"), [batch_of("mlm", lengths)], loss=contrastive)


def test_noise_that_stays_on_in_evaluation_mode_is_named():
    model = model_of("bert")
    with gaussian_dropout(model, 0.2, released=True):
        with pytest.raises(ValueError, match="model: gives another loss for the same batch in evaluation mode; take"):
            empirical_fisher(model, [batch_of("mlm", (9, 5, 12))])
        with pytest.raises(ValueError, match="model: the hidden states .* are others each time in evaluation mode"):
            split_by_length(model, 2)
    empirical_fisher(model, [batch_of("mlm", (9, 5, 12))])


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


@pytest.mark.filterwarnings("ignore:.*left to autograd")
def test_weights_that_are_not_finite_are_named():
    model = model_of("bert")
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight[0].fill_(float("nan"))
    with pytest.raises(ValueError, match="is not finite after batch 1"):
        empirical_fisher(model, [batch_of("mlm")])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_on_a_gpu(level):
    right = empirical_fisher(model_of("albert"), [batch_of("mlm")], level)
    ours = empirical_fisher(model_of("albert").float().cuda(), [batch_of("mlm")], level)
    cast = empirical_fisher(model_of("albert").float().cuda(), [batch_of("mlm")], level, precision="bf16")
    for n, v in right.sums.items():
        if "key.bias" in n:
            continue
        assert float(ours.sums[n].sum() / v.sum()) == pytest.approx(1, abs=1e-2) and float(
            cast.sums[n].sum() / v.sum()
        ) == pytest.approx(1, abs=0.2), n
    assert not ours.by_function


# ---- merging, files, resuming


def corpus_of(n=40, **options):
    return TextBatches(
        toy_corpus(n), AutoTokenizer.from_pretrained(toy_model_path()), batch_size=4, name="toy", **options
    )


def toy_model():
    return AutoModelForMaskedLM.from_pretrained(toy_model_path())


def same(a: FisherEstimate, b: FisherEstimate, rtol=1e-5):
    assert a.n_samples == b.n_samples
    largest = max(float(v.max()) for v in b.sums.values())
    for n in b.sums:
        torch.testing.assert_close(a.sums[n], b.sums[n], rtol=rtol, atol=1e-9 * largest)


def test_merge_of_shards_is_the_whole(tmp_path):
    model, corpus = toy_model(), corpus_of()
    whole = empirical_fisher(model, corpus, "diagonal")
    a, b = (empirical_fisher(model, corpus.shard(r, 2), "diagonal") for r in range(2))
    same(a + b, whole)
    assert len((a + b).corpora) == 2
    with pytest.raises(ValueError, match="corpora.*disjoint"):
        a + a
    with pytest.raises(ValueError, match="corpora: .* samples of 'toy' are in both"):
        whole + a
    with pytest.raises(ValueError, match="corpora: .* in both"):
        empirical_fisher(model, corpus.draw(0.6, 0)) + empirical_fisher(model, corpus.draw(0.6, 1))
    a.save(tmp_path)
    again = FisherEstimate.load(tmp_path)
    assert list(again.sums) == list(a.sums)
    assert {k: v for k, v in again.__dict__.items() if k != "sums"} == {
        k: v for k, v in a.__dict__.items() if k != "sums"
    }
    assert all(torch.equal(again.sums[n], a.sums[n]) for n in a.sums) and "unit" in json.loads(
        (tmp_path / "fisher.json").read_text()
    )
    with pytest.raises(ValueError, match="level"):
        a + empirical_fisher(model, corpus.shard(1, 2))
    with pytest.raises(ValueError, match="reduction"):
        a + empirical_fisher(model, corpus.shard(1, 2), "diagonal", reduction="sum")
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight.mul_(1.01)
    with pytest.raises(ValueError, match="fingerprint"):
        a + empirical_fisher(model, corpus.shard(1, 2), "diagonal")
    scores, mean = whole.scores(), whole.mean()
    for n in scores:
        assert scores[n] == pytest.approx(float(mean[n].double().mean()), rel=1e-6)


def _ranked(rank, world):
    estimate = sum_over_ranks(empirical_fisher(toy_model(), corpus_of().shard(rank, world)))
    return {"n": torch.tensor(estimate.n_samples), "corpora": torch.tensor(len(estimate.corpora))} | estimate.sums


class _Scaled(nn.Module):
    "A language model some of whose parameters no hook sees."

    def __init__(self):
        super().__init__()
        self.inner = toy_model()
        self.config, self.base_model = self.inner.config, None
        self.z, self.a, self.m = (nn.Parameter(torch.tensor(x)) for x in (1.0, 1.1, 0.9))

    def forward(self, **inputs):
        out = self.inner(**inputs)
        out.logits = out.logits * self.z * self.a**2 * self.m**3
        return out


def _ranked_and_resumed(rank, world, folder):
    torch.manual_seed(0)
    model, part = _Scaled(), corpus_of(16).shard(rank, world)
    if rank == 1:
        empirical_fisher(model, part, checkpoint=folder)
    estimate = sum_over_ranks(empirical_fisher(model, part, checkpoint=folder if rank == 1 else None))
    return estimate.sums


@pytest.mark.filterwarnings("ignore:.*left to autograd")
def test_ranks_add_what_belongs_together(tmp_path):
    torch.manual_seed(0)
    whole = empirical_fisher(_Scaled(), corpus_of(16))
    assert {"z", "a", "m"} <= set(whole.by_function)
    for sums in on_ranks(_ranked_and_resumed, str(tmp_path / "f")):
        for n, v in whole.sums.items():
            torch.testing.assert_close(sums[n], v, rtol=1e-3, atol=1e-9)


def test_sum_over_two_ranks_is_the_whole():
    whole = empirical_fisher(toy_model(), corpus_of())
    for result in on_ranks(_ranked):
        assert result["n"] == whole.n_samples and result["corpora"] == 2
        for n, v in whole.sums.items():
            torch.testing.assert_close(result[n], v, rtol=1e-4, atol=1e-12)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_fisher import corpus_of, toy_model
from isoreg.fisher import empirical_fisher
def progress(done):
    if done == 7: os.kill(os.getpid(), signal.SIGKILL)
empirical_fisher(toy_model(), corpus_of(), "diagonal", checkpoint={folder!r}, every=2, progress=progress)
"""


def test_what_would_be_wrong_in_silence_is_refused(tmp_path):
    from torch.utils.data import DataLoader

    from isoreg.trainer import split_by_length

    model, batches = toy_model(), list(corpus_of())
    shuffled = DataLoader(batches, batch_size=None, shuffle=True)
    with pytest.raises(ValueError, match="batches: a shuffling loader"):
        empirical_fisher(model, shuffled, checkpoint=tmp_path / "f", corpus={"name": "toy"})
    with pytest.raises(ValueError, match=r"model: reads its batches in groups; call split_by_length\(model, 1\)"):
        empirical_fisher(split_by_length(model, 2), batches)
    same(empirical_fisher(split_by_length(model, 1), batches), empirical_fisher(toy_model(), batches))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_has_the_scores_of_the_model(wrap):
    same(empirical_fisher(wrap(toy_model()), corpus_of(8)), expected := empirical_fisher(toy_model(), corpus_of(8)))
    rows = list(corpus_of(8))
    assert empirical_fisher(wrap(toy_model()), rows).sums.keys() == expected.sums.keys()


def test_a_model_of_ones_own_that_holds_another_is_no_wrapper():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = toy_model()

        def forward(self, **inputs):
            return self.module(**inputs).logits * 2

    seen = []

    def loss(model, batch):
        seen.append(type(model))
        logits = model(**{k: v for k, v in batch.items() if k != "labels"})
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)

    empirical_fisher(Scaled(), list(corpus_of(8)), loss=loss)
    assert set(seen) == {Scaled}


def test_a_killed_estimate_goes_on(tmp_path):
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "f"))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    done = FisherEstimate.load(tmp_path / "f").batches_done
    assert done == 6 and len(list((tmp_path / "f").iterdir())) == 2
    seen = []
    again = empirical_fisher(toy_model(), corpus_of(), "diagonal", checkpoint=tmp_path / "f", progress=seen.append)
    assert seen == [7, 8, 9, 10]
    same(again, empirical_fisher(toy_model(), corpus_of(), "diagonal"))
    with pytest.raises(ValueError, match="checkpoint.*corpora"):
        empirical_fisher(toy_model(), corpus_of(seed=1), "diagonal", checkpoint=tmp_path / "f")
    with pytest.raises(ValueError, match="checkpoint.*level"):
        empirical_fisher(toy_model(), corpus_of(), checkpoint=tmp_path / "f")
    small = corpus_of()
    small.batch_size = 2
    with pytest.raises(ValueError, match="checkpoint.*corpora"):
        empirical_fisher(toy_model(), small, "diagonal", checkpoint=tmp_path / "f")
    with pytest.raises(ValueError, match="corpus: a checkpoint of batches that do not describe themselves"):
        empirical_fisher(toy_model(), list(corpus_of()), checkpoint=tmp_path / "g")
    (tmp_path / "f" / "fisher.json").write_text("{")
    with pytest.raises(ValueError, match="no complete estimate"):
        FisherEstimate.load(tmp_path / "f")


# ---- bad input


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(level="row"), "level: 'row'"),
        (dict(loss="mse"), "loss: 'mse'"),
        (dict(reduction="max"), "reduction: 'max'"),
        (dict(sample="token"), "sample: 'token'"),
        (dict(precision="fp8"), "precision: 'fp8'"),
    ],
)
def test_unknown_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        empirical_fisher(model_of("bert"), [batch_of("mlm")], **wrong)


def test_bad_batches_and_models():
    model = model_of("bert")
    with pytest.raises(ValueError, match="batches: no sample"):
        empirical_fisher(model, [])
    with pytest.raises(ValueError, match="something to predict"):
        empirical_fisher(model, [batch_of("mlm") | {"labels": torch.full((4, 12), -100)}])
    with pytest.raises(ValueError, match="batches: is a dict"):
        empirical_fisher(model, batch_of("mlm"))
    with pytest.raises(ValueError, match="has no labels"):
        empirical_fisher(model, [{"input_ids": torch.ones(2, 3, dtype=torch.long)}])
    with pytest.raises(ValueError, match="reduction: 'sum' is for the named"):
        empirical_fisher(model, [batch_of("mlm")], loss=lambda m, b: None, reduction="sum")
    with pytest.raises(ValueError, match="one loss for each"):
        empirical_fisher(model, [batch_of("mlm")], loss=lambda m, b: m(**b).loss)
    with pytest.raises(ValueError, match="no parameter requires"):
        empirical_fisher(model_of("bert").requires_grad_(False), [batch_of("mlm")])
    assert all(p.requires_grad for p in model.parameters()) and not any(m._forward_hooks for m in model.modules())
    boom = lambda m, b: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        empirical_fisher(model, [batch_of("mlm")], loss=boom)
    assert all(p.requires_grad for p in model.parameters()) and not any(m._forward_hooks for m in model.modules())


def test_agreement_measures():
    model, corpus = toy_model(), corpus_of(120)
    full = empirical_fisher(model, corpus, "diagonal")
    for row in agreement(full, full):
        assert (
            row["pearson"] == pytest.approx(1)
            and row["spearman"] == pytest.approx(1)
            and row["overlap"] == 1
            and row["difference"] == 0
        )
    few, many = (agreement(empirical_fisher(model, corpus.draw(s, 1), "diagonal"), full)[0] for s in (0.03, 0.5))
    assert (
        few["spearman"] < many["spearman"] < 1
        and few["overlap"] < many["overlap"] < 1
        and few["difference"] > many["difference"]
    )
    with pytest.raises(ValueError, match="part: level"):
        agreement(empirical_fisher(model, corpus), full)
    with pytest.raises(ValueError, match="top"):
        agreement(full, full, (0,))


def test_agreement_by_default_is_that_of_the_paper_and_does_not_depend_on_the_scale():
    full = empirical_fisher(toy_model(), corpus_of(60), "diagonal")
    tiny = copy.deepcopy(full)
    for values in tiny.sums.values():
        values *= 1e-6
    assert [row["top"] for row in agreement(full, full)] == [5, 1, 0.5, 0.25]
    for row, same_row in zip(agreement(tiny, full), agreement(full, full), strict=True):
        assert row["tensors"] == same_row["tensors"] and row["difference"] == pytest.approx(0, abs=1e-6)


def test_an_estimate_is_kept_every_so_many_batches_in_a_folder_that_is_made(tmp_path):
    held, folder = [], tmp_path / "new" / "f"
    look = lambda done: held.append(
        FisherEstimate.load(folder).batches_done if (folder / "fisher.json").exists() else 0
    )
    empirical_fisher(toy_model(), corpus_of(), "diagonal", checkpoint=folder, every=3, progress=look)
    assert held == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]


def test_a_checkpoint_of_other_trainable_parameters_is_refused(tmp_path):
    def stop(done):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        empirical_fisher(toy_model(), corpus_of(), checkpoint=tmp_path, every=1, progress=stop)
    frozen = toy_model()
    frozen.bert.embeddings.requires_grad_(False)
    with pytest.raises(ValueError, match="checkpoint: .* another numel"):
        empirical_fisher(frozen, corpus_of(), checkpoint=tmp_path)


def test_a_checkpoint_that_could_not_be_written_is_refused_before_the_first_batch(tmp_path):
    begun, batches = [], list(corpus_of(4))
    estimate = lambda **o: empirical_fisher(toy_model(), batches, progress=begun.append, **o)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        estimate(checkpoint=tmp_path / "file", corpus={"of": "a"})
    with pytest.raises(ValueError, match="corpus: cannot be written as JSON"):
        estimate(checkpoint=tmp_path / "new", corpus={"file": tmp_path})
    with pytest.raises(ValueError, match="loss: .* has no name"):
        estimate(checkpoint=tmp_path / "new", corpus={"of": "a"}, loss=lambda m, b: m(**b).logits.sum((1, 2)))
    assert not begun
    for _ in range(2):  # a tuple comes back from JSON as a list
        estimate(checkpoint=tmp_path / "new", corpus={"shape": (1, 2)})
    (tmp_path / "new" / "fisher-mine.safetensors").write_text("")
    estimate(checkpoint=tmp_path / "new", corpus={"shape": (1, 2)})
    assert (tmp_path / "new" / "fisher-mine.safetensors").exists()


class Experts(nn.Module):
    "Expert 1 takes the ids 8 and 9: of no sample in the first batch, of as many tokens as samples in the second."

    def __init__(self):
        super().__init__()
        self.embed, self.experts = nn.Embedding(10, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids):
        states = self.embed(ids)
        out = torch.zeros_like(states)
        for k, expert in enumerate(self.experts):
            chosen = (ids >= 8) == bool(k)
            if chosen.any():
                out[chosen] = expert(states[chosen])
        return out


@pytest.mark.filterwarnings("ignore:.* parameters are left to autograd")
def test_an_expert_that_the_trial_does_not_use_against_a_loop():
    torch.manual_seed(0)
    model, first, second = Experts(), torch.randint(0, 8, (4, 6)), torch.randint(0, 8, (4, 6))
    second[0, :4] = torch.tensor([8, 9, 9, 8])
    loss = lambda m, b: m(b["x"]).square().sum((1, 2))
    ours = empirical_fisher(model, [{"x": first}, {"x": second}], loss=loss)
    total = {n: 0.0 for n, _ in model.named_parameters()}
    for row in torch.cat([first, second]):
        gradients = torch.autograd.grad(loss(model, {"x": row[None]})[0], list(model.parameters()), allow_unused=True)
        for n, g in zip(total, gradients, strict=True):
            total[n] += 0.0 if g is None else float(g.square().sum())
    assert {n: float(s) for n, s in ours.sums.items()} == pytest.approx(total, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.* parameters are left to autograd")
def test_models_that_the_tape_cannot_follow_are_left_to_autograd():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.at, self.out = nn.Embedding(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.at(torch.arange(6)[None]).repeat(len(x), 1, 1) * x[..., None])

    torch.manual_seed(0)
    model, x = Repeated(), torch.randn(4, 6)
    loss = lambda m, b: m(b["x"]).square().sum((1, 2))
    ours = empirical_fisher(model, [{"x": x}], loss=loss).sums["at.weight"]
    each = [torch.autograd.grad(loss(model, {"x": r[None]})[0], model.at.weight)[0].square().sum() for r in x]
    assert float(ours) == pytest.approx(float(sum(each)), rel=1e-4)
    model.requires_grad_(False), model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    for without in (loss, lambda m, b: m(b["x"]).square().sum((1, 2)).detach()):
        with pytest.raises(ValueError, match="loss: depends on no parameter that requires a gradient"):
            empirical_fisher(model, [{"x": x}], loss=without)


def test_entries_that_are_zero_in_both_do_not_agree():
    full, part = torch.zeros(10_000), torch.zeros(10_000)
    full[:200], part[:100] = torch.rand(200) + 1, torch.rand(100) + 1
    about = dict(n_samples=1, level="diagonal", loss="mlm", numel={"w": 10_000})
    one, two = (FisherEstimate({"w": x}, **about) for x in (part, full))
    assert [r["overlap"] for r in agreement(one, two, top=(5, 2))] == [0.5, 0.5]


def test_scores_that_are_a_list_are_refused(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"tensor_scores": [1, 2]}))
    with pytest.raises(ValueError, match="scores: .* holds no tensor scores"):
        load_scores(tmp_path / "s.json")


MEMORY = """
import resource, torch
from transformers import BertConfig, BertForMaskedLM
from isoreg.corpus import sample_losses
from isoreg.fisher import empirical_fisher
torch.set_num_threads(1)
model = BertForMaskedLM(BertConfig(vocab_size=30522, hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512)).eval()
ids = torch.randint(1000, 30000, (16, 128))
labels = torch.where(torch.rand(16, 128) < 0.15, ids, -100); labels[:, 1] = ids[:, 1]
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
small = {k: v[:2, :8] for k, v in batch.items()}
sample_losses(model, small).sum().backward(); model.zero_grad()
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
for what in ("plain", "tensor", "diagonal"):
    model.zero_grad()
    base = rss()
    open("/proc/self/clear_refs", "w").write("5")      # forget the peak so far
    if what == "plain":
        for _ in range(2): model.zero_grad(); sample_losses(model, batch).sum().backward()
    else: empirical_fisher(model, [batch, batch], what)
    print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")) - base)
"""  # noqa: E501


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_stays_below_twice_a_training_step(tmp_path):
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once, as on any day
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=env)
    if "clear_refs" in done.stderr:
        pytest.skip("the peak cannot be reset here")
    plain, tensor, diagonal = map(int, done.stdout.split())
    assert tensor < 1.5 * plain and diagonal < 2 * plain


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_checkpoints_need_a_whole_number_of_batches(every):
    with pytest.raises(ValueError, match=f"every: {every}"):
        empirical_fisher(model_of("bert"), [batch_of("mlm")], every=every)


def tokenizer_of(name: str):
    tokenizer = AutoTokenizer.from_pretrained(toy_model_path())
    if name == "t5":
        tokenizer.eos_token = "[SEP]"
        tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(10)], special_tokens=True)
    return tokenizer


def causal_model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=H, n_layer=1, n_head=2, n_positions=64))


def two_part_model():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=H, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


@pytest.mark.parametrize("name, loss, make", [("gpt2", "clm", causal_model), ("t5", "seq2seq", two_part_model)])
def test_the_loss_is_that_of_the_batches(name, loss, make):
    model, batches = make(), TextBatches(toy_corpus(12), tokenizer_of(name), loss=loss)
    ours = empirical_fisher(model, batches)
    assert (
        ours.loss == loss
        and ours.sums
        == empirical_fisher(model, batches, loss=loss).sums
        == empirical_fisher(model, list(batches), loss=loss).sums
    )
    with pytest.raises(
        ValueError, match=f"loss: 'mlm', but the batches were made for '{loss}'; leave it out or rebuild"
    ):
        empirical_fisher(model, batches, loss="mlm")
    with pytest.raises(ValueError, match="loss: 'clm', but the batches were made for 'mlm'"):
        empirical_fisher(causal_model(), corpus_of(12), loss="clm")


def test_loss_and_model_must_fit():
    text = TextBatches(toy_corpus(12), tokenizer_of("t5"), loss="seq2seq")
    assert empirical_fisher(two_part_model(), list(text)).loss == "seq2seq"
    for batches, loss in ((corpus_of(12), None), (corpus_of(12), "mlm"), (list(text), "clm")):
        with pytest.raises(
            ValueError, match=r"loss: '(mlm|clm)', but T5ForConditionalGeneration is an encoder-decoder; use 'seq2seq'"
        ):
            empirical_fisher(two_part_model(), batches, loss=loss)
    with pytest.raises(ValueError, match="loss: 'seq2seq', but BertForMaskedLM is no encoder-decoder"):
        empirical_fisher(toy_model(), text)
    for sample in ("sequence", "position"):
        with pytest.raises(
            ValueError, match="model: T5Model has no language-model head; load it by AutoModelForSeq2SeqLM"
        ):
            empirical_fisher(T5Model(two_part_model().config), text, sample=sample)
    for model, batches in ((toy_model().bert, corpus_of(12)), (causal_model().transformer, corpus_of(12, loss="clm"))):
        with pytest.raises(
            ValueError, match="model: .* gives no logits; it needs a language-model head, .*AutoModelForMaskedLM"
        ):
            empirical_fisher(model, batches)


class _Own(GPT2LMHeadModel):
    "A class of one's own."


def test_the_class_of_a_model_decides_its_loss():
    causal, own, masked = causal_model(), _Own(causal_model().config), toy_model()
    text, cut = corpus_of(12, loss="clm"), corpus_of(12)
    for model, batches, loss in ((causal, text, "clm"), (own, text, "clm"), (masked, cut, "mlm")):
        ours, right = empirical_fisher(model, list(batches)), empirical_fisher(model, list(batches), loss=loss)
        assert ours.loss == loss and ours.sums == right.sums


@pytest.mark.parametrize("given", ["argument", "batches", "both"])
def test_a_loss_of_another_class_is_refused(given):
    causal, own, masked = causal_model(), _Own(causal_model().config), toy_model()
    for model in (causal, own, masked):
        kind, right, wrong = ("masked", "mlm", "clm") if model is masked else ("causal", "clm", "mlm")
        made = right if given == "argument" else wrong
        batches = corpus_of(12, loss=made) if given != "argument" else list(corpus_of(12, loss=made))
        name = type(model).__name__
        words = f"loss: '{wrong}', but {name} is a {kind} language model; use '{right}', for the batches too"
        with pytest.raises(ValueError, match=words):
            empirical_fisher(model, batches, loss=None if given == "batches" else wrong)


@pytest.mark.filterwarnings("ignore:.*left to autograd")
def test_a_class_that_does_not_tell_its_loss_is_asked():
    model, batches = _Scaled(), corpus_of(8)
    words = (
        "loss: the class _Scaled does not tell it; give loss='mlm' or loss='clm' or loss='seq2seq', "
        "or a function (model, batch) -> losses of shape (batch,)"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        empirical_fisher(model, list(batches))
    assert empirical_fisher(model, list(batches), loss="mlm").loss == empirical_fisher(model, batches).loss == "mlm"


def test_batches_made_for_the_other_loss_are_refused():
    tokenizer, causal, masked = tokenizer_of("bert"), causal_model(), toy_model()
    rows = [tokenizer(t) for t in toy_corpus(8)]
    collate = lambda **options: dict(DataCollatorForLanguageModeling(tokenizer, **options)(rows))
    text, cut = collate(mlm=False), collate(seed=0)
    assert empirical_fisher(masked, [cut]).loss == "mlm" and empirical_fisher(causal, [text]).loss == "clm"
    answers = text["labels"].clone()
    answers[:, :3] = -100  # what comes before is given
    assert empirical_fisher(causal, [text | {"labels": answers}]).n_samples == 8
    words = "batches: batch 2 has labels other than its input_ids, .* the loss is 'clm'; give .*loss='clm'.*mlm=False"
    with pytest.raises(ValueError, match=words):
        empirical_fisher(causal, [text, cut])
    words = "batches: batch 1 has its input_ids as labels, .* the loss is 'mlm'; give .*loss='mlm'.*mlm=True"
    with pytest.raises(ValueError, match=words):
        empirical_fisher(masked, [text])


def test_what_is_no_row_of_batches_is_named():
    model, whole = toy_model(), list(corpus_of(8))
    rows = [{k: v[0] for k, v in b.items()} for b in whole]
    for batches, words in (
        (whole[0], "batches: is a dict; give TextBatches or an iterable of dicts"),
        (tokenizer_of("bert")(["a dog"], return_tensors="pt"), r"batches: is a BatchEncoding; .*\[batch\]"),
        (None, "batches: is a NoneType"),
        (whole[0]["input_ids"], "batches: is a Tensor"),
        ([tuple(b.values()) for b in whole], "batches: batch 1 is a tuple; give TextBatches"),
        (rows, r"batch: its labels are of shape \(\d+,\); need a tensor .samples, length., as TextBatches"),
        ([{k: v.tolist() for k, v in r.items()} for r in rows], "batch: its labels are a list"),
        ([{"text": "a dog sleeps."}], "batch: has no labels, .* it has text; TextBatches makes"),
    ):
        with pytest.raises(ValueError, match=words):
            empirical_fisher(model, batches)


def test_the_file_that_was_saved_is_read(tmp_path):
    estimate = empirical_fisher(toy_model(), corpus_of(8))
    file = estimate.save(tmp_path / "fish")
    assert file.name == "fisher.json" and FisherEstimate.load(file).sums == estimate.sums
    assert load_scores(file) == load_scores(str(file.parent)) == estimate.scores()
    plain = tmp_path / "fisher.json"  # scores of one's own, under that name
    plain.write_text('{"a": 1, "b": 0.5}')
    assert load_scores(plain) == {"a": 1.0, "b": 0.5}
    for text in ('{"a": true}', '{"a": "1"}', "{}", "[1]"):
        plain.write_text(text)
        with pytest.raises(ValueError, match="holds no tensor scores"):
            load_scores(plain)
    for wrong in (plain, next(file.parent.glob("*.safetensors"))):
        with pytest.raises(ValueError, match="holds no complete estimate"):
            FisherEstimate.load(wrong)
