"""The penalties against direct formulas, and inside the transformers Trainer against its traps."""

import contextlib
import copy
import inspect
import math
import random
import re
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from isoreg.isoscore import isoscore, isoscore_star
from isoreg.istar import CosReg, IStar, check_batches, measure_isotropy, reference_covariance, token_moments
from isoreg.moments import moments
from isoreg.states import same_draws
from isoreg.trainer import (
    IsotropyLog,
    PenaltyMixin,
    PenaltyTrainer,
    ReferenceRefresh,
    own_batches,
    split_by_length,
)
import itertools

CONFIG = dict(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)


def states_and_mask(dtype=torch.float64, requires_grad=False):
    g = torch.Generator().manual_seed(0)
    states = tuple(
        (torch.randn(3, 6, 8, generator=g, dtype=torch.float64) + torch.randn(8, generator=g))
        .to(dtype)
        .requires_grad_(requires_grad)
        for _ in range(4)
    )
    return states, torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 3 + [1] * 3])


def union(states, mask):
    return torch.cat([h[mask.bool()] for h in states[1:]])


def test_union_mean_and_single_layer():
    states, mask = states_and_mask()
    reference = torch.cov(torch.randn(8, 50, dtype=torch.float64))
    for convention in ("released", "text"):
        score = IStar(1, 0.3, reference, convention=convention).score(states, mask)
        torch.testing.assert_close(score, isoscore_star(union(states, mask), reference, 0.3, convention=convention))
    each = torch.stack([isoscore(h[mask.bool()], correction="ustat") for h in states[1:]]).clamp(0, 1)
    torch.testing.assert_close(IStar(1, layers="mean", correction="ustat").score(states, mask), each.mean())
    torch.testing.assert_close(IStar(1, zeta=0, layers=2).score(states, mask), isoscore(states[2][mask.bool()]))
    torch.testing.assert_close(IStar(1, zeta=0, layers=-1).score(states, mask), isoscore(states[-1][mask.bool()]))
    references = torch.stack([reference, torch.eye(8, dtype=torch.float64), 2 * reference])
    each = torch.stack([isoscore_star(h[mask.bool()], r, 0.3) for h, r in zip(states[1:], references)])
    torch.testing.assert_close(IStar(1, 0.3, references, layers="mean").score(states, mask), each.mean())


def test_padding_and_embeddings_only_when_asked():
    states, mask = states_and_mask()
    torch.testing.assert_close(
        IStar(1, zeta=0, padding=True).score(states, mask), isoscore(torch.cat(states[1:]).flatten(0, 1))
    )
    torch.testing.assert_close(
        IStar(1, zeta=0, embeddings=True).score(states, mask), isoscore(torch.cat([h[mask.bool()] for h in states]))
    )
    poisoned = tuple(h.masked_fill(mask[..., None] == 0, float("nan")) for h in states)
    torch.testing.assert_close(IStar(1, zeta=0)(poisoned, mask), IStar(1, zeta=0)(states, mask))
    poisoned = tuple(h.detach().requires_grad_() for h in poisoned)
    term = CosReg(1)(poisoned, mask)
    term.backward()
    torch.testing.assert_close(term.detach(), CosReg(1)(states, mask))
    assert bool(torch.isfinite(poisoned[-1].grad).all()) and poisoned[-1].grad[mask == 0].abs().max() == 0


@pytest.mark.parametrize(
    "penalty",
    [
        IStar(-2, 0.2, torch.eye(5)),
        IStar(1, zeta=0, layers="mean"),
        IStar(3, correction="ustat"),
        IStar(1, correction="gaussian", layers=1),
    ],
)
def test_first_and_second_derivative_by_finite_differences(penalty):
    g = torch.Generator().manual_seed(0)
    states = tuple(torch.randn(2, 5, 5, generator=g, dtype=torch.float64) * torch.arange(1, 6) for _ in range(3))
    states, mask = tuple(h.requires_grad_() for h in states), torch.tensor([[1] * 5, [1] * 4 + [0]])
    double = copy.deepcopy(penalty).double()
    score = lambda *h: double.score(h, mask)
    assert 0 < score(*states) < 1  # a corrected one is constant elsewhere
    assert torch.autograd.gradcheck(score, states) and torch.autograd.gradgradcheck(score, states)
    term = penalty(states, mask)
    term.backward()
    assert all((h.grad[mask == 0] == 0).all() for h in states[1:] if h.grad is not None)
    assert term.item() == pytest.approx(penalty.lam * (1 - penalty.parts["isoscore"].item()), rel=1e-6)
    assert not penalty.parts["istar"].requires_grad


def term_and_gradient(penalty, cloud):
    cloud = cloud.clone().requires_grad_()
    term = penalty((cloud[None],))
    term.backward()
    return term.item(), cloud.grad


@pytest.mark.parametrize("correction", ["gaussian", "ustat"])
def test_a_corrected_penalty_stays_within_its_bounds_on_a_tiny_batch(correction):
    penalty, outside = IStar(-1, correction=correction, layers=0), 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        for n in (4, 5, 8, 9, 12):
            cloud = torch.randn(n, 256, generator=g)
            term, gradient = term_and_gradient(penalty, cloud)
            free = float(isoscore(cloud, correction=correction))
            assert -1 <= term <= 0 and bool(torch.isfinite(gradient).all())
            if n < 8 or free > 1:
                assert term == 0 and not gradient.any()
            else:
                assert penalty.parts["isoscore"].item() == pytest.approx(free, rel=1e-4) and gradient.any()
            outside += n >= 8 and free > 1
    assert outside > 20


ODD = torch.full((12, 16), 0.3)
ODD[3] += torch.arange(16.0)


@pytest.mark.parametrize("cloud", [torch.eye(16), torch.eye(40)[:20], ODD, 1e3 * ODD])  # even; all equal but one
@pytest.mark.parametrize("correction", ["gaussian", "ustat"])
def test_rounding_is_no_estimate(cloud, correction):
    if correction == "gaussian" and cloud[0, 1] != 0:
        return  # the Gaussian correction has an estimate for a line
    term, gradient = term_and_gradient(IStar(-1, correction=correction, layers=0), cloud)
    assert term == 0 and not gradient.any()


def test_bfloat16_states_and_autocast():
    states, mask = states_and_mask(torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        term = IStar(-1, 0.2, torch.eye(8))(states, mask)
        cos = CosReg(1)(states, mask)
    exact = isoscore_star(union(states, mask).double(), torch.eye(8).double(), 0.2)
    assert term.dtype == torch.float32 and term.item() == pytest.approx(-(1 - exact.item()), rel=1e-5)
    (term + cos).backward()
    assert states[2].grad.dtype == torch.bfloat16


def test_cosreg_is_the_n_by_n_form():
    states, mask = states_and_mask(requires_grad=True)
    for keep, padding in ((mask.bool(), False), (torch.ones_like(mask).bool(), True)):
        u = torch.nn.functional.normalize(states[-1][keep], dim=-1)
        n = len(u)
        exact = ((u @ u.T).sum() - n) / n**2
        ours = CosReg(1.5, padding=padding)(states, mask) / 1.5
        torch.testing.assert_close(ours, exact)
        torch.testing.assert_close(*(torch.autograd.grad(v, states[-1])[0] for v in (ours, exact)))


def test_cosreg_of_tokens_without_a_direction():
    states, _ = states_and_mask()
    states[-1][0, :3] = 0
    h = states[-1].requires_grad_()
    u = torch.nn.functional.normalize(h.flatten(0, 1), dim=-1)
    exact = (u @ u.T).fill_diagonal_(0).sum() / len(u) ** 2
    ours = CosReg(1)(states)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(v, h)[0] for v in (ours, exact)))


def model_and_batches(n=6):
    torch.manual_seed(0)
    model, g, batches = BertModel(BertConfig(**CONFIG), add_pooling_layer=False), torch.Generator().manual_seed(1), []
    for _ in range(n):
        mask = torch.arange(10) < torch.randint(3, 11, (4, 1), generator=g)
        batches.append(
            {
                "input_ids": torch.randint(0, 60, (4, 10), generator=g),
                "attention_mask": mask.long(),
                "labels": torch.zeros(4),
            }
        )
    return model, batches


def test_reference_covariance_is_the_covariance_of_token_vectors():
    model, batches = model_and_batches()
    model.train()
    reference = reference_covariance(model, batches, progress=False)
    assert model.training and not reference.requires_grad
    model.eval()
    with torch.no_grad():
        hidden = [model(b["input_ids"], b["attention_mask"], output_hidden_states=True).hidden_states for b in batches]
    rows = torch.cat([h[b["attention_mask"].bool()] for states, b in zip(hidden, batches) for h in states[1:]])
    torch.testing.assert_close(reference, torch.cov(rows.T))
    score = measure_isotropy(model, batches)
    assert (
        score["union"] == pytest.approx(float(isoscore(rows)), rel=1e-5)
        and score["points"] == len(rows)
        and len(score["layers"]) == 2
    )
    padded = torch.cat([h.flatten(0, 1) for states in hidden for h in states[1:]])
    torch.testing.assert_close(reference_covariance(model, batches, padding=True, progress=False), torch.cov(padded.T))
    assert reference_covariance(model, batches, layers="mean", progress=False).shape == (2, 16, 16)


def test_max_points_is_a_maximum_and_is_reached():
    model, batches = model_and_batches()
    for limit in (2, 30, 31, 77):
        m = token_moments(model, iter(batches), limit)
        assert limit - 2 < int(m.count[1:].sum()) <= limit


def as_released(model, batches, max_points, layer=None):
    """The rows that the released code takes: those of whole batches, padding among them, until there are more than
    max_points."""
    rows, seen = [], 0
    with torch.no_grad():
        for b in batches:
            states = model.eval()(b["input_ids"], b["attention_mask"], output_hidden_states=True).hidden_states
            rows += [h.flatten(0, 1).double() for h in (states[1:] if layer is None else [states[layer]])]
            seen += sum(map(len, rows)) - seen
            if seen > max_points:
                break
    return torch.cat(rows)


@pytest.mark.parametrize("max_points, taken", [(79, 80), (80, 160), (150, 160), (1000, 480)])
def test_released_reference_takes_whole_batches_beyond_the_cap(max_points, taken):
    model, batches = model_and_batches()  # 40 positions a batch, 80 vectors in two layers
    released = lambda **kw: reference_covariance(
        model, iter(batches), max_points, padding=True, progress=False, released=True, **kw
    )
    rows = as_released(model, batches, max_points)
    assert len(rows) == taken
    torch.testing.assert_close(released(), torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)
    exact = reference_covariance(model, batches, max_points, padding=True, progress=False)
    assert torch.allclose(exact, released()) == (max_points >= 480)
    for layer in (1, 2, -1):  # of one layer its own vectors count
        rows = as_released(model, batches, max_points, layer)
        assert len(rows) == min(240, 40 * (max_points // 40 + 1))
        torch.testing.assert_close(released(layers=layer), torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)


def _reference_on_rank(rank, world):
    model, batches = model_and_batches()
    return reference_covariance(model, batches[rank::world], progress=False)


def test_reference_is_the_same_on_all_ranks():
    model, batches = model_and_batches()
    whole = reference_covariance(model, batches, progress=False)
    for reference in on_ranks(_reference_on_rank):
        torch.testing.assert_close(reference, whole)


def of_two_stacks(kind):
    torch.manual_seed(0)
    if kind == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=60,
                d_model=16,
                d_kv=8,
                d_ff=16,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        )
    heads = dict(
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0
    )
    return BartForConditionalGeneration(
        BartConfig(vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=1, max_position_embeddings=16, **heads)
    )


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_encoder_and_decoder_the_encoder_counts(kind):
    model, batches = of_two_stacks(kind).eval(), [b | {"labels": b["input_ids"]} for b in model_and_batches()[1]]
    with torch.no_grad():
        hidden = [model(**b, output_hidden_states=True).encoder_hidden_states for b in batches]
    rows = torch.cat([h[b["attention_mask"].bool()] for states, b in zip(hidden, batches) for h in states[1:]])
    torch.testing.assert_close(reference_covariance(model, batches, progress=False), torch.cov(rows.T))
    assert measure_isotropy(model, batches)["points"] == len(rows)


class OneFlatLayer(torch.nn.Module):
    "Three layers; the vectors of the second are all equal, far from the origin."

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(48))

    def forward(self, x, output_hidden_states):
        return {"hidden_states": (x, x * self.w, self.w.expand_as(x) * 3, x + 1)}


def test_a_layer_without_variance_has_no_score_however_many_batches():
    "The merged mean of equal rows is off by its last digit, which is no variance."
    torch.manual_seed(0)
    batches = [{"x": torch.randn(n, 5, 48), "labels": torch.zeros(n)} for n in (1, 8, 3, 5)]
    found = measure_isotropy(OneFlatLayer(), batches)
    assert np.isnan(found["layers"]).tolist() == [False, True, False]
    assert 0 < found["union"] < 1 and 0 < found["embeddings"] < 1


STATES, MASK = states_and_mask()
MODEL, BATCHES = model_and_batches(1)
NO_SCORE = "hidden_states: a batch has no score"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: IStar(float("nan")), "lam: nan"),
        (lambda: IStar(1, zeta=1.5), "zeta: 1.5"),
        (lambda: IStar(1, layers="all"), "layers: 'all' .*union"),
        (lambda: IStar(1, correction="bias"), "correction: 'bias'"),
        (lambda: IStar(1, convention="code"), "convention: 'code'"),
        (lambda: IStar(1, reference_cov=torch.ones(3, 4)), r"reference_cov: .*\(3, 4\)"),
        (lambda: IStar(1, correction="ustat", reference_cov=torch.eye(8)), "reference_cov: .*'ustat'"),
        (lambda: IStar(1)(STATES, MASK), "reference_cov: zeta=0.2 .*reference_covariance"),
        (lambda: IStar(1, 0.2, torch.eye(16))(STATES, MASK), r"reference_cov: shape \(16, 16\) .*\(8, 8\)"),
        (lambda: IStar(1, zeta=0, layers=9)(STATES, MASK), "layers: 9 .*4 hidden states"),
        (lambda: CosReg(1, layer=-5)(STATES, MASK), "layer: -5"),
        (lambda: IStar(1, zeta=0)(None), "hidden_states: .*output_hidden_states"),
        (lambda: IStar(1, zeta=0)(STATES[0]), "hidden_states: .*tuple"),
        (lambda: IStar(1, zeta=0)(STATES, torch.ones(3, 5)), r"attention_mask: shape \(3, 5\)"),
        (lambda: IStar(1, zeta=0)(STATES, (1 - MASK) * -1e9), "attention_mask: .*mask == 0"),
        (lambda: CosReg(1)(STATES, 2 * MASK), "attention_mask: .*0 and 1"),
        (lambda: IStar(1, zeta=0)(STATES, 0 * MASK), NO_SCORE),
        (lambda: CosReg(1)(STATES, 0 * MASK), NO_SCORE),
        (lambda: IStar(1, zeta=0)((torch.ones(2, 3, 4),) * 3), NO_SCORE),
        (lambda: IStar(1, zeta=0)((50 * torch.randn(16).expand(7, 30, 16),) * 3), NO_SCORE),
        (lambda: IStar(1, correction="gaussian")((torch.randn(1, 2, 8),) * 2), NO_SCORE),
        (lambda: IStar(1, correction="ustat")((torch.randn(1, 3, 8),) * 2), NO_SCORE),
        (lambda: IStar(1, correction="ustat")((torch.randn(1, 12, 8) * torch.nan,) * 2), NO_SCORE),
        (lambda: token_moments(MODEL, []), "batches: no batch"),
        (lambda: token_moments(MODEL, BATCHES, max_points=1), "max_points: 1"),
        (lambda: token_moments(MODEL, [BATCHES[0] | {"attention_mask": torch.full((4, 10), 3)}]), "attention_mask"),
        (lambda: PenaltyTrainer(MODEL, one_step(), penalty=[IStar]), "penalty: .*no torch module"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match="^" + message):
        call()


# in the Trainer ---------------------------------------------------------------------------------------------------


def examples(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 60, (n, 8), generator=g)
    return [{"input_ids": i, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(i[0] > 30)} for i in ids]


class InOrder(PenaltyTrainer):
    "Takes the examples as they come, so that runs can be compared."

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(
    penalty, data, batch_size=8, accumulation=1, steps=1, dropout=0.0, kind=InOrder, model=None, **arguments
):
    torch.manual_seed(0)
    model = model or BertForSequenceClassification(
        BertConfig(**CONFIG, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )
    defaults = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0,
        weight_decay=0,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        eval_strategy="no",
    )
    return kind(
        model,
        TrainingArguments(**defaults | arguments),
        train_dataset=data,
        eval_dataset=examples(16, 9),
        penalty=penalty,
    )


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


@pytest.mark.parametrize(
    "penalty, data", [(None, examples(8, 0)), (TokenMean(), examples(8, 0)), (IStar(-2, zeta=0), examples(2, 0) * 4)]
)
def test_accumulation_does_not_change_the_gradient(penalty, data):
    assert_same(
        gradients(make_trainer(penalty, data)), gradients(make_trainer(penalty, data, batch_size=2, accumulation=4))
    )


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
    arguments = dict(batch_size=2, accumulation=4, label_smoothing_factor=0.1)
    data = examples(2, 0) * 4
    plain = gradients(make_trainer(None, data, kind=PlainInOrder, **arguments))
    assert_same(gradients(make_trainer(None, data, **arguments)), plain)
    with_penalty = gradients(make_trainer(IStar(-2, zeta=0), data, **arguments))
    alone = {
        n: g - h
        for (n, g), h in zip(
            gradients(make_trainer(IStar(-2, zeta=0), data)).items(), gradients(make_trainer(None, data)).values()
        )
    }
    assert_same({n: g - plain[n] for n, g in with_penalty.items()}, alone)


def normalised(outputs, labels, num_items_in_batch=None):
    "A loss of one's own, normalised over the accumulated batch."
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return losses / (len(labels) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("penalty", [None, IStar(-2, zeta=0)])
def test_a_loss_function_that_normalises_counts_once_under_accumulation(penalty):
    found = []
    for size, steps in ((8, 1), (2, 4)):
        trainer = make_trainer(penalty, examples(2, 0) * 4, batch_size=size, accumulation=steps)
        trainer.compute_loss_func = normalised
        found.append(gradients(trainer))
    assert_same(*found)


def test_gradient_of_one_step_is_that_of_the_formula():
    data, reference = examples(8, 0), torch.eye(16)
    trainer = make_trainer(IStar(-1.5, 0.2, reference), data)
    trainer.callback_handler.callbacks = [
        c for c in trainer.callback_handler.callbacks if not isinstance(c, ReferenceRefresh)
    ]
    model = copy.deepcopy(trainer.model)
    ours = gradients(trainer)
    batch = {k: torch.stack([torch.as_tensor(e[k]) for e in data]) for k in data[0]}
    out = model(**batch, output_hidden_states=True)
    (out.loss - 1.5 * (1 - isoscore_star(torch.cat(out.hidden_states[1:]).flatten(0, 1), reference, 0.2))).backward()
    assert_same(
        ours,
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        | {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.grad is None},
    )


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


def test_lambda_zero_is_the_baseline_bit_for_bit():
    runs = []
    for penalty in (None, IStar(0.0), IStar(0.0, correction="ustat")):
        trainer = make_trainer(
            penalty,
            examples(64, 0),
            dropout=0.1,
            steps=-1,
            num_train_epochs=3,
            optim="adamw_torch",
            learning_rate=1e-3,
            kind=PenaltyTrainer,
        )
        trainer.train()
        runs.append(trainer.model.state_dict())
    for other in runs[1:]:
        for n in runs[0]:
            assert torch.equal(runs[0][n], other[n]), n


def test_reference_is_refreshed_at_each_epoch_and_detached():
    penalty, seen = IStar(-1), []
    original = penalty.set_reference
    penalty.set_reference = lambda cov: (seen.append(cov.clone()), original(cov))
    make_trainer(penalty, examples(32, 0), steps=-1, num_train_epochs=3).train()
    assert len(seen) == 3 and not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert not penalty.reference_cov.requires_grad


@pytest.mark.parametrize("released", [True, False])
def test_released_reference_is_in_float32_under_half_precision(released):
    model, batches = model_and_batches()
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in b.items()} for b in batches for i in range(4)], 4)
    callback = ReferenceRefresh(IStar(-1, padding=True), max_points=100, progress=False, released=released)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none", bf16=True, per_device_train_batch_size=4
    )
    callback.on_epoch_begin(
        args, types.SimpleNamespace(epoch=0, global_step=0), None, model=model, train_dataloader=loader
    )
    rows = as_released(model, own_batches(loader, 4, args.seed * 1009), 100)
    assert len(rows) == 160
    theirs = torch.allclose(callback.penalty.reference_cov, torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)
    assert theirs == released


def test_a_reference_that_came_with_the_penalty_stays():
    mine = torch.eye(16) * 3
    penalty = IStar(-1, reference_cov=mine)
    make_trainer(penalty, examples(32, 0), steps=-1, num_train_epochs=2).train()
    assert torch.equal(penalty.reference_cov, mine)


@pytest.mark.parametrize("every_epoch, step", [(True, 2), (True, 4), (False, 4)])
def test_training_that_resumes_has_the_reference_that_it_had(every_epoch, step):
    out, ends = tempfile.mkdtemp(), []
    for checkpoint in (None, f"{out}/checkpoint-{step}"):
        penalty = IStar(-1, zeta=0.5)
        trainer = make_trainer(
            penalty,
            examples(32, 0),
            steps=-1,
            num_train_epochs=2,
            output_dir=out,
            save_strategy="steps",
            save_steps=2,
            learning_rate=0.1,
        )
        if not every_epoch:
            trainer.pop_callback(ReferenceRefresh)
            trainer.add_callback(ReferenceRefresh(penalty, every_epoch=False))
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append((penalty.reference_cov, [p.detach().clone() for p in trainer.model.parameters()]))
    assert torch.equal(ends[0][0], ends[1][0]) and all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1]))


SAVING = dict(
    steps=-1, num_train_epochs=2, save_strategy="steps", save_steps=2, learning_rate=0.1
)  # of four steps an epoch


def references_in(folder):
    return {f.name: safetensors.torch.load_file(f)["reference_cov"] for f in Path(folder).glob("reference_cov*")}


def test_two_penalties_resume_each_with_its_own_reference():
    out, ends = tempfile.mkdtemp(), []
    for checkpoint in (None, f"{out}/checkpoint-2"):
        penalties = [CosReg(0.1), IStar(-1, zeta=0.5, layers=1), IStar(1, zeta=0.5, layers=2)]
        trainer = make_trainer(penalties, examples(32, 0), output_dir=out, **SAVING)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    kept = references_in(f"{out}/checkpoint-2")
    assert set(kept) == {
        "reference_cov.safetensors",
        "reference_cov_2.safetensors",
    }  # the first has the name that a lone one has
    assert not torch.equal(*kept.values()) and all(torch.equal(a, b) for a, b in zip(*ends))


def _resume_on_rank(rank, world, have):
    "The reference after a resume inside an epoch, where the first `have` ranks find one in their checkpoint."
    trainer = make_trainer(IStar(-1), examples(16, 0), batch_size=4, kind=PenaltyTrainer)
    (penalty,), folder = trainer.penalties, Path(tempfile.mkdtemp())
    torch.save(trainer.model.state_dict(), folder / "pytorch_model.bin")
    if rank < have:
        safetensors.torch.save_file({"reference_cov": torch.eye(16)}, folder / "reference_cov.safetensors")
    trainer._load_from_checkpoint(str(folder))
    loader = torch.utils.data.DataLoader(examples(16, 0), 4)
    (refresh,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ReferenceRefresh))
    state = types.SimpleNamespace(epoch=0.5, global_step=2)
    refresh.on_epoch_begin(trainer.args, state, None, model=trainer.model, train_dataloader=loader)
    return penalty.reference_cov


def test_ranks_take_a_kept_reference_together_or_not_at_all():
    for kept in on_ranks(_resume_on_rank, 2):
        assert torch.equal(kept, torch.eye(16))
    one, two = on_ranks(_resume_on_rank, 1)
    assert torch.equal(one, two) and not torch.equal(one, torch.eye(16))


def test_a_reference_that_was_set_before_the_trainer_was_made_is_kept():
    mine, drawn = IStar(-0.1), IStar(-0.1)
    mine.set_reference(torch.eye(16))
    for penalty in (mine, drawn):
        trainer = make_trainer(penalty, examples(16, 0), steps=4)
        trainer.train()
        trainer.train()
    assert torch.equal(mine.reference_cov, torch.eye(16)) and not torch.equal(drawn.reference_cov, torch.eye(16))


@pytest.mark.parametrize(
    "device, forked", [("cpu", ([], "cuda")), ("cuda:1", ([1], "cuda")), ("xpu:1", ([1], "xpu")), ("mps", ([0], "mps"))]
)
def test_random_states_of_the_device_are_kept(device, forked, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.random,
        "fork_rng",
        lambda devices, device_type="cuda": (asked.append((devices, device_type)), contextlib.nullcontext())[1],
    )
    with same_draws(torch.device(device)):
        pass
    assert asked == [forked]


def test_measuring_leaves_all_random_states_as_they_were():
    drawn = []

    def collate(rows):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return default_data_collator(rows)

    runs = []
    for penalty in (None, IStar(0.0)):
        random.seed(0)
        np.random.seed(0)
        trainer = make_trainer(penalty, examples(16, 0), steps=2)
        trainer.data_collator = collate
        if penalty is not None:
            trainer.add_callback(IsotropyLog(InTurn(collate)))
        drawn.clear()
        trainer.train()
        runs.append(list(drawn))
    assert len(runs[1]) > 2 == len(runs[0]) and runs[1][-1] == runs[0][-1] and runs[0][0] in runs[1]


class InTurn(list):
    "Batches that are collated when they are read."

    def __init__(self, collate):
        super().__init__([None])
        self.collate = collate

    def __iter__(self):
        yield {k: v for k, v in self.collate(examples(4, 3)).items() if k != "labels"}


@pytest.mark.parametrize(
    "arguments",
    [
        dict(bf16=True),
        dict(gradient_checkpointing=True),
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
    ],
)
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


def _train_on_rank(rank, world, name):
    penalty = {
        "istar": lambda: IStar(-1),
        "cosreg": lambda: CosReg(1),
        "ustat": lambda: IStar(1, correction="ustat", layers="mean"),
        "none": lambda: None,
    }[name]()
    trainer = make_trainer(penalty, ragged(8, 0), batch_size=8 // world, kind=PenaltyTrainer, data_seed=1)
    trainer._get_train_sampler = lambda *a: torch.utils.data.SequentialSampler(trainer.train_dataset)
    out = gradients(trainer)
    log = next(e for e in trainer.state.log_history if "loss" in e)
    return out, {k: log[k] for k in ("loss", "task_loss", "isoscore", "cosine") if k in log}


@pytest.mark.parametrize("name", ["istar", "cosreg", "ustat", "none"])
def test_two_ranks_give_the_gradient_and_loss_of_one(name):
    exact, log = _train_on_rank(0, 1, name)
    for ours, theirs in on_ranks(_train_on_rank, name):
        assert_same(ours, exact)
        for k, v in log.items():
            assert theirs[k] == pytest.approx(v, rel=1e-3), k


def test_two_penalties_of_one_kind_are_logged_apart():
    penalties = [IStar(-1, zeta=0, layers=1), IStar(1, zeta=0, layers=2)]
    trainer = make_trainer(penalties, examples(8, 0), batch_size=4, accumulation=2)
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    assert entry["istar"] == pytest.approx(-(1 - entry["isoscore"]), abs=1e-3) and entry["istar_2"] == pytest.approx(
        1 - entry["isoscore_2"], abs=1e-3
    )
    assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["istar"] + entry["istar_2"], abs=1e-3)


def frozen(trainer):
    trainer.model.bert.requires_grad_(False)


def no_gradient(caught):
    return [str(w.message) for w in caught if "no gradient" in str(w.message)]


@pytest.mark.parametrize("hinder", [frozen, lambda trainer: None])
def test_a_penalty_that_trains_nothing_warns_once(hinder):
    penalties = [IStar(-1, zeta=0), CosReg(1), TokenMean(), IStar(0, zeta=0)]  # the last has no effect by intention
    trainer = make_trainer(penalties, examples(32, 0), batch_size=4, steps=4)
    hinder(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
        trainer.evaluate()
    names = [re.match(r"penalty: the term of this (\w+) has no gradient", m).group(1) for m in no_gradient(caught)]
    assert names == (["IStar", "CosReg", "TokenMean"] if hinder is frozen else [])


class InTwoStacks(PenaltyMixin, Seq2SeqTrainer):
    pass


def one_step(kind=TrainingArguments):
    return kind(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_encoder_and_decoder_the_encoder_is_trained(kind):
    model, rows = of_two_stacks(kind), [r | {"labels": r["input_ids"]} for r in ragged(4, 0)]
    batch, penalties = default_data_collator(rows), [IStar(-1), IStar(1, zeta=0), CosReg(1)]
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).encoder_hidden_states
    InTwoStacks(model, one_step(Seq2SeqTrainingArguments), train_dataset=rows, penalty=penalties).train()
    for p in penalties[1:]:
        found = p.parts
        with torch.no_grad():
            p(states, batch["attention_mask"])
        for name in found:
            torch.testing.assert_close(found[name], p.parts[name], rtol=1e-4, atol=1e-5)
    assert penalties[0].reference_cov.shape == (16, 16)


def test_a_penalty_in_a_loop_says_so_once_but_not_where_it_measures():
    states, mask = states_and_mask()
    for penalty in (IStar(-1, zeta=0), IStar(1, correction="ustat"), CosReg(1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                penalty(states, mask)
            penalty.eval()(states, mask)
            assert not no_gradient(caught)
            for _ in range(3):
                penalty.train()(states, mask)
        assert len(no_gradient(caught)) == 1 and type(penalty).__name__ in no_gradient(caught)[0]


def test_isotropy_log():
    held_out = [{k: torch.stack([e[k] for e in examples(20, 4)]) for k in ("input_ids", "attention_mask")}]
    trainer = make_trainer(IStar(1, zeta=0), examples(32, 0), steps=4, dropout=0.1, eval_strategy="steps", eval_steps=2)
    record = IsotropyLog(held_out)
    trainer.add_callback(record)
    trainer.train()
    assert [h["step"] for h in record.history] == [0, 2, 4] and len(record.history[0]["layers"]) == 2
    assert record.history[0]["union"] == pytest.approx(
        measure_isotropy(make_trainer(None, examples(2, 0)).model, held_out)["union"], rel=1e-5
    )


def test_isotropy_of_the_best_model_is_measured_after_training():
    held_out = [{k: torch.stack([e[k] for e in examples(20, 4)]) for k in ("input_ids", "attention_mask")}]
    often = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True)
    best = dict(metric_for_best_model="eval_loss", greater_is_better=False)  # that of the first steps
    trainer = make_trainer(IStar(1, zeta=0), examples(32, 0), steps=4, **often, **best, learning_rate=0.1)
    record = IsotropyLog(held_out)
    trainer.add_callback(record)
    trainer.train()
    trainer.evaluate()
    assert [h["step"] for h in record.history] == [0, 2, 4, 4]
    at_two, at_four, now = (h["union"] for h in record.history[1:])
    assert trainer.state.best_model_checkpoint.endswith("-2") and now == pytest.approx(at_two, rel=1e-5) != at_four


def _isotropy_on_rank(rank, world):
    batches = [
        {k: torch.stack([e[k] for e in ragged(4, seed)]) for k in ("input_ids", "attention_mask")} for seed in range(4)
    ]
    found = []
    for sample, limit in ((batches, None), (batches, 40), (torch.utils.data.DataLoader(batches, None), None)):
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

LENGTHS = {
    "bert": "BertForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "albert": "AlbertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "electra": "ElectraForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
}


@pytest.mark.parametrize("kind, groups", [*((kind, 3) for kind in LENGTHS), ("bert", 40)])
def test_groups_by_length_are_the_same_function(kind, groups):
    import transformers

    sizes = dict(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=24,
    )
    if kind == "distilbert":
        sizes = dict(vocab_size=60, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=24)
    if kind == "albert":
        sizes["embedding_size"] = 16
    if kind == "modernbert":
        sizes |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    config = transformers.AutoConfig.for_model(kind, **sizes | dict(pad_token_id=0))
    torch.manual_seed(0)
    model = getattr(transformers, LENGTHS[kind])(config).eval()
    lengths = torch.randint(1, 17, (7, 1), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(16) < lengths).long()
    batch = {
        "input_ids": torch.randint(3, 60, (7, 16), generator=torch.Generator().manual_seed(2)) * mask,
        "attention_mask": mask,
        "labels": torch.arange(7) % 2,
    }

    def measured():
        out = model(**batch, output_hidden_states=True)
        (out.loss + IStar(-1, zeta=0)(out.hidden_states, mask)).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return (
            out.loss.detach(),
            out.logits.detach(),
            gradient,
            torch.stack([h[mask.bool()] for h in out.hidden_states]).detach(),
        )

    plain = measured()
    names = list(model.state_dict())
    assert split_by_length(model, groups) is model and list(model.state_dict()) == names
    for a, b in zip(plain, measured()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def test_groups_by_length_read_fewer_tokens_and_name_what_they_refuse():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            attn_implementation="eager",
        )
    ).eval()
    read, plain = [], model.embeddings.forward
    model.embeddings.forward = lambda input_ids=None, **kw: (
        read.append(input_ids.numel()),
        plain(input_ids=input_ids, **kw),
    )[1]
    mask = torch.ones(8, 12, dtype=torch.long)
    mask[:6, 3:] = 0
    split_by_length(model, 4)
    read.clear()
    with torch.no_grad():
        states = model(torch.ones(8, 12, dtype=torch.long), attention_mask=mask).last_hidden_state
    assert sum(read) == 6 * 3 + 2 * 12 and states.shape == (8, 12, 16) and states[:6, 3:].abs().max() == 0
    left = mask.flip(1)  # padding on the left is right as well, though nothing is saved
    with torch.no_grad():
        assert model(torch.ones(8, 12, dtype=torch.long), attention_mask=left).last_hidden_state.shape == (8, 12, 16)
    with pytest.raises(ValueError, match="output_attentions"):
        model(torch.ones(8, 12, dtype=torch.long), attention_mask=mask, output_attentions=True)
    with pytest.raises(ValueError, match="groups: 0"):
        split_by_length(model, 0)


def grouped_bert():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**CONFIG, num_labels=2)).eval()
    mask = (torch.arange(12) < torch.randint(2, 13, (7, 1))).long()
    return model, {"input_ids": torch.randint(3, 60, (7, 12)) * mask, "attention_mask": mask}


def test_a_copy_of_a_model_in_groups_computes_with_its_own_weights():
    model, batch = grouped_bert()
    names = list(inspect.signature(model.bert.forward).parameters)
    want = model(**batch).logits
    split_by_length(model, 3)
    assert list(inspect.signature(model.bert.forward).parameters) == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert (
        twin(**batch).logits.abs().max() == 0
        and twin(**batch, output_hidden_states=True).hidden_states[-1].abs().max() == 0
    )
    torch.testing.assert_close(model(**batch).logits, want, rtol=1e-4, atol=1e-5)
    read, plain = [], model.bert.embeddings.forward
    model.bert.embeddings.forward = lambda input_ids=None, **kw: (
        read.append(len(input_ids)),
        plain(input_ids=input_ids, **kw),
    )[1]
    split_by_length(model, 2)  # in place of the three groups, not around them
    read.clear()
    torch.testing.assert_close(model(**batch).logits, want, rtol=1e-4, atol=1e-5)
    assert sorted(read) == [3, 4]


def test_groups_by_length_cut_what_else_belongs_to_the_batch():
    model, batch = grouped_bert()
    for ids in (torch.arange(12)[None].flip(1), torch.stack([torch.randperm(12) for _ in range(7)])):
        want = model(**batch, position_ids=ids).logits
        torch.testing.assert_close(
            split_by_length(copy.deepcopy(model), 3)(**batch, position_ids=ids).logits, want, rtol=1e-4, atol=1e-5
        )
    for width in (5, 12):  # as long as the batch, or not
        torch.manual_seed(0)
        decoder = BertModel(BertConfig(**CONFIG, is_decoder=True, add_cross_attention=True)).eval()
        states = dict(
            encoder_hidden_states=torch.randn(7, width, 16),
            encoder_attention_mask=(torch.arange(width) < torch.randint(1, width + 1, (7, 1))).long(),
        )
        want = decoder(**batch, **states, use_cache=False).last_hidden_state
        got = split_by_length(decoder, 3)(**batch, **states, use_cache=False).last_hidden_state
        torch.testing.assert_close(
            got[batch["attention_mask"].bool()], want[batch["attention_mask"].bool()], rtol=1e-4, atol=1e-5
        )


def test_one_group_gives_the_forward_back():
    model, batch = grouped_bert()
    split_by_length(split_by_length(model, 3), 1)
    assert "forward" not in vars(model.bert)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_two_stacks_the_encoder_reads_in_groups(kind):
    model, (_, batch) = of_two_stacks(kind).eval(), grouped_bert()
    batch = batch | {"labels": batch["input_ids"]}
    want = model(**batch).loss
    split_by_length(model, 3)
    torch.testing.assert_close(model(**batch).loss, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ConvBert", "MobileBert", "FNet"])
def test_groups_by_length_refuse_an_encoder_that_reads_padding(kind):
    import transformers

    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=24
    )
    if kind == "Funnel":
        sizes = dict(d_model=32, n_head=2, d_head=16, d_inner=48, block_sizes=[1, 1])
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(vocab_size=60, pad_token_id=0, **sizes)
    )
    with pytest.raises(ValueError, match="model: .*leave its batches whole"):
        split_by_length(model, 4)
    assert model.training and "forward" not in vars(model)
    assert split_by_length(model, 1) is model


# ---- compiled, and without waiting -----------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    "Counts the operations that are of a kind."

    def __init__(self, is_one):
        super().__init__()
        self.count, self.is_one = 0, is_one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.is_one(func)
        return func(*args, **(kwargs or {}))


def reads_back(func):
    return func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "equal", "masked_select"}


def batch():
    mask = torch.ones(4, 6)
    mask[1, 4:] = 0
    return tuple(torch.randn(4, 6, 16, requires_grad=True) for _ in range(3)), mask


KINDS = {
    "istar": lambda: IStar(0.1, reference_cov=torch.eye(16) + 0.1),
    "plain": lambda: IStar(0.1, zeta=0),
    "ustat": lambda: IStar(0.1, correction="ustat"),
    "mean of layers": lambda: IStar(0.1, layers="mean", correction="gaussian"),
    "cosreg": lambda: CosReg(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_no_value(kind, monkeypatch):
    penalty, (states, mask), lists = KINDS[kind](), batch(), []
    whole = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(t) or whole(t))
    with Counted(reads_back) as reads:
        penalty(states, mask).backward()
    assert reads.count == 0 and len(lists) == 1  # on a CPU: whether all is well
    monkeypatch.setattr("isoreg.istar.check_batches", lambda *_: None)  # as on an accelerator
    with Counted(reads_back) as reads:
        penalty(states, mask).backward()
    assert reads.count == 0 and len(lists) == 1


@pytest.mark.parametrize("kind, most", [("istar", 20), ("plain", 20), ("ustat", 40)])
def test_a_layer_more_starts_few_operations_and_a_frozen_one_fewer(kind, most):
    def count(layers, frozen=0):
        states = tuple(torch.randn(4, 6, 16, requires_grad=k >= frozen) for k in range(layers + 1))
        with Counted(lambda func: not func.is_view) as seen:  # each is to be started by a GPU
            KINDS[kind]()(states, torch.ones(4, 6)).backward()
        return seen.count

    assert 0 < count(7) - count(6) <= most
    assert count(6, frozen=5) <= count(6) - 2 * 4  # of the five the first is the embeddings


@pytest.mark.parametrize("kind, backend", [*((k, "aot_eager") for k in KINDS), ("istar", "inductor")])
def test_compiled_without_a_graph_break(kind, backend):
    torch._dynamo.reset()
    penalty, (states, mask) = KINDS[kind](), batch()
    compiled = torch.compile(penalty, backend=backend, fullgraph=True)
    ours, theirs = penalty(states, mask), compiled(states, mask)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(term, states, allow_unused=True) for term in (ours, theirs))):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    compiled(tuple(h * math.nan for h in states), mask)
    compiled(states, mask)  # a later batch hides nothing
    with pytest.raises(ValueError, match="hidden_states: a batch has no score"):
        check_batches(penalty)
    compiled(states, mask)
    check_batches(penalty)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda mask: mask * 2, "attention_mask: holds values other than 0 and 1"),
        (lambda mask: mask * 0, "hidden_states: a batch has no score"),
    ],
)
def test_what_no_step_waited_for_is_said_by_the_check(damage, message):
    penalty, (states, mask) = IStar(0.1, zeta=0), batch()
    compiled = torch.compile(penalty, backend="aot_eager", fullgraph=True)
    compiled(states, damage(mask))
    compiled(states, mask)
    with pytest.raises(ValueError, match=message):
        check_batches(penalty)


def test_second_moments_of_a_compiled_cloud_of_order_4():
    x, mask = torch.randn(3, 20, 6, dtype=torch.float64, requires_grad=True), torch.rand(3, 20) > 0.3

    def loss(x):
        m = moments(x, mask, 4)
        return m.mean.sin().sum() + m.m2.cos().sum() + m.m3.sin().sum() + m.m4.log().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), loss(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))
