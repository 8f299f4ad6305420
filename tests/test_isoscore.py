"""IsoScore against the published package, eigenvalues and its own axioms; corrected scores against known populations;
the metric against all points at once."""

import contextlib
import copy
import itertools
import math
import pickle
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from hypothesis import given, settings, strategies as st
from IsoScore.IsoScore import IsoScore as published, IsoScore_star as published_star, istar
from ranks import on_ranks

import isoreg
from isoreg.isoscore import CONVENTIONS, isoscore, isoscore_from_cov, isoscore_star, participation_ratio
from isoreg.isoscore import _counted_twice, _unbiased_fourth, isoscore_with_error
from isoreg.metric import IsoScore
from isoreg.moments import few_operations
from isoreg.tokens import SequenceStream, draw_groups, isoscore_by_sequence

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")


def eigenvalue_form(points):
    "The published steps, in float64; few points have few eigenvalues that are not zero, their singular values squared."
    (n, d), X = points.shape, points.double()
    if n >= d:
        lam = torch.linalg.eigvalsh(torch.cov(X.T)).clamp(min=0)
    else:
        lam = torch.cat([torch.linalg.svdvals(X - X.mean(0)) ** 2 / (n - 1), X.new_zeros(d - n)])
    normal = math.sqrt(d) * lam / lam.norm()
    defect2 = (normal - 1).square().sum() / (2 * (d - math.sqrt(d)))
    phi = (d - defect2 * (d - math.sqrt(d))) ** 2 / d**2
    return (d * phi - 1) / (d - 1)


def spectra(d):
    g = torch.Generator().manual_seed(d)
    return {
        "random": torch.rand(d, generator=g) + 0.05,
        "power law": 1 / torch.arange(1, d + 1),
        "repeated": torch.cat([torch.full((d // 2,), 2.0), torch.ones(d - d // 2)]),
        "one outlier dimension": torch.where(torch.arange(d) == d // 2, 1e4, 1.0),
        "near isotropic": torch.ones(d) + 1e-3 * torch.rand(d, generator=g),
    }


CASES = [(d, n, name) for d, n in [(2, 50), (48, 400), (96, 40), (256, 1000)] for name in spectra(4)]


@pytest.mark.parametrize("d, n, name", CASES)
def test_equals_eigenvalues_and_the_package(d, n, name):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * spectra(d)[name].double()
    exact = eigenvalue_form(x)
    assert_close(isoscore(x), exact, rtol=1e-10, atol=1e-15)  # 1e-15: what float64 leaves of PR - 1
    ours, theirs = isoscore(x.float()), published(x.float()).double()
    assert ours.dtype == torch.float32
    if name == "one outlier dimension":  # a score near 0: ours keeps its digits, float32 eigenvalues do not
        assert_close(ours.double(), eigenvalue_form(x.float()), rtol=1e-5, atol=1e-15)
        assert d == 2 or abs(theirs - exact) > 1e-3 * exact
    else:
        assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("zeta", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("n", [20, 300])
def test_star_equals_the_package(n, zeta):
    x, reference = torch.randn(n, 40) * torch.linspace(0.2, 2, 40), torch.cov(torch.randn(40, 500))
    assert_close(isoscore_star(x, reference, zeta), published_star(x, reference, zeta), rtol=1e-5, atol=0)
    x.requires_grad_()
    (ours,) = torch.autograd.grad(isoscore_star(x, reference, zeta), x)
    if zeta == 1.0:
        return assert_close(ours, torch.zeros_like(ours))
    (theirs,) = torch.autograd.grad(istar().IsoScore_star(x, reference, zeta, is_eval=False), x)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("n, d", [(12, 4), (5, 9)])
@pytest.mark.parametrize("correction", [None, "gaussian", "ustat"])
def test_first_and_second_derivatives(n, d, correction):
    x, reference = torch.randn(2, n, d, dtype=torch.float64, requires_grad=True), torch.eye(d, dtype=torch.float64)
    mask = torch.tensor([1] * (n - 1) + [0])
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: isoscore(x, mask, correction), (x,))
        if correction is None:
            for convention in CONVENTIONS:
                assert check(lambda x: isoscore_star(x, reference, 0.3, mask, convention), (x,))


def cloud(seed, n, d):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64) * torch.linspace(0.2, 2, d)


seeds, sizes, dims = st.integers(0, 10**6), st.integers(3, 60), st.integers(2, 40)
relaxed = settings(deadline=None, max_examples=50)


@relaxed
@given(seeds, sizes, dims, st.floats(-1e3, 1e3), st.floats(1e-4, 1e4))
def test_mean_scale_rotation_bounds_and_masks(seed, n, d, shift, scale):
    x = cloud(seed, n, d)
    score, q = isoscore(x), torch.linalg.qr(cloud(seed + 1, d, d))[0]
    assert -1e-12 <= score <= 1 + 1e-12
    assert_close(isoscore(x + shift), score, rtol=1e-8, atol=1e-12)
    assert_close(isoscore(x * scale), score, rtol=1e-9, atol=0)
    assert_close(isoscore(x @ q), score, rtol=1e-8, atol=1e-12)
    garbage, mask = torch.cat([x, torch.full((5, d), float("nan"))]), torch.arange(n + 5) < n
    for same in (mask, pd.Series(mask, index=range(7, n + 12)), mask.flip(0).numpy()[::-1]):
        assert_close(isoscore(garbage, same), score, rtol=1e-9, atol=1e-13)


@relaxed
@given(st.integers(3, 40), st.floats(1.01, 100), st.floats(1.01, 10), st.data())
def test_maximal_variance_and_dimensions_used(d, top, factor, data):
    of = lambda *v: torch.diag(torch.tensor(v, dtype=torch.float64))
    ones, k = [1.0] * (d - 1), data.draw(st.integers(1, d))
    assert isoscore_from_cov(of(top * factor, *ones)) < isoscore_from_cov(of(top, *ones)) < 1
    used = of(*[1.0] * k, *[0.0] * (d - k))
    assert isoscore_from_cov(used) * (d - 1) + 1 == pytest.approx(k) == pytest.approx(float(participation_ratio(used)))
    many = participation_ratio(used.repeat(2, 3, 1, 1))
    assert many.shape == (2, 3) and many.flatten().tolist() == pytest.approx([k] * 6)


def sums_over_distinct(x, mask):
    "The score by sequence by its definition: means over pairs, triples and quadruples of different sequences."
    x = x - x[mask].mean(0)  # the weights make the estimate depend (slightly) on the origin: the code centres first
    n, s = mask.sum(1), (x * mask[..., None]).sum(1)
    P = np.einsum("ctd,cte,ct->cde", x, x, mask)
    p = np.trace(P, axis1=1, axis2=2)

    def mean(k, f):
        which = list(itertools.permutations(range(len(x)), k))
        return sum(f(*i) for i in which) / sum(np.prod(n[list(i)]) for i in which)

    four = mean(4, lambda a, b, c, e: (s[a] @ s[b]) * (s[c] @ s[e]))
    square = mean(2, lambda a, b: (P[a] * P[b]).sum()) - 2 * mean(3, lambda a, b, c: s[a] @ P[c] @ s[b]) + four
    trace2 = mean(2, lambda a, b: p[a] * p[b]) - 2 * mean(3, lambda a, b, c: p[c] * (s[a] @ s[b])) + four
    return pytest.approx((trace2 / square - 1) / (x.shape[-1] - 1), rel=1e-9)


@pytest.mark.parametrize("d", [3, 11])
def test_ustat_equals_sums_over_distinct_rows(d):
    x = np.random.default_rng(6).normal(size=(6, d)) ** 3 + 2
    assert isoscore(x, correction="ustat") == sums_over_distinct(x[:, None], np.ones((6, 1), bool))


def test_by_sequence_equals_sums_over_distinct_sequences():
    rng = np.random.default_rng(1)
    x, mask = rng.normal(size=(6, 4, 5)) + rng.normal(size=(6, 1, 5)), rng.random((6, 4)) < 0.7
    mask[:, 0] = True
    assert isoscore_by_sequence(x, mask).score == sums_over_distinct(x, mask)


def test_standard_error_matches_the_scatter():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(300, 60, 100, generator=g) * torch.linspace(0.3, 2, 100)
    x = x * torch.randn(300, 60, 1, generator=g).mul(0.4).exp()
    scores = isoscore(x, correction="ustat")
    told = [isoscore_with_error(c) for c in x[:60]]
    assert 0.7 < np.mean([t.stderr for t in told]) / float(scores.std()) < 1.6
    assert told[0].score == pytest.approx(float(scores[0]), rel=1e-5)


def test_standard_error_by_sequence_whatever_the_order():
    "Sequences of growing scale along half of the axes: sorted by it, a group of neighbours would be unlike the others."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, 8, generator=g, dtype=torch.float64)
    x[..., :4] *= torch.linspace(0.2, 3, 400, dtype=torch.float64)[:, None, None]
    draws = [x[torch.randint(400, (400,), generator=g)] for _ in range(200)]
    right = np.std([isoscore_by_sequence(c).score for c in draws])
    orders = torch.arange(400), torch.arange(399, -1, -1), torch.randperm(400, generator=g)
    told = [isoscore_by_sequence(x[order]) for order in orders]
    assert all(0.6 < e.stderr / right < 1.6 for e in told)
    assert told[1].score == pytest.approx(told[0].score, rel=1e-9)
    state = torch.get_rng_state()
    assert isoscore_by_sequence(x) == told[0] and torch.equal(torch.get_rng_state(), state)


def pairings(ends):
    "Yield all ways to put an even number of things into pairs."
    if not ends:
        yield []
    for i in range(1, len(ends)):
        for rest in pairings(ends[1:i] + ends[i + 1 :]):
            yield [(ends[0], ends[i]), *rest]


def loops(one, other):
    "Return the lengths, in pairs of the first, of the loops that two pairings of the same things make together."
    one, other = ({a: b for p in pairs for a, b in (p, p[::-1])} for pairs in (one, other))
    left, lengths = set(one), []
    while left:
        here, length = next(iter(left)), 0
        while here in left:
            left -= {here, one[here]}
            here, length = other[one[here]], length + 1
        lengths.append(length)
    return lengths


def expected(parts, ν, traces):
    """Return E of the product of tr(W^k) over the parts, for W the sum of the squares x xᵀ of ν normal vectors with
    traces[k] = tr(Σ^k), by Wick's theorem: a sum over all ways to pair the two ends of each place in the product."""
    ends = [(i, e) for i in range(sum(parts)) for e in (0, 1)]
    same, next_to, at = [((i, 0), (i, 1)) for i in range(sum(parts))], [], 0
    for k in parts:
        next_to += [((at + i, 1), (at + (i + 1) % k, 0)) for i in range(k)]
        at += k
    return sum(ν ** len(loops(p, same)) * math.prod(traces[k] for k in loops(p, next_to)) for p in pairings(ends))


@pytest.mark.parametrize("ν", [4, 7, 30])
@pytest.mark.parametrize("variances", [[1.0], [2.0, 0.5], [3.0, 1.0, 1.0, 0.2]])
def test_the_unbiased_trace_has_the_expectation_that_it_is_to_have(ν, variances):
    "The estimate is a sum of products of traces; each weight is read off, each product's expectation is Wick's."
    traces = {k: sum(v**k for v in variances) for k in range(1, 5)}
    mean = lambda *parts: expected(parts, ν, traces) / ν ** sum(parts)
    assert mean(2) == pytest.approx((traces[2] * (ν + 1) + traces[1] ** 2) / ν)  # as every textbook has it
    of = lambda *s: float(_unbiased_fourth(ν, *torch.tensor(s, dtype=torch.float64)))
    weights = {(4,): of(0, 0, 0, 1), (2, 2): of(0, 1, 0, 0), (1, 1, 1, 1): of(1, 0, 0, 0)}
    weights[3, 1] = of(1, 0, 1, 0) - weights[1, 1, 1, 1]
    weights[2, 1, 1] = of(1, 1, 0, 0) - weights[2, 2] - weights[1, 1, 1, 1]
    assert sum(w * mean(*parts) for parts, w in weights.items()) == pytest.approx(traces[4], rel=1e-9)
    S, n = torch.diag(torch.tensor(variances, dtype=torch.float64)), 10**6
    assert float(_counted_twice(S, n)) * n**2 / 4 == pytest.approx(1 + traces[4] / traces[2] ** 2, rel=1e-4)


@pytest.mark.parametrize("n, d", [(9, 2), (30, 4), (60, 3), (8, 30)])
def test_standard_error_is_the_jackknife_less_what_it_counts_twice(n, d):
    x = cloud(7, n, d)
    score, stderr = isoscore_with_error(x)[:2]
    without = torch.stack([isoscore(torch.cat([x[:i], x[i + 1 :]]), correction="ustat") for i in range(n)])
    jackknife = float((n - 1) / n * (without - without.mean()).square().sum())
    less = jackknife - (score + 1 / (d - 1)) ** 2 * float(_counted_twice(torch.cov(x.T), n))
    assert stderr**2 == pytest.approx(max(less, jackknife / 2), rel=1e-6)


def seen(*batches, dims=16, **how):
    metric = IsoScore(dims, **how)
    for batch in batches:
        metric.update(batch)
    return metric


def _metric_on_rank(rank, world):
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) + 20
    metric = seen(*(x[:13] if rank == 0 else x[13:]).split(7), dims=6, correction="ustat")
    scores = [metric.compute()]
    metric.reset()
    metric.update(x[rank * 25 : rank * 25 + 25])
    scores.append(metric.compute())
    metric.reset()
    metric.update(x[:1].expand(30, 6))
    with pytest.raises(ValueError, match="zero variance"):
        metric.compute()
    return scores


def test_metric_over_ranks():
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).add(20).double()
    for scores in on_ranks(_metric_on_rank):
        assert_close(torch.stack(scores), isoscore(x, correction="ustat").expand(2), rtol=1e-5, atol=0)


def test_the_callable_module_is_copied_and_pickled_as_itself():
    assert copy.deepcopy([isoreg.isoscore])[0] is isoreg.isoscore is pickle.loads(pickle.dumps(isoreg.isoscore))


@pytest.mark.parametrize("m, groups", [(24, 7), (9, 20)])
def test_groups_of_sequences_are_drawn_and_of_like_size(m, groups):
    group, k = draw_groups(m, groups), min(groups, m)
    assert group.unique().tolist() == list(range(k)) and max(group.bincount()) - min(group.bincount()) <= 1
    assert group.tolist() != sorted(group)


def test_sequences_can_stream_by_in_pieces_of_any_size():
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(39, 7, 6, generator=g, dtype=torch.float64) + 1000, torch.rand(39, 7, generator=g) < 0.7
    mask[:, 0] = True
    x[~mask] = float("nan")
    whole, group = isoscore_by_sequence(x, mask, groups=4), draw_groups(39, 4)
    assert whole.count == 39
    for size in (1, 3):
        stream = SequenceStream(4, 6, x.device)
        pieces = [(g, x[rows], mask[rows]) for g in range(4) for rows in (group == g).nonzero()[:, 0].split(size)]
        for piece in pieces:
            stream.first(*piece[1:])
        for g in range(4):
            for piece in pieces:
                if piece[0] == g:
                    stream.second(*piece)
            stream.close(g)
        assert stream.estimate() == pytest.approx(whole, rel=1e-7)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n, d", [(9, 24), (40, 6)])
@pytest.mark.parametrize("correction", [None, "gaussian", "ustat"])
def test_clouds_in_two_leading_dimensions_are_scored_one_by_one(n, d, correction, masked):
    g = torch.Generator().manual_seed(n)
    clouds = torch.randn(3, 2, n, d, generator=g) * torch.linspace(0.3, 2, d) + 5
    mask = torch.rand(3, 2, n, generator=g) < 0.8 if masked else torch.ones(3, 2, n, dtype=torch.bool)
    scores = isoscore(clouds, mask if masked else None, correction)
    for i, j in np.ndindex(3, 2):
        alone = isoscore(clouds[i, j][mask[i, j]].double(), correction=correction)
        assert float(scores[i, j]) == pytest.approx(float(alone), rel=1e-4)
    arrays = isoscore(clouds.numpy(), mask.numpy(), correction)
    assert isinstance(arrays, np.ndarray) and arrays.dtype == np.float32
    np.testing.assert_allclose(arrays, scores, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-20, 1e9])
def test_fourth_powers_that_float32_does_not_hold(scale):
    x = torch.randn(200, 64) * torch.linspace(0.1, 1, 64) * torch.randn(200, 1).exp()
    for correction in (None, "gaussian", "ustat"):
        want = float(isoscore(x.double(), correction=correction))
        metric = seen(*(x * scale).split(70), dims=64, correction=correction)
        found = isoscore(x * scale, correction=correction)
        assert float(found) == pytest.approx(want, rel=1e-4) == float(metric.compute())
    error = isoscore_with_error(x * scale).stderr
    assert error == pytest.approx(isoscore_with_error(x).stderr, rel=1e-3)


@pytest.mark.parametrize("n", [8, 1000])
def test_a_small_spread_far_from_the_origin_is_a_cloud(n):
    x = torch.randn(n, 16) + 1.2e6
    assert_close(isoscore(x).double(), isoscore(x.double()), rtol=1e-3, atol=0)


x53, nan = torch.randn(5, 3), torch.randn(5, 3).masked_fill(torch.eye(5, 3) > 0, float("nan"))
same = torch.randn(16).expand(9, 16)
eye, skew = torch.eye(16), torch.tensor([[1.0, 2, 3], [0, 1, 0], [0, 0, 1]])
even = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0][:5]
REFUSED = [
    (lambda: isoscore(x53, [1, 0, 0, 0, 0]), "points: only 1 rows count.*at least 2"),
    (lambda: isoscore(x53[:3], correction="ustat"), "points: .*at least 4"),
    (lambda: isoscore(x53[:2], correction="gaussian"), "points: .*at least 3"),
    (lambda: isoscore(x53[:, :1]), "points: .*one dimension"),
    (lambda: isoscore(same), "points: .*zero variance"),  # rounding is no variance
    (lambda: isoscore(same, correction="ustat"), "points: .*zero variance"),
    (lambda: isoscore(nan, [0, 1, 1, 1, 1]), r"points: row 1 \(from 0\) holds NaN.*mask"),
    (lambda: isoscore(x53, torch.ones(4)), r"mask: shape \(4,\) does not fit points \(5, 3\)"),
    (lambda: isoscore(x53, correction="bootstrap"), "correction: 'bootstrap' is unknown.*'ustat'"),
    (lambda: isoscore(torch.eye(5), correction="gaussian"), "points: the rows are as even as so few"),
    (lambda: isoscore(torch.eye(64), correction="ustat"), "points: the rows are as even as so few"),
    (lambda: isoscore_with_error(x53[:4]), "points: 4 rows count.*at least 5"),
    (lambda: isoscore_with_error(torch.randn(2, 9, 3)), r"points: one cloud wanted, got shape \(2, 9, 3\)"),
    (lambda: isoscore_with_error(torch.eye(5)), "points: the rows are as even as so few"),
    (lambda: isoscore_star(same, eye, 0.0), "points: .*zero variance"),
    (lambda: isoscore_star(same, eye, 1.0, convention="text"), "points: .*zero variance"),
    (lambda: isoscore_star(x53, torch.eye(3), 1.2), r"zeta: 1.2 .*\[0, 1\]"),
    (lambda: isoscore_star(x53, 0.2, torch.eye(3)), r"zeta: Tensor of shape \(3, 3\)"),
    (lambda: isoscore_star(x53, torch.eye(4), 0.2), r"reference_cov: need .* d = 3, got \(4, 4\)"),
    (lambda: isoscore_star(x53, torch.ones(3), 0.2), r"reference_cov: .*\(3,\)"),
    (lambda: isoscore_star(x53, skew, 0.2), "reference_cov: not symmetric"),
    (lambda: isoscore_star(x53, torch.eye(3) * math.nan, 0.2), "reference_cov: holds NaN"),
    (lambda: isoscore_star(x53, torch.zeros(3, 3), 1.0), "reference_cov: has zero variance"),
    (lambda: isoscore_star(x53, torch.eye(3), 0.2, convention="paper"), "convention: 'paper' is unknown.*'released'"),
    (lambda: isoscore_star(x53[:1], torch.eye(3), 0.2), "points: .*at least 2"),
    (lambda: isoscore_star(torch.stack([x53, nan]), torch.eye(3), 0.2), r"points: row 1, 0 \(from 0\)"),
    (lambda: isoscore_from_cov(torch.zeros(3, 3)), "cov: has zero variance"),
    (lambda: isoscore_from_cov(x53), r"cov: .*\(5, 3\); .*not the points"),
    (lambda: participation_ratio("cov.npy"), "cov: this str is no array"),
    (lambda: isoscore_by_sequence(x53), "points: .*n_sequences"),
    (lambda: isoscore_by_sequence(same.expand(6, 9, 16)), "points: .*zero variance"),
    (lambda: isoscore_by_sequence(torch.randn(3, 4, 3)), "points: 3 sequences .*at least 6"),
    (lambda: isoscore_by_sequence(torch.randn(8, 4, 3), groups=1), "groups: 1 "),
    (lambda: isoscore_by_sequence(torch.randn(6, 4, 3), groups=2), "points: .*add sequences"),
    (lambda: IsoScore(1), "num_dims: 1 "),
    (lambda: IsoScore(3).compute(), "points: 0 seen"),
    (lambda: IsoScore(3).update(torch.randn(4, 5)), "points: last dimension is 5.*num_dims=3"),
    (lambda: IsoScore(3).update(nan), r"points: row 0 \(from 0\) holds NaN"),
    (lambda: IsoScore(3, correction="ustat").merge_state(IsoScore(3)), "parts: clouds differ"),
    (lambda: IsoScore(3).merge_state(IsoScore(4)), "parts: clouds differ"),
    (lambda: seen(eye, correction="ustat").compute(), "points: the rows are as even as so few"),
    (lambda: seen(even, correction="gaussian").compute(), "points: the rows are as even as so few"),
    (lambda: seen(same, same[:3]).compute(), "points: .*zero variance"),
    (lambda: isoscore_from_cov(torch.diag(torch.tensor([3.0, -1, 1]))), "negative variance"),
    (lambda: isoscore_from_cov(torch.stack([1e4 * torch.eye(2), torch.tensor([[1.0, 1], [0, 1]])])), "not symmetric"),
    (lambda: isoscore(torch.randn(9, 3, dtype=torch.complex64)), "complex numbers"),
]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("correction", [None, "gaussian", "ustat"])
def test_a_metric_of_batches_is_the_score_of_all_points(correction):
    x = torch.randn(110, 16) * torch.linspace(0.1, 2, 16) + 3
    exact = pytest.approx(float(isoscore(x.double(), correction=correction)), rel=1e-9)
    metric, other = seen(x[:20], correction=correction), seen(correction=correction)
    assert metric(x[20:60]) == seen(x[20:60], correction=correction).compute()  # of the batch, which is added
    other.update(torch.cat([x[60:], x[:9]]), torch.arange(59) < 50)
    before = metric.compute()
    metric.merge_state(other)
    assert metric.count == 110 and before != metric.compute() == exact
    with pytest.raises(ValueError, match="NaN"):
        metric.update(x * math.nan)
    for short in (x[:1], x * math.nan):  # has no score of its own
        with pytest.raises(ValueError, match="points: "):
            metric(short)
    with pytest.raises(TypeError):
        metric()
    assert metric.compute() == exact  # those batches were left out
    plain = seen(x[:20])
    plain.merge_state(seen(x[20:], correction=correction))  # which has the sums of the plain score, and maybe others
    assert_close(plain.compute(), isoscore(x.double()), rtol=1e-9, atol=0)


def test_a_metric_stays_in_float64_where_its_module_does_not():
    x = torch.randn(60, 16) + 3
    metric, exact = seen(x[:20]), isoscore(x.double())
    for move in (torch.nn.Module.half, lambda m: m.to(torch.bfloat16)):
        move(torch.nn.ModuleList([metric]))
        metric.update(x[metric.count :][:20])
        assert metric.m2.dtype == torch.float64
    assert_close(metric.compute(), exact, rtol=1e-9, atol=0)
    assert torch.nn.ModuleList([metric]).to("meta")[0].m2.is_meta  # it does move to another device


class Started(TorchDispatchMode):
    "Counts the operations that a GPU would be given: those on the device `meta`, which computes nothing, but views."

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not view and "empty" not in func.name() and any(x.is_meta for x in tensors)
        return result


class Read(torch.autograd.Function):
    "Stands for what is read back from a device: length of the first row, count, trace, square and fourth powers."

    @staticmethod
    def forward(ctx, x):
        reads.append(x.shape)
        return torch.tensor([8, 100, 6400, 1e6, 4.2e5], dtype=x.dtype)[: len(x)]

    @staticmethod
    def backward(ctx, g):
        return g.to("meta")


reads = []


@pytest.mark.parametrize("correction, forward, both", [(None, 15, 30), ("gaussian", 15, 30), ("ustat", 25, 70)])
def test_an_accelerator_starts_few_operations(monkeypatch, correction, forward, both):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: Read.apply(x))
    monkeypatch.setattr(sys.modules["isoreg.isoscore"], "as_score", lambda score, *_: score)  # not sent to the device
    for gradient, most in ((False, forward), (True, both)):
        points = torch.randn(2000, 64, device="meta", requires_grad=gradient)
        reads.clear()
        with Started() as started:
            score = isoscore(points, correction=correction)
            if gradient:
                score.backward()
        assert 5 < started.count <= most and len(reads) == 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("correction", [None, "gaussian", "ustat"])
@pytest.mark.parametrize("offset, spread", [(0, 10), (1e4, 10), (50, 1e3)])
def test_the_path_of_an_accelerator_gives_the_same_score_and_gradient(offset, spread, correction, masked):
    torch.manual_seed(0)
    x = torch.randn(3000, 48) * torch.logspace(0, math.log10(spread), 48) + offset
    mask = torch.rand(3000) > 0.3 if masked else None
    found = []
    for way in (contextlib.nullcontext(), mock.patch.object(few_operations, "on_cpu", True)):
        points = x.clone().requires_grad_()
        with way:
            score = isoscore(points, mask, correction)
            found.append((score.detach(), *torch.autograd.grad(score, points)))
    (a, g), (b, h) = found
    assert_close(b, a, rtol=1e-6, atol=0)
    assert float((h - g).norm() / g.norm()) < 1e-5
