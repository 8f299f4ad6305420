"""The penalties against direct formulas: scores, gradients, references, messages, ranks, and what a device starts."""

import contextlib
import copy
import math
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from small_transformers import as_released, model_and_batches, of_two_stacks
from torch.utils._python_dispatch import TorchDispatchMode

from isoreg.isoscore import isoscore, isoscore_star
from isoreg.istar import CosReg, IStar, as_penalties, check_batches
from isoreg.istar import measure_isotropy, reference_covariance, token_moments
from isoreg.moments import few_operations


def states_and_mask(dtype=torch.float64, requires_grad=False):
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(3, 6, 8, generator=g, dtype=torch.float64) + torch.randn(8, generator=g)
    states = tuple(draw().to(dtype).requires_grad_(requires_grad) for _ in range(4))
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


def test_padding_only_when_asked():
    states, mask = states_and_mask()
    torch.testing.assert_close(
        IStar(1, zeta=0, padding=True).score(states, mask), isoscore(torch.cat(states[1:]).flatten(0, 1))
    )
    poisoned = tuple(h.masked_fill(mask[..., None] == 0, float("nan")) for h in states)
    torch.testing.assert_close(IStar(1, zeta=0)(poisoned, mask), IStar(1, zeta=0)(states, mask))
    poisoned = tuple(h.detach().requires_grad_() for h in poisoned)
    term = CosReg(1)(poisoned, mask)
    term.backward()
    torch.testing.assert_close(term.detach(), CosReg(1)(states, mask))
    assert bool(torch.isfinite(poisoned[-1].grad).all()) and poisoned[-1].grad[mask == 0].abs().max() == 0


SCORED = [IStar(-2, 0.2, torch.eye(5)), IStar(1, zeta=0, layers="mean"), IStar(3, correction="ustat")]


@pytest.mark.parametrize("penalty", [*SCORED, IStar(1, correction="gaussian", layers=1)])
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


EVEN = [torch.eye(16), torch.eye(40)[:20]]
LINES = [ODD, 1e3 * ODD]  # all points but one are equal; the Gaussian correction has an estimate for them


@pytest.mark.parametrize("correction, cloud", [*(("ustat", x) for x in EVEN + LINES), *(("gaussian", x) for x in EVEN)])
def test_rounding_is_no_estimate(cloud, correction):
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


@pytest.mark.parametrize("padding", [False, True])
def test_cosreg_is_the_n_by_n_form_where_tokens_without_a_direction_add_nothing(padding):
    states, mask = states_and_mask()
    states[-1][0, :3] = 0
    h = states[-1].requires_grad_()
    u = torch.nn.functional.normalize(h[torch.ones_like(mask).bool() if padding else mask.bool()], dim=-1)
    exact = (u @ u.T).fill_diagonal_(0).sum() / len(u) ** 2
    ours = CosReg(1.5, padding=padding)(states, mask) / 1.5
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(v, h)[0] for v in (ours, exact)))


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
    assert score["union"] == pytest.approx(float(isoscore(rows)), rel=1e-5)
    assert score["points"] == len(rows) and len(score["layers"]) == 2
    padded = torch.cat([h.flatten(0, 1) for states in hidden for h in states[1:]])
    torch.testing.assert_close(reference_covariance(model, batches, padding=True, progress=False), torch.cov(padded.T))
    assert reference_covariance(model, batches, layers="mean", progress=False).shape == (2, 16, 16)


def test_max_points_is_a_maximum_and_is_reached():
    model, batches = model_and_batches()
    for limit in (2, 30, 31, 77):
        m = token_moments(model, iter(batches), limit)
        assert limit - 2 < int(m.count[1:].sum()) <= limit


@pytest.mark.parametrize("max_points, taken", [(79, 80), (80, 160), (150, 160), (1000, 480)])
def test_released_reference_takes_whole_batches_beyond_the_cap(max_points, taken):
    model, batches = model_and_batches()  # 40 positions a batch, 80 vectors in two layers
    common = dict(padding=True, progress=False)
    released = lambda **kw: reference_covariance(model, iter(batches), max_points, released=True, **common, **kw)
    rows = as_released(model, batches, max_points)
    assert len(rows) == taken
    torch.testing.assert_close(released(), torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)
    exact = reference_covariance(model, batches, max_points, **common)
    assert torch.allclose(exact, released()) == (max_points >= 480)
    for layer in (1, 2, -1):  # of one layer its own vectors count
        rows = as_released(model, batches, max_points, layer)
        assert len(rows) == min(240, 40 * (max_points // 40 + 1))
        torch.testing.assert_close(released(layers=layer), torch.cov(rows.T).float(), rtol=1e-5, atol=1e-6)


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
        (lambda: IStar(1, zeta=0)((torch.randn(2, 16, 4, 4),)), r"hidden_states: .*h.flatten\(2\).transpose\(1, 2\)"),
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
        (lambda: IStar(1, layers=True), "layers: True"),
        (lambda: reference_covariance(MODEL, BATCHES, layers="maen"), "layers: 'maen' .*'mean'"),
        (lambda: reference_covariance(MODEL, BATCHES, layers=True), "layers: True"),
        (lambda: reference_covariance(MODEL, BATCHES, layers=7, progress=False), "layers: 7 .*3 hidden states"),
        (lambda: measure_isotropy(MODEL, []), "batches: no batch"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match="^" + message):
        call()


def test_penalties_come_alone_or_in_a_list():
    one, two = IStar(1, zeta=0), [IStar(1, zeta=0), CosReg(1)]
    assert as_penalties(None) == [] and as_penalties(one) == [one]
    assert as_penalties(tuple(two)) == as_penalties(torch.nn.ModuleList(two)) == two
    for wrong in (5, IStar, [IStar]):
        with pytest.raises(ValueError, match="penalty: need a module such as"):
            as_penalties(wrong)


def test_a_penalty_without_a_gradient_warns_but_not_where_it_measures():
    states, mask = states_and_mask()
    for penalty in (IStar(-1, zeta=0), IStar(1, correction="ustat"), CosReg(1), IStar(0, zeta=0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            with torch.no_grad():
                penalty(states, mask)
            penalty.eval()(states, mask)
            penalty.train()(*states_and_mask(requires_grad=True))
            assert not caught
            for _ in range(3):
                penalty(states, mask)
        said = [str(w.message).partition(", ")[0] for w in caught]
        has_effect = penalty.lam != 0  # else it trains nothing by intention
        assert said == [f"penalty: the term of this {type(penalty).__name__} has no gradient"] * has_effect


# ---- compiled, and without waiting


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
    "gaussian": lambda: IStar(0.1, correction="gaussian"),
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


# no work of a device: types, memory that is not filled, a view in place
NO_WORK = {"promote_types", "new_empty", "empty", "squeeze_"}


@pytest.mark.parametrize("kind, most", [("istar", 60), ("plain", 60), ("gaussian", 75), ("ustat", 90), ("cosreg", 23)])
@pytest.mark.parametrize("size", [(4, 64, 16), (32, 128, 768)])
def test_an_accelerator_starts_few_operations_for_twelve_layers(kind, most, size):
    "On the device `meta`, which computes nothing; the larger size is that of BERT-base."
    states = tuple(torch.randn(*size, device="meta", requires_grad=True) for _ in range(13))
    penalty, masks = KINDS[kind](), [torch.ones(size[:2], device=device).long() for device in ("meta", "cpu")]
    if kind == "istar":
        penalty.set_reference(torch.eye(size[2]))
    for mask in masks:  # the second one lies on the processor
        with Counted(lambda func: not func.is_view and func.overloadpacket.__name__ not in NO_WORK) as started:
            term = penalty(states, mask)
        assert 10 < started.count <= most + 3 * (mask is masks[1]) and penalty.worst.is_meta
    term.backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset, spread", [(0, 1), (1e3, 1), (50, 1e3)])
def test_the_path_of_an_accelerator_gives_the_same_score_and_gradient(kind, offset, spread):
    torch.manual_seed(0)
    scale, found = torch.logspace(0, math.log10(spread), 16), []
    states = tuple((torch.randn(8, 50, 16) * scale + offset).requires_grad_() for _ in range(4))
    mask = (torch.arange(50) < torch.randint(20, 51, (8, 1))).long()
    for way in (contextlib.nullcontext(), mock.patch.object(few_operations, "on_cpu", True)):
        penalty = KINDS[kind]()
        with way:
            gradients = torch.autograd.grad(penalty(states, mask), states[1:], allow_unused=True)
        score = penalty.parts.get("isoscore", penalty.parts.get("cosine"))
        found.append((score, torch.stack([g for g in gradients if g is not None])))
    (a, g), (b, h) = found
    torch.testing.assert_close(b, a, rtol=1e-6, atol=0)
    assert float((h - g).norm() / g.norm()) < 1e-5


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
