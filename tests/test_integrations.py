"""Penalties and dropout inside other libraries, each against a plain computation: pip install '.[integrations]'."""

import copy
import tempfile
import warnings

import pytest
import torch
import transformers as hf

from isoreg.fisher import empirical_fisher
from isoreg.isoscore import isoscore
from isoreg.istar import CosReg, IStar, measure_isotropy, reference_covariance
from isoreg.dropout import apply_dropout, set_dropout
from isoreg.sites import dropout_sites
from isoreg.states import hidden_states
from isoreg.experiments.toy import toy_model_path, toy_pairs
from isoreg.trainer import IsotropyLog, PenaltyMixin, PenaltyTrainer, split_by_length

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
TEXT = dict(vocab_size=60, **SMALL)


def rows(n=16):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 60, (n, 12), generator=draw)
    mask = (torch.arange(12) < torch.randint(4, 13, (n, 1), generator=draw)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids[:, 0] < 30).long()}


def examples(batch):
    return [dict(zip(batch, values)) for values in zip(*batch.values())]


def bert(kind=hf.BertForSequenceClassification):
    torch.manual_seed(0)
    return kind(hf.BertConfig(**TEXT))


def plain_term(states, mask, lam):
    "The weighted term over layers 1..L, from the rows themselves."
    tokens = torch.cat([h[mask.bool()] for h in states[1:]])
    return lam * (1 - isoscore(tokens.double()))


def arguments(kind=hf.TrainingArguments, **settings):
    common = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1, max_steps=1)
    return kind(tempfile.mkdtemp(), **common | dict(per_device_train_batch_size=16) | settings)


def without_dropout(model):
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    return model


# ---- PEFT


def lora(model, **settings):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, **settings))


def test_a_model_whose_forward_names_no_input_has_hidden_states():
    peft, batch = pytest.importorskip("peft"), rows() | {"use_cache": False}
    mixed = peft.get_peft_model(bert(), peft.LoraConfig(r=2), mixed=True)  # adds 0 before it is trained
    for a, b in zip(hidden_states(mixed.eval(), batch)[0], hidden_states(bert().eval(), batch)[0], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda model: lora(model, target_modules="all-linear")])
def test_a_wrapped_model_reads_its_batches_in_groups(wrap):
    model, batch = wrap(bert()).eval(), {k: v for k, v in rows(8).items() if k != "labels"}
    batch["attention_mask"] = torch.ones(8, 12, dtype=torch.long)
    batch["attention_mask"][:5, 3:] = 0
    read, want = [], model(**batch).logits
    embeddings = next(m for n, m in model.named_modules() if n.endswith("embeddings"))
    embeddings.register_forward_hook(lambda m, args, kwargs, out: read.append(out.shape[1]), with_kwargs=True)
    assert split_by_length(model, 4) is model
    read.clear()
    torch.testing.assert_close(model(**batch).logits, want, rtol=1e-4, atol=1e-5)
    assert len(read) == 4 and min(read) == 3


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("targets", [["query", "value"], "all-linear"])
def test_sites_of_a_model_with_adapters_are_those_of_the_model(dropout, targets):
    plain = bert()
    adapted = lora(bert(), lora_dropout=dropout, target_modules=targets)
    told = lambda sites: [(s.name, s.kind, s.p, s.tensors, s.sizes) for s in sites]
    assert told(dropout_sites(adapted)) == told(dropout_sites(plain))
    layer = adapted.base_model.model.bert.encoder.layer[0].attention.self
    assert not layer.query.disable_adapters  # switched on again
    if dropout:
        assert layer.query.lora_dropout["default"].p == dropout


def test_scores_and_schedules_of_the_plain_model_apply_to_the_adapted_one():
    batch = rows()
    labels = batch["input_ids"].where(torch.arange(12) % 4 == 1, -100)
    scores = empirical_fisher(bert(hf.BertForMaskedLM), [batch | {"labels": labels}]).scores()
    before, after = bert(), lora(bert(), target_modules="all-linear")
    rates = apply_dropout(before, "guided", scores=scores)["rates"]
    assert apply_dropout(after, "guided", scores=scores)["rates"] == rates and len(set(rates.values())) > 3
    assert {s.name: s.p for s in dropout_sites(lora(before, target_modules=["query"]))} == rates  # applied before
    other = lora(bert(), target_modules=["query"])
    set_dropout(other, rates)
    assert {s.name: s.p for s in dropout_sites(other)} == rates


def test_the_penalty_reaches_the_adapters_in_the_trainer():
    batch, lam = rows(), 0.5
    adapted = lora(without_dropout(bert()), target_modules=["query", "value"])
    adapted.train()
    output = copy.deepcopy(adapted)(**batch, output_hidden_states=True)
    expected = float(output.loss + plain_term(output.hidden_states, batch["attention_mask"], lam))
    trainer = PenaltyTrainer(adapted, arguments(), train_dataset=examples(batch), penalty=IStar(lam, zeta=0.2))
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    trainer.penalties[0].zeta = 0.0  # a reference is drawn and weighs nothing
    trainer.train()
    assert float(trainer.state.log_history[0]["loss"]) == pytest.approx(expected, rel=1e-3)
    moved = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora_" in n or "classifier" in n for n in moved) and any("lora_" in n for n in moved)
    assert reference_covariance(adapted, [batch], progress=False).shape == (16, 16)


# ---- sentence-transformers


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def sentences(library):
    "The toy encoder without dropout, in training, and a batch of pairs for it."
    model = without_dropout(library.SentenceTransformer(str(toy_model_path()), device="cpu")).train()
    return model, lambda: [model.preprocess(list(column)) for column in zip(*toy_pairs(12))]


def test_the_term_of_a_sentence_loss_is_that_of_its_tokens_and_reaches_the_encoder(sentences):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from isoreg.sentence_transformers import PenaltyLoss

    model, features = sentences
    ranking, weights = MultipleNegativesRankingLoss(model), list(model[0].auto_model.parameters())
    terms = PenaltyLoss(model, ranking, IStar(-2.0, zeta=0))(features(), None)
    inputs = [{k: f[k] for k in ("input_ids", "attention_mask")} for f in features()]
    states = [model[0].auto_model(**f, output_hidden_states=True).hidden_states for f in inputs]
    tokens = torch.cat([h[f["attention_mask"].bool()] for hs, f in zip(states, inputs) for h in hs[1:]])
    expected = {"task_loss": ranking(features(), None), "istar": -2.0 * (1 - isoscore(tokens.double()))}
    assert set(terms) == set(expected)
    for name, value in expected.items():
        assert float(terms[name].detach()) == pytest.approx(float(value.detach()), rel=1e-4)
    ours, theirs = (
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(sum(t.values()), weights, allow_unused=True) if g is not None]
        )
        for t in (terms, expected)
    )
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()


class Guided(torch.nn.Module):
    "A loss that looks at its texts once more without gradient, as guided losses do."

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, features, labels):
        with torch.no_grad():
            self.model(dict(features[0]))
        return self.loss(features, labels)


def test_sentence_losses_in_evaluation_and_what_is_refused(sentences):
    from sentence_transformers.sentence_transformer import losses

    from isoreg.sentence_transformers import PenaltyLoss

    model, features = sentences
    ranking, two = losses.MultipleNegativesRankingLoss(model), [IStar(1.0, zeta=0), IStar(1.0, zeta=0, layers=-1)]
    plain = PenaltyLoss(model, ranking, two)(features(), None)
    assert set(plain) == {"task_loss", "istar", "istar_2"}
    same = PenaltyLoss(model, Guided(model, ranking), torch.nn.ModuleList(two))(features(), None)
    for name, value in plain.items():
        torch.testing.assert_close(same[name], value)
    assert float(PenaltyLoss(model.eval(), ranking, two)(features(), None)) == float(ranking(features(), None))
    assert "forward" not in vars(model.train()[0].auto_model)
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    for encoder, loss in ((model, cached), (copy.deepcopy(model), ranking)):
        with pytest.raises(ValueError, match=f"loss: {type(loss).__name__} did not run this model with a gradient"):
            PenaltyLoss(encoder, loss, two)(features(), None)
    for wrong in (torch.nn.Linear(2, 2), torch.nn.ModuleList([bert(), bert()])):
        with pytest.raises(ValueError, match="model: . transformers encoders"):
            PenaltyLoss(wrong, ranking, two)


@pytest.mark.parametrize("name", ["", "unseen"])
def test_an_evaluator_of_isotropy_names_the_best_model(library, sentences, name):
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from isoreg.sentence_transformers import IsotropyEvaluator

    model, texts = sentences[0], [text for pair in toy_pairs(40, 1) for text in pair]
    evaluator, metric = IsotropyEvaluator(texts, name), "_".join(filter(None, ["eval", name, "isoscore"]))
    pairs = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*toy_pairs(32))))))
    often = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=3)
    best = dict(load_best_model_at_end=True, metric_for_best_model=metric, greater_is_better=True, learning_rate=1e-2)
    args = arguments(library.SentenceTransformerTrainingArguments, **often, **best)
    trainer = library.SentenceTransformerTrainer(
        model, args, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model), evaluator=evaluator
    )
    trainer.train()
    logged = [e[metric] for e in trainer.state.log_history if metric in e]
    assert len(logged) == 3 and trainer.state.best_metric == max(logged) and evaluator.primary_metric in metric
    vectors = model.eval().encode(list(dict.fromkeys(texts)))
    assert max(logged) == pytest.approx(float(isoscore(vectors, correction="ustat")), rel=1e-3)
    assert all(f"{metric}_stderr" in e for e in trainer.state.log_history if metric in e)


# ---- causal language models


def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT | {"num_hidden_layers": 3}, pad_token_id=0, eos_token_id=1))


def test_batches_without_padding_have_the_penalty_of_padded_ones():
    batch, model = rows(8), llama().eval()
    texts = [{"input_ids": i[m.bool()].tolist()} for i, m in zip(batch["input_ids"], batch["attention_mask"])]
    row = hf.DataCollatorWithFlattening()(texts)
    padded = {k: batch[k] for k in ("input_ids", "attention_mask")}
    flat = {k: row[k] for k in ("input_ids", "position_ids")}
    assert flat["input_ids"].shape[0] == 1 and len(set(map(len, (t["input_ids"] for t in texts)))) > 1
    for penalty in (IStar(1.0, zeta=0), IStar(1.0, correction="ustat"), CosReg(1.0)):
        terms = [float(penalty(*hidden_states(model, b)).detach()) for b in (padded, flat)]
        assert terms[0] == pytest.approx(terms[1], rel=1e-4)
    scores = [measure_isotropy(model, [b]) for b in (padded, flat)]
    assert scores[0]["union"] == pytest.approx(scores[1]["union"], rel=1e-4)
    assert scores[0]["points"] == scores[1]["points"]


@pytest.mark.parametrize("padding_free", [False, True])
def test_in_the_trainer_of_trl_the_penalty_trains(padding_free):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    class PenaltySFTTrainer(PenaltyMixin, trl.SFTTrainer):
        "The trainer of TRL, with penalties."

    torch.manual_seed(0)
    texts = datasets.Dataset.from_list([{"input_ids": torch.randint(2, 60, (5 + i % 7,)).tolist()} for i in range(16)])
    scores = {}
    for lam in (-1.0, 1.0):
        settings = dict(max_steps=6, learning_rate=3e-3, bf16=False, max_length=None, padding_free=padding_free)
        args = arguments(trl.SFTConfig, gradient_checkpointing=False, **settings)
        tokenizer = AutoTokenizer.from_pretrained(toy_model_path())
        penalty = IStar(lam, correction="ustat")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="penalty: the term of this IStar has no gradient")
            trainer = PenaltySFTTrainer(llama(), args, train_dataset=texts, processing_class=tokenizer, penalty=penalty)
            trainer.train()
        logs = [e for e in trainer.state.log_history if "istar" in e]
        assert all(float(e["loss"]) == pytest.approx(e["task_loss"] + e["istar"], abs=1e-3) for e in logs)
        scores[lam] = logs[-1]["isoscore"]
    assert scores[-1.0] < scores[1.0] / 2


# ---- images and choices


def test_the_choices_of_a_question_are_rows_of_their_own():
    torch.manual_seed(0)
    model = hf.BertForMultipleChoice(hf.BertConfig(vocab_size=50, **SMALL))
    mask = (torch.arange(9) < torch.randint(4, 10, (8, 3, 1))).long()
    batch = {"input_ids": torch.randint(1, 50, (8, 3, 9)), "attention_mask": mask, "labels": torch.arange(8) % 3}
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    states = model.eval().bert(*(v.flatten(0, 1) for v in inputs.values()), output_hidden_states=True).hidden_states
    tokens = torch.cat([h[mask.flatten(0, 1).bool()] for h in states[1:]])
    assert measure_isotropy(model, [inputs])["union"] == pytest.approx(float(isoscore(tokens.double())), rel=1e-4)
    penalty = IStar(0.5, correction="ustat")
    trainer = PenaltyTrainer(model, arguments(), train_dataset=examples(batch), penalty=penalty)
    trainer.train()
    assert "istar" in trainer.state.log_history[0]


def test_mask_fn_tells_which_patches_count():
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, **SMALL))
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 2}
    patches = lambda inputs, states: torch.arange(states[-1].shape[1]).expand(states[-1].shape[:2]) > 0
    with torch.no_grad():
        states = model.eval()(batch["pixel_values"], output_hidden_states=True).hidden_states
    score = lambda first: float(isoscore(torch.cat([h[:, first:].flatten(0, 1) for h in states[1:]]).double()))
    images = [{"pixel_values": batch["pixel_values"]}]
    assert measure_isotropy(model, images)["union"] == pytest.approx(score(0), rel=1e-4)
    assert measure_isotropy(model, images, mask_fn=patches)["union"] == pytest.approx(score(1), rel=1e-4) != score(0)
    without_dropout(model)
    penalty = IStar(1.0, zeta=0)
    log, data = IsotropyLog(images, mask_fn=patches), examples(batch)
    trainer = PenaltyTrainer(model, arguments(), train_dataset=data, penalty=penalty, mask_fn=patches, callbacks=[log])
    trainer.train()
    assert log.history[0]["union"] == pytest.approx(score(1), rel=1e-4)
    assert float(trainer.state.log_history[0]["isoscore"]) == pytest.approx(score(1), rel=1e-3)
    drawn = IStar(1.0, zeta=0.2)
    refreshed = PenaltyTrainer(model, arguments(), train_dataset=examples(batch), penalty=drawn, mask_fn=patches)
    own = reference_covariance(model, images, mask_fn=patches, progress=False)
    assert not torch.allclose(own, reference_covariance(model, images, progress=False))
    refreshed.train()
    torch.testing.assert_close(drawn.reference_cov, own, rtol=1e-3, atol=1e-5)


def test_a_model_of_images_trains_with_the_schedule_in_force_and_not_without_it(tmp_path):
    images = torch.randn(8, 3, 16, 16)
    model = hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, **SMALL))
    batch, data = {"pixel_values": images}, examples({"pixel_values": images, "labels": torch.arange(8) % 2})
    sites = [s.name for s in dropout_sites(model, batch=batch) if s.kind != "classifier"]
    apply_dropout(model, dict.fromkeys(sites, 0.03), batch=batch)
    PenaltyTrainer(model, arguments(), train_dataset=data).train()
    assert model.config.dropout_schedule["rates"] == dict.fromkeys(sites, 0.03)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="batch: none given"):
        PenaltyTrainer(type(model).from_pretrained(tmp_path), arguments(), train_dataset=data).train()


# ---- the Fisher information with adapters


def tokens():
    ids = torch.arange(3, 27).view(4, 6)
    return {"input_ids": ids, "attention_mask": torch.ones(4, 6, dtype=torch.long), "labels": ids}


def test_the_fisher_information_of_a_language_model_with_adapters():
    peft, found = pytest.importorskip("peft"), []
    for task in (None, "CAUSAL_LM"):
        settings = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(llama(), settings)
        found.append(empirical_fisher(model, [tokens()], loss="clm").scores())
        with pytest.raises(ValueError, match="loss: 'mlm', but LlamaForCausalLM was made for 'clm'"):
            empirical_fisher(model, [tokens()], loss="mlm")
    assert found[0] == found[1] and len(found[0]) == 6 and min(found[0].values()) > 0


def test_learned_prompts_are_no_part_of_a_loss():
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="model: gives logits of shape"):
        empirical_fisher(peft.get_peft_model(llama(), prompt), [tokens()], loss="clm")


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_states_without_a_learned_prompt_are_refused(kind):
    peft = pytest.importorskip("peft")
    prompt = getattr(peft, kind)(task_type="SEQ_CLS", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="model: its learned prompt"):
        measure_isotropy(peft.get_peft_model(bert(), prompt), [rows()])


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert"])
def test_scores_of_a_masked_model_guide_a_classifier(kind):
    "Whichever name of the tied embeddings comes first in the masked model."
    config = getattr(hf, f"{kind}Config")(**TEXT, pad_token_id=1)
    batch = rows(4)
    batch["labels"] = batch["input_ids"].masked_fill(torch.arange(12) % 3 > 0, -100)
    estimate = empirical_fisher(getattr(hf, f"{kind}ForMaskedLM")(config), [batch])
    assert not any(name.startswith("lm_head.decoder.weight") for name in estimate.sums)
    done = apply_dropout(getattr(hf, f"{kind}ForSequenceClassification")(config), "guided", scores=estimate)
    assert done["mean"] == pytest.approx(0.05)
