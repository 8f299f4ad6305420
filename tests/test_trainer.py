"""Penalties in the transformers Trainer against its traps; references, schedules and isotropy; groups by length."""

import copy
import inspect
import itertools
import random
import tempfile
import types
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from ranks import on_ranks
from small_models import rates
from small_transformers import CONFIG, as_released, model_and_batches, of_two_stacks
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from isoreg.dropout import apply_dropout
from isoreg.isoscore import isoscore_star
from isoreg.istar import CosReg, IStar, measure_isotropy
from isoreg.sites import dropout_sites
from isoreg.trainer import IsotropyLog, PenaltyMixin, PenaltyTrainer, ReferenceRefresh
from isoreg.trainer import ignores_items, own_batches, split_by_length


def examples(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 60, (n, 8), generator=g)
    return [{"input_ids": i, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(i[0] > 30)} for i in ids]


class InOrder(PenaltyTrainer):
    "Takes the examples as they come, so that runs can be compared."

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


SAVING = dict(steps=-1, num_train_epochs=2, save_strategy="steps", save_steps=2, learning_rate=0.1)  # of 4 an epoch
OFF = dict(report_to="none", use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True, eval_strategy="no")
SGD = dict(optim="sgd", learning_rate=1.0, max_grad_norm=0, weight_decay=0, lr_scheduler_type="constant")


def small_bert(dropout=0.0):
    torch.manual_seed(0)
    rates = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForSequenceClassification(BertConfig(**CONFIG, **rates))


def make_trainer(penalty, data, batch_size=8, accumulation=1, steps=1, dropout=0.0, kind=InOrder, model=None, **given):
    sizes = dict(per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, max_steps=steps)
    args = TrainingArguments(**dict(output_dir=tempfile.mkdtemp()) | sizes | OFF | SGD | given)
    model = model or small_bert(dropout)
    return kind(model, args, train_dataset=data, eval_dataset=examples(16, 9), penalty=penalty)


def gradients(trainer):
    "What one SGD step at rate 1 took off the weights."
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    return {n: before[n] - p.detach() for n, p in trainer.model.named_parameters()}


def assert_same(a, b):
    "Each gradient agrees to 1e-3 of its length (and 1e-5 of all: what SGD takes off float32 weights is rounded)."
    whole = torch.cat([g.flatten() for g in b.values()]).norm()
    assert whole > 0
    for n in b:
        assert (a[n] - b[n]).norm() <= 1e-3 * b[n].norm() + 1e-5 * whole, n


class TokenMean(torch.nn.Module):
    "A penalty that is a mean over examples, so that its batch value is the mean of micro-batch values."

    parts: dict = {}

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states[-1].tanh().mean()


def normalised(outputs, labels, num_items_in_batch=None):
    "A loss of one's own, normalised over the accumulated batch."
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return losses / (len(labels) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("own", [None, normalised])
@pytest.mark.parametrize("penalty, rows", [(None, 8), (TokenMean(), 8), (IStar(-2, zeta=0), 2)])
def test_accumulation_does_not_change_the_gradient(penalty, rows, own):
    found = []
    for size, steps in ((8, 1), (2, 4)):
        trainer = make_trainer(penalty, examples(rows, 0) * (8 // rows), batch_size=size, accumulation=steps)
        trainer.compute_loss_func = own
        found.append(gradients(trainer))
    assert_same(*found)


def test_a_masked_language_model_counts_once_and_its_penalty_may_read_the_labels():
    predicted = lambda inputs, states: inputs["labels"] != -100
    rows = [r | {"labels": r["input_ids"].where(torch.arange(8) % 2 == 0, -100)} for r in examples(2, 0)] * 4
    found, rates = [], dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for size, steps in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model, kind = BertForMaskedLM(BertConfig(**CONFIG, **rates)), partial(InOrder, mask_fn=predicted)
        found.append(gradients(make_trainer(IStar(-2, zeta=0), rows, size, steps, kind=kind, model=model)))
    assert_same(*found)
    penalty = IStar(-2)
    make_trainer(penalty, rows, kind=kind, model=model).train()
    assert penalty.reference_cov.shape == (16, 16)


class OwnHead(BertForMaskedLM):
    "A model of one's own that computes its loss as its parent does."


@pytest.mark.parametrize(
    "ignored, kinds",
    [
        (True, "T5ForConditionalGeneration MarianMTModel BertForPreTraining"),
        (False, "GPT2LMHeadModel RwkvForCausalLM ModernBertForMaskedLM"),
    ],
)
def test_heads_that_ignore_the_number_of_items_are_known(ignored, kinds):
    with torch.device("meta"):
        for kind in (getattr(transformers, name) for name in kinds.split()):
            assert ignores_items(kind(kind.config_class())) == ignored
        assert ignores_items(OwnHead(BertConfig(**CONFIG)))


class PlainInOrder(Trainer):
    "The Trainer of transformers, for comparison."

    def __init__(self, *args, penalty=None, **kwargs):
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_the_log_of_a_second_training_begins_anew():
    penalty = IStar(-1, zeta=0)
    trainer = make_trainer(penalty, examples(40, 0), steps=5, logging_steps=4)  # the last step is not logged
    for lam in (-1, -5):
        penalty.lam = lam
        trainer.train()
        entry = next(e for e in trainer.state.log_history if "loss" in e)
        assert entry["istar"] == pytest.approx(lam * (1 - entry["isoscore"]), rel=1e-4)


def test_label_smoothing_is_left_to_the_trainer():
    """The label smoother normalises by itself; its gradient under accumulation must be the plain Trainer's, the
    penalty's added."""
    arguments, data = dict(batch_size=2, accumulation=4, label_smoothing_factor=0.1), examples(2, 0) * 4
    plain = gradients(make_trainer(None, data, kind=PlainInOrder, **arguments))
    assert_same(gradients(make_trainer(None, data, **arguments)), plain)
    smoothed = gradients(make_trainer(IStar(-2, zeta=0), data, **arguments))
    both, task = (gradients(make_trainer(p, data)) for p in (IStar(-2, zeta=0), None))
    assert_same({n: g - plain[n] for n, g in smoothed.items()}, {n: g - task[n] for n, g in both.items()})


def test_gradient_of_one_step_is_that_of_the_formula():
    data, reference = examples(8, 0), torch.eye(16)
    trainer = make_trainer(IStar(-1.5, 0.2, reference), data)
    model = copy.deepcopy(trainer.model)
    ours = gradients(trainer)
    out = model(**default_data_collator(data), output_hidden_states=True)
    (out.loss - 1.5 * (1 - isoscore_star(torch.cat(out.hidden_states[1:]).flatten(0, 1), reference, 0.2))).backward()
    zero = torch.zeros(())
    assert_same(ours, {n: zero.expand_as(p) if p.grad is None else p.grad for n, p in model.named_parameters()})


def test_evaluation_has_no_penalty_and_no_hidden_states():
    trainer = make_trainer(IStar(-5), examples(8, 0))
    plain = make_trainer(None, examples(8, 0))
    seen = []
    trainer.model.register_forward_hook(lambda m, a, out: seen.append(out.hidden_states))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    assert seen and all(s is None for s in seen)
    prediction = trainer.predict(examples(16, 9)).predictions
    assert prediction.shape == (16, 2)
    assert trainer.model.config.output_hidden_states is False


class Masked:
    "Collate, and put random tokens at random places."

    def __init__(self):
        self.generator = torch.Generator().manual_seed(42)

    def __call__(self, rows):
        batch = default_data_collator(rows)
        place = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return batch | {"input_ids": batch["input_ids"].masked_fill(place, 7)}


def test_lambda_zero_is_the_baseline_bit_for_bit():
    "Also with a collator that has its own generator, and another callback that knows the penalty."
    runs, epochs = [], dict(steps=-1, num_train_epochs=3, optim="adamw_torch", learning_rate=1e-3)
    for penalty in (None, IStar(0.0), IStar(0.0, correction="ustat")):
        warm_up = type("WarmUp", (TrainerCallback,), {"penalty": penalty})
        kind = partial(PenaltyTrainer, callbacks=[warm_up], data_collator=Masked())
        trainer = make_trainer(penalty, examples(64, 0), dropout=0.1, kind=kind, **epochs)
        trainer.train()
        runs.append(trainer.model.state_dict())
    for other in runs[1:]:
        for n in runs[0]:
            assert torch.equal(runs[0][n], other[n]), n


def test_two_penalties_of_one_kind_are_logged_apart():
    "The last of the two steps has one batch of 4 rows, the first has two."
    penalties = [IStar(-1, zeta=0, layers=1), IStar(1, zeta=0, layers=2)]
    trainer = make_trainer(penalties, examples(12, 0), batch_size=4, accumulation=2, steps=2, logging_steps=2)
    trainer.sums.update(calls=3, task_loss=9)  # of a training that was interrupted
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    assert entry["istar"] == pytest.approx(entry["isoscore"] - 1, abs=1e-3)
    assert entry["istar_2"] == pytest.approx(1 - entry["isoscore_2"], abs=1e-3)
    assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["istar"] + entry["istar_2"], abs=1e-3)


class InTwoStacks(PenaltyMixin, Seq2SeqTrainer):
    pass


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_encoder_and_decoder_the_encoder_is_trained(kind):
    model, rows = of_two_stacks(kind), [r | {"labels": r["input_ids"]} for r in ragged(4, 0)]
    batch, penalties = default_data_collator(rows), [IStar(-1), IStar(1, zeta=0), CosReg(1)]
    args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=1, **OFF)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).encoder_hidden_states
    InTwoStacks(model, args, train_dataset=rows, penalty=penalties).train()
    for p in penalties[1:]:
        found = p.parts
        with torch.no_grad():
            p(states, batch["attention_mask"])
        for name in found:
            torch.testing.assert_close(found[name], p.parts[name], rtol=1e-4, atol=1e-5)
    assert penalties[0].reference_cov.shape == (16, 16)


ANEW = dict(gradient_checkpointing=True)
PLAIN = dict(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("arguments", [dict(bf16=True), ANEW, ANEW | PLAIN], ids=["bf16", "anew", "plain"])
def test_mixed_precision_and_checkpointing(arguments, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 leaves its own there, for all that follows
    exact = gradients(make_trainer(IStar(-1, zeta=0), examples(8, 0)))
    ours = gradients(make_trainer(IStar(-1, zeta=0), examples(8, 0), **arguments))
    if "bf16" not in arguments:
        return assert_same(ours, exact)
    flat = [torch.cat([g[n].flatten() for n in exact]) for g in (ours, exact)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.99


def ragged(n, seed):
    "Examples with padding, more of it in the second half."
    rows = examples(n, seed)
    for i, row in enumerate(rows):
        row["attention_mask"] = (torch.arange(8) < 8 - i % 4 - (i >= n // 2)).long()
    return rows


OF_RANKS = {"istar": lambda: IStar(-1), "cosreg": CosReg, "none": lambda: None}
OF_RANKS["ustat"] = lambda: IStar(1, correction="ustat", layers="mean")


def _train_on_rank(rank, world, name):
    trainer = make_trainer(OF_RANKS[name](), ragged(8, 0), batch_size=8 // world, kind=PenaltyTrainer, data_seed=1)
    trainer._get_train_sampler = lambda *a: torch.utils.data.SequentialSampler(trainer.train_dataset)
    out = gradients(trainer)
    log = next(e for e in trainer.state.log_history if "loss" in e)
    return out, {k: log[k] for k in ("loss", "task_loss", "isoscore", "cosine") if k in log}


@pytest.mark.parametrize("name", OF_RANKS)
def test_two_ranks_give_the_gradient_and_loss_of_one(name):
    exact, log = _train_on_rank(0, 1, name)
    for ours, theirs in on_ranks(_train_on_rank, name):
        assert_same(ours, exact)
        for k, v in log.items():
            assert theirs[k] == pytest.approx(v, rel=1e-3), k


# ---- the reference
def test_penalties_come_in_any_collection_and_have_one_reference_each():
    p = IStar(-1)
    for given in ([p, p], (q for q in [p, p]), torch.nn.ModuleList([p, p])):
        trainer = make_trainer(given, examples(8, 0))
        assert trainer.penalties == [p, p]
        assert sum(getattr(c, "penalty", None) is p for c in trainer.callback_handler.callbacks) == 1


def test_reference_is_refreshed_at_each_epoch_and_detached():
    penalty, seen = IStar(-1), []
    original = penalty.set_reference
    penalty.set_reference = lambda cov: (seen.append(cov.clone()), original(cov))
    make_trainer(penalty, examples(32, 0), steps=-1, num_train_epochs=3).train()
    make_trainer(penalty, examples(32, 1)).train()  # what a Trainer drew is drawn anew by the next
    assert len(seen) == 4 and not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert not penalty.reference_cov.requires_grad


@pytest.mark.parametrize("released", [True, False])
def test_released_reference_is_in_float32_under_half_precision(released):
    model, batches = model_and_batches()
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in b.items()} for b in batches for i in range(4)], 4)
    refresh = ReferenceRefresh(IStar(-1, padding=True), max_points=100, released=released)
    args = TrainingArguments(tempfile.mkdtemp(), **OFF, bf16=True, per_device_train_batch_size=4)
    refresh.on_epoch_begin(args, types.SimpleNamespace(epoch=0), None, model=model, train_dataloader=loader)
    rows = as_released(model, own_batches(loader, 4, args.seed * 1009), 100)
    assert len(rows) == 160
    theirs = torch.allclose(refresh.penalty.reference_cov, torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)
    assert theirs == released


@pytest.mark.parametrize("later", [False, True])
def test_a_reference_that_came_with_the_penalty_stays(later):
    mine = torch.eye(16) * 3
    penalty = IStar(-0.1, reference_cov=None if later else mine)
    trainer = make_trainer(penalty, examples(32, 0), steps=-1, num_train_epochs=2)
    if later:
        penalty.set_reference(mine)
    trainer.train()
    assert torch.equal(penalty.reference_cov, mine)


def test_a_data_set_of_batches_is_not_collated_again():
    loader = torch.utils.data.DataLoader([{"input_ids": torch.full((4, 3), i)} for i in range(5)], batch_size=None)
    ids = [b["input_ids"] for b in own_batches(loader, 2, 0)]
    assert {x.shape for x in ids} == {(4, 3)} and sorted(int(x[0, 0]) for x in ids) == [0, 1, 2, 3, 4]


def test_measuring_leaves_all_random_states_as_they_were():
    runs = []

    def collate(rows):
        runs[-1].append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return {k: v for k, v in default_data_collator(rows).items() if k != "labels" or len(rows) == 8}

    for penalty in (None, IStar(0.0)):
        runs.append([])
        random.seed(0)
        np.random.seed(0)
        trainer = make_trainer(penalty, examples(16, 0), steps=2)
        trainer.data_collator = collate
        if penalty is not None:
            trainer.add_callback(IsotropyLog(torch.utils.data.DataLoader(examples(4, 3), 4, collate_fn=collate)))
        trainer.train()
    assert len(runs[1]) > 2 == len(runs[0]) and runs[1][-1] == runs[0][-1] and runs[0][0] in runs[1]


# ---- schedules of dropout, which a checkpoint names
def scheduled(rate=0.3):
    "A model with a rate of its own at each site."
    model = small_bert(0.1)
    sites = [s.name for s in dropout_sites(model) if s.kind != "classifier"]
    apply_dropout(model, {name: rate * k / len(sites) for k, name in enumerate(sites)})
    return model


def test_a_reloaded_model_trains_with_its_schedule(tmp_path):
    model = scheduled()
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert set(rates(loaded).values()) == {0.1} != set(rates(model).values())
    make_trainer(None, examples(8, 0), model=loaded).train()
    assert rates(loaded) == rates(model)
    args = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=1, **OFF | SGD)
    make = lambda: BertForSequenceClassification.from_pretrained(tmp_path)
    trainer = InOrder(None, args, train_dataset=examples(8, 0), model_init=make)
    trainer.train()
    assert rates(trainer.model) == pytest.approx(rates(model))
    loaded = make()
    apply_dropout(loaded, "standard")  # by intention
    make_trainer(None, examples(8, 0), model=loaded).train()
    assert set(rates(loaded).values()) == {0.1}


def test_a_resumed_training_has_the_schedule_of_its_checkpoint():
    out, ends = tempfile.mkdtemp(), []
    for model, checkpoint in (scheduled(), None), (small_bert(0.1), f"{out}/checkpoint-2"):
        trainer = make_trainer(None, examples(32, 0), model=model, output_dir=out, **SAVING)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends))
    trainer = make_trainer(None, examples(32, 0), model=scheduled(0.2), output_dir=out, **SAVING)
    with pytest.raises(ValueError, match="dropout_schedule: .*checkpoint-2/config.json has another"):
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2")


def test_noise_is_put_on_again_and_mixout_refused_without_its_weights(tmp_path):
    for how in ("gaussian", "mixout"):
        model = small_bert(0.1)
        apply_dropout(model, how, p=0.2)
        before = copy.deepcopy(model.config.dropout_schedule)
        make_trainer(None, examples(8, 0), model=model).train()  # is in force
        assert model.config.dropout_schedule == before
        model.save_pretrained(tmp_path / how)
    loaded, mixed = (BertForSequenceClassification.from_pretrained(tmp_path / how) for how in ("gaussian", "mixout"))
    make_trainer(None, examples(8, 0), model=loaded).train()
    assert any("Noise" in type(vars(m).get("forward")).__name__ for m in loaded.modules())
    with pytest.raises(ValueError, match="trained with Mixout, whose pretrained weights"):
        make_trainer(None, examples(8, 0), model=mixed).train()


# ---- held-out isotropy
HELD_OUT = [{k: v for k, v in default_data_collator(examples(20, 4)).items() if k != "labels"}]
OFTEN = dict(steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)


@pytest.mark.parametrize("kind", [InOrder, PlainInOrder])
def test_held_out_isotropy_is_a_metric_that_names_the_best_model(kind):
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_isoscore", greater_is_better=True)
    trainer, log = make_trainer(None, examples(32, 0), dropout=0.1, kind=kind, **OFTEN, **best), IsotropyLog(HELD_OUT)
    trainer.add_callback(log)
    trainer.train()
    assert [h["step"] for h in log.history] == [0, 2, 4] and len(log.history[0]["layers"]) == 2
    start = measure_isotropy(small_bert(), HELD_OUT)["union"]
    assert log.history[0]["union"] == pytest.approx(start, rel=1e-5)
    assert trainer.state.best_metric == max(h["union"] for h in log.history[1:])
    logged = [e["eval_isoscore"] for e in trainer.state.log_history if "eval_isoscore" in e]
    assert logged == ([h["union"] for h in log.history[1:]] if kind is InOrder else [])
    score = trainer.evaluate()["eval_isoscore"]
    assert score == log.history[-1]["union"]
    trainer.model.bert.embeddings.word_embeddings.weight.data[:, 0] *= 5  # after training the weights may change
    assert trainer.evaluate()["eval_isoscore"] != score
    assert "test_isoscore" not in trainer.predict(examples(4, 9)).metrics


@pytest.mark.parametrize("kind", [InOrder, PlainInOrder])
def test_held_out_isotropy_has_the_name_of_its_evaluation_set(kind):
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_a_isoscore", greater_is_better=True)
    trainer, log = make_trainer(None, examples(32, 0), kind=kind, **OFTEN, **best), IsotropyLog(HELD_OUT)
    trainer.add_callback(log)
    trainer.eval_dataset = {"a": examples(16, 9), "b": examples(8, 8)}
    trainer.train()
    assert [h["step"] for h in log.history] == [0, 2, 4]
    assert trainer.state.best_metric == max(h["union"] for h in log.history[1:])
    found = trainer.evaluate()
    names = {f"eval_{part}_{name}" for part in "ab" for name in ("loss", "isoscore")}
    assert {n for n in found if n.endswith(("_loss", "_isoscore"))} == names
    logged = [{n for n in e if n.endswith("_isoscore")} for e in trainer.state.log_history if "eval_b_loss" in e]
    assert logged == [{"eval_b_isoscore"} if kind is InOrder else set()] * 3


def test_isotropy_of_the_best_model_is_measured_after_training():
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False)
    trainer = make_trainer(IStar(1, zeta=0), examples(32, 0), **OFTEN, **best, learning_rate=0.1)
    log = IsotropyLog(HELD_OUT)
    trainer.add_callback(log)
    trainer.train()
    trainer.evaluate()
    assert [h["step"] for h in log.history] == [0, 2, 4, 4]
    at_two, at_four, now = (h["union"] for h in log.history[1:])
    assert trainer.state.best_model_checkpoint.endswith("-2") and now == pytest.approx(at_two, rel=1e-5) != at_four


def _isotropy_on_rank(rank, world):
    batches = [{k: v for k, v in default_data_collator(ragged(4, s)).items() if k != "labels"} for s in range(4)]
    found = []
    for sample, limit in ((batches, 250_000), (batches, 40), (torch.utils.data.DataLoader(batches, None), 250_000)):
        log, trainer = IsotropyLog(sample, limit), make_trainer(None, examples(8, 0))
        log.on_train_begin(trainer.args, trainer.state, None, trainer.model)
        found.append([log.history[0]["points"], log.history[0]["union"]])
    return found


def test_isotropy_log_counts_a_sample_once_on_all_ranks():
    one = _isotropy_on_rank(0, 1)
    for found in on_ranks(_isotropy_on_rank):
        for ours, theirs in zip(found, one):
            assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], rel=1e-4)


# ---- groups by length
WIDE = CONFIG | dict(hidden_size=32, intermediate_size=48, max_position_embeddings=24, pad_token_id=0)
DISTIL = dict(vocab_size=60, max_position_embeddings=24, pad_token_id=0, dim=32, n_layers=2, n_heads=2, hidden_dim=48)
LENGTHS = dict.fromkeys(["Bert", "Roberta", "Electra"], WIDE) | {"DistilBert": DISTIL}
LENGTHS |= {"Albert": WIDE | dict(embedding_size=16)}
LENGTHS |= {"ModernBert": WIDE | dict(bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)}


def texts(n, length, seed=1):
    "Ids and mask of random texts of 1 to `length` tokens."
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (n, 1), generator=g)).long()
    return {"input_ids": torch.randint(3, 60, (n, length), generator=g) * mask, "attention_mask": mask}


@pytest.mark.parametrize("kind, groups", [*((kind, 3) for kind in LENGTHS), ("Bert", 40)])
def test_groups_by_length_are_the_same_function(kind, groups):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**LENGTHS[kind])
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    batch = texts(7, 16) | {"labels": torch.arange(7) % 2}
    mask = batch["attention_mask"]

    def measured():
        out = model(**batch, output_hidden_states=True)
        (out.loss + IStar(-1, zeta=0)(out.hidden_states, mask)).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        states = torch.stack([h[mask.bool()] for h in out.hidden_states])
        return [x.detach() for x in (out.loss, out.logits, gradient, states)]

    plain, names = measured(), list(model.state_dict())
    assert split_by_length(model, groups) is model and list(model.state_dict()) == names
    for a, b in zip(plain, measured()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def reading(encoder):
    "The shapes of the ids that the encoder will read."
    read, plain = [], encoder.embeddings.forward

    def forward(input_ids=None, **kwargs):
        read.append(tuple(input_ids.shape))
        return plain(input_ids=input_ids, **kwargs)

    encoder.embeddings.forward = forward
    return read


def grouped_bert():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**CONFIG, num_labels=2)).eval()
    return model, texts(7, 12)


def test_groups_by_length_read_fewer_tokens_and_name_what_they_refuse():
    model = BertModel(BertConfig(**CONFIG, attn_implementation="eager")).eval()
    ids, mask, read = torch.ones(8, 12, dtype=torch.long), torch.ones(8, 12, dtype=torch.long), reading(model)
    mask[:6, 3:] = 0
    split_by_length(model, 4)
    read.clear()
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
        # padding on the left is right as well, though nothing is saved
        assert model(ids, attention_mask=mask.flip(1)).last_hidden_state.shape == (8, 12, 16)
        assert model(ids, attention_mask=mask, output_attentions=True).attentions[0].shape == (8, 2, 12, 12)
        assert model(ids, attention_mask=mask, return_dict=False)[0].shape == (8, 12, 16)
        model.config.output_attentions = True
        assert len(split_by_length(model, 2)(ids, attention_mask=mask).attentions) == 2
    assert read[:4] == [(2, 3)] * 3 + [(2, 12)] and states.shape == (8, 12, 16) and states[:6, 3:].abs().max() == 0
    with pytest.raises(ValueError, match="groups: 0"):
        split_by_length(model, 0)


def test_a_copy_of_a_model_in_groups_computes_with_its_own_weights():
    model, batch = grouped_bert()
    names, want = list(inspect.signature(model.bert.forward).parameters), model(**batch).logits
    split_by_length(model, 3)
    assert list(inspect.signature(model.bert.forward).parameters) == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    zero = twin(**batch, output_hidden_states=True)
    assert zero.logits.abs().max() == zero.hidden_states[-1].abs().max() == 0
    torch.testing.assert_close(model(**batch).logits, want, rtol=1e-4, atol=1e-5)
    read = reading(model.bert)
    split_by_length(model, 2)  # in place of the three groups, not around them
    read.clear()
    torch.testing.assert_close(model(**batch).logits, want, rtol=1e-4, atol=1e-5)
    assert [rows for rows, _ in read] == [4, 3]


def test_groups_by_length_cut_what_else_belongs_to_the_batch():
    model, batch = grouped_bert()
    near = dict(rtol=1e-4, atol=1e-5)
    for ids in (torch.arange(12)[None].flip(1), torch.stack([torch.randperm(12) for _ in range(7)])):
        split = split_by_length(copy.deepcopy(model), 3)
        want, got = (m(**batch, position_ids=ids).logits for m in (model, split))
        torch.testing.assert_close(got, want, **near)
    torch.manual_seed(0)
    decoder = BertModel(BertConfig(**CONFIG, is_decoder=True, add_cross_attention=True)).eval()
    given = batch | dict(encoder_hidden_states=torch.randn(7, 12, 16), use_cache=False)
    want = decoder(**given).last_hidden_state  # read whole
    torch.testing.assert_close(split_by_length(decoder, 3)(**given).last_hidden_state, want, **near)


def test_one_group_gives_the_forward_back():
    model, batch = grouped_bert()
    split_by_length(split_by_length(model, 3), 1)
    assert "forward" not in vars(model.bert)
    calls, plain = [], model.bert.forward

    def noted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    model.bert.forward = noted  # another wrapper, such as that of Gaussian dropout
    split_by_length(split_by_length(model, 2), 3)
    calls.clear()
    model(**batch)
    assert len(calls) == 3 and vars(split_by_length(model, 1).bert)["forward"] is noted


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_two_stacks_the_encoder_reads_in_groups(kind):
    model, (_, batch) = of_two_stacks(kind).eval(), grouped_bert()
    batch = batch | {"labels": batch["input_ids"]}
    want = model(**batch).loss
    split_by_length(model, 3)
    torch.testing.assert_close(model(**batch).loss, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ConvBert", "MobileBert", "FNet"])
def test_groups_by_length_refuse_an_encoder_that_reads_padding(kind):
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**WIDE))
    with pytest.raises(ValueError, match="model: .*leave its batches whole"):
        split_by_length(model, 4)
    assert model.training and "forward" not in vars(model)
    assert split_by_length(model, 1) is model
