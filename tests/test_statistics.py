"""Intervals, exact tests, corrections and ratios against SciPy, brute force and simulation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from isoreg.report.statistics import (
    equivalence,
    holm,
    ratio_interval,
    score_error,
    seeds_needed,
    sign_flip,
    smallest_p,
    t_interval,
    two_errors,
)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30).filter(lambda v: np.std(v) > 1e-3),
    st.sampled_from([0.9, 0.95, 0.99]),
)
@settings(max_examples=60, deadline=None)
def test_t_interval_is_that_of_scipy(values, level):
    theirs = stats.ttest_1samp(values, 0).confidence_interval(level)
    np.testing.assert_allclose(t_interval(values, level), theirs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(t_interval([*values, float("nan")], level), theirs, rtol=1e-9, atol=1e-9)


def test_no_interval_from_nothing():
    assert all(math.isnan(x) for v in ([], [1.0], [0.7] * 5) for x in t_interval(v))


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_sign_flip_by_brute_force(d):
    flips = [
        abs(sum(s * x for s, x in zip(signs, d))) >= abs(sum(d)) for signs in itertools.product((-1, 1), repeat=len(d))
    ]
    assert sign_flip(np.array(d) / 7)[0] == pytest.approx(np.mean(flips), abs=1e-12)
    assert sign_flip(-np.array(d) / 7)[0] == pytest.approx(sign_flip(np.array(d) / 7)[0])
    assert sign_flip(d)[0] >= smallest_p(sum(x != 0 for x in d)) - 1e-12


@pytest.mark.parametrize("n", [5, 8, 11])
def test_sign_flip_of_signed_ranks_is_wilcoxons_test(n):
    d = np.random.default_rng(n).normal(0.6, 1, n)
    ranks = np.sign(d) * stats.rankdata(abs(d))
    assert sign_flip(ranks)[0] == pytest.approx(stats.wilcoxon(d, method="exact").pvalue)


@pytest.mark.parametrize("n", [14, 16, 17])
def test_the_label_and_the_smallest_p_are_true_where_sampling_begins(n):
    "With random patterns the observed one is always counted and the tail is doubled: no p below 2 / (RESAMPLES + 1)."
    p, said = sign_flip(np.ones(n))
    assert said == (f"exact, {2**n} sign patterns" if n <= 16 else "99999 random sign patterns")
    assert p == smallest_p(n) == 2.0 ** (1 - n) if n <= 16 else p >= smallest_p(n)


def test_many_pairs_are_sampled():
    d = np.random.default_rng(0).normal(0.25, 1, 30)
    p, how = sign_flip(d)
    assert p == pytest.approx(stats.ttest_1samp(d, 0).pvalue, rel=0.15) and sign_flip(d) == (p, how)
    assert sign_flip([1e-17] * 5)[0] == 1  # equal but for rounding, as compare says too
    assert sign_flip([])[1] == "no pair" and sign_flip([0.3])[0] == 1


def test_holm_leaves_out_what_is_not_known():
    np.testing.assert_allclose(holm([0.04, float("nan"), 0.01]), [0.04, float("nan"), 0.02])
    assert holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_holm_is_the_closed_bonferroni_test(p):
    "A hypothesis falls only if every set that holds it does: the largest |S| min(p in S) over the sets S that hold it."
    sets = [s for k in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), k)]
    closed = [min(1, max(len(s) * min(p[j] for j in s) for s in sets if i in s)) for i in range(len(p))]
    ours = holm(p)
    np.testing.assert_allclose(ours, closed)
    assert (ours >= np.array(p) - 1e-15).all() and (np.diff(ours[np.argsort(p, kind="stable")]) >= 0).all()


@given(st.integers(1, 500), st.sampled_from([0.1, 0.05, 0.01]))
@settings(max_examples=100, deadline=None)
def test_seeds_needed_is_the_first_number_that_reaches(tests, alpha):
    n = seeds_needed(tests, alpha)
    assert tests * 2 / 2**n <= alpha < tests * 2 / 2 ** (n - 1)


def test_a_table_without_effects_has_few_false_findings():
    "Eight seeds, four methods that do nothing and share a baseline: one or more false in at most 5 % of the tables."
    rng, wrong, tables = np.random.default_rng(3), 0, 300
    for _ in range(tables):
        x = rng.normal(size=(5, 8))
        wrong += (holm([sign_flip(row - x[0])[0] for row in x[1:]]) <= 0.05).any()
    assert wrong / tables < 0.05 + 3 * math.sqrt(0.05 * 0.95 / tables)


@given(
    st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=8).filter(lambda x: np.std(x) > 1e-3),
    st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=8).filter(lambda x: np.std(x) > 1e-3),
)
@settings(max_examples=50, deadline=None)
def test_two_errors_without_a_row_error_is_welch(one, two):
    "The mean of two tasks is half the difference of one and minus the other, for which SciPy has interval and p."
    found = two_errors([one, two], [0, 0])
    welch = stats.ttest_ind(one, [-x for x in two], equal_var=False)
    interval = welch.confidence_interval()
    assert [found["low"], found["high"], found["p"]] == pytest.approx(
        [interval.low / 2, interval.high / 2, welch.pvalue], abs=1e-9
    )
    alone = two_errors([one], [0])
    assert (alone["low"], alone["high"]) == pytest.approx(t_interval(one), abs=1e-12)


def test_row_error_widens():
    d = [0.01, 0.03, 0.02, 0.05]
    plain, wide = two_errors([d], [0.0]), two_errors([d], [0.02])
    assert wide["error"] == pytest.approx(np.hypot(plain["error"], 0.02))
    assert wide["low"] < plain["low"] and wide["p"] > plain["p"]


def test_the_part_that_seed_and_row_share_counts_once_where_pair_errors_say_how_large_it_is():
    d, r, single = [0.01, 0.03, 0.02, 0.05], 0.01, [0.012, 0.011, 0.013, 0.012]
    shared = (np.square(single).mean() - r**2) * 4 / 3
    once = two_errors([d], [r], pair_errors=[single])
    assert once["error"] ** 2 == pytest.approx(np.var(d, ddof=1) / 4 + r**2 - shared / 4)
    assert two_errors([d], [r], pair_errors=[[0.009] * 4]) == two_errors([d], [r]), "none shared"
    assert two_errors([d], [r], pair_errors=[[1.0] * 4]) == two_errors([d], [0.0]), "no more than all of it"


# ---- a share of a gain, and equivalence


def made_up_pairs(rng, seeds, truth, tasks):
    z = rng.normal(size=(len(tasks), 2, seeds))
    z[:, 0] = 0.6 * z[:, 1] + 0.8 * z[:, 0]
    return [np.c_[truth * gain + spread * a, gain + spread * b] for (gain, spread), (a, b) in zip(tasks, z)]


@given(st.integers(0, 10_000), st.integers(3, 9))
@settings(max_examples=60, deadline=None)
def test_fieller_on_one_task_is_where_a_t_test_of_a_minus_ratio_times_b_turns(seed, n):
    "At each bound of the interval the differences a - bound * b have a p of just the level."
    (pair,) = made_up_pairs(np.random.default_rng(seed), n, 0.5, [(0.05, 0.01)])
    ratio, *bounds = ratio_interval([pair])
    assert ratio == pytest.approx(pair[:, 0].mean() / pair[:, 1].mean())
    if math.isinf(bounds[0]):
        return
    for bound in bounds:
        assert stats.ttest_1samp(pair[:, 0] - bound * pair[:, 1], 0).pvalue == pytest.approx(0.05)


def test_fieller_has_no_bounds_where_the_denominator_may_be_zero():
    pair = np.c_[[0.1, 0.2, 0.3, 0.2], [0.1, -0.1, 0.05, -0.04]]
    ratio, *bounds = ratio_interval([pair])
    assert stats.ttest_1samp(pair[:, 1], 0).pvalue > 0.05 and bounds == [-math.inf, math.inf]
    assert ratio == pytest.approx(pair[:, 0].mean() / pair[:, 1].mean())


def test_fieller_counts_the_rows_with_the_covariance_that_they_give():
    (pair,), rows = made_up_pairs(np.random.default_rng(0), 8, 0.5, [(0.05, 0.01)]), np.array([[4, 1], [1, 3]]) * 1e-6
    V = np.cov(pair.T) / 8 + rows
    ratio, *bounds = ratio_interval([pair], rows=[rows])
    far = [(pair.mean(0) @ [1, -x]) ** 2 / (np.array([1, -x]) @ V @ [1, -x]) for x in bounds]
    assert far[0] == pytest.approx(far[1]) and bounds[0] < ratio < bounds[1]
    assert ratio_interval([pair], rows=[0 * rows]) == pytest.approx(ratio_interval([pair]))
    sure, small = pair.mean(0) + 1e-9 * pair, 1e-6 * rows  # the rows alone: half the variance of two such tasks
    wide, less = (np.ptp(ratio_interval([sure] * k, rows=[small] * k)[1:]) for k in (1, 2))
    assert (wide / less) ** 2 == pytest.approx(2, rel=0.01)
    assert bounds[1] - bounds[0] > np.ptp(ratio_interval([pair])[1:])
    many = made_up_pairs(np.random.default_rng(1), 2000, 0.5, [(0.05, 0.01)] * 2)  # of two tasks, with normal quantiles
    V, mean = sum(np.cov(task.T) for task in many) / 2000 / 4, np.mean([task.mean(0) for task in many], 0)
    for x in ratio_interval(many)[1:]:
        assert (mean @ [1, -x]) ** 2 / (np.array([1, -x]) @ V @ [1, -x]) == pytest.approx(1.96**2, rel=0.01)


@given(st.integers(0, 10_000), st.floats(0.001, 0.05))
@settings(max_examples=60, deadline=None)
def test_equivalence_is_the_90_percent_interval_within_the_margin(seed, margin):
    rng = np.random.default_rng(seed)
    found = two_errors([rng.normal(0, 0.02, 6), rng.normal(0.01, 0.01, 4)], [0.004, 0.0], level=0.90)
    within = -margin <= found["low"] and found["high"] <= margin
    assert within == (equivalence(found, margin) <= 0.05)
    assert math.isnan(equivalence(two_errors([[0.01, 0.01]]), margin)), "nothing is known without a spread"
    assert equivalence(found | {"difference": -found["difference"]}, margin) == equivalence(found, margin)


# ---- what a score leaves open


def test_the_error_of_a_score_is_that_of_rows_and_seeds():
    rng, x = np.random.default_rng(0), [0.60, 0.62, 0.61]
    chance = [np.corrcoef(*rng.normal(size=(2, 120)))[0, 1] for _ in range(4000)]
    assert score_error([0.1], 120, correlation=True) == pytest.approx(np.std(chance), rel=0.05)
    assert score_error(x, 277) == pytest.approx(math.hypot(stats.binom(277, 0.61).std() / 277, stats.sem(x)))
    assert score_error(x, float("nan")) == pytest.approx(stats.sem(x)) and math.isnan(score_error([0.6], float("nan")))


def test_the_sign_flip_test_has_no_unit():
    d = np.random.default_rng(0).normal(0.5, size=8)
    assert sign_flip(d * 1e-8)[0] == sign_flip(d)[0] == sign_flip(d * 1e12)[0] < 1


def test_a_ratio_that_all_pairs_have_is_exact():
    assert ratio_interval([np.array([[2, 1], [2.2, 1.1], [1.8, 0.9]])]) == pytest.approx((2, 2, 2))


@given(st.integers(0, 10_000), st.integers(3, 9))
@settings(max_examples=60, deadline=None)
def test_fieller_holds_the_ratio_where_pairs_are_nearly_proportional(seed, n):
    "As two methods that come to the same have them: equal but for rounding in single precision."
    b = np.random.default_rng(seed).normal(1, 0.2, n)
    pair = np.stack([(0.8 * b).astype("float32"), b], 1)
    ratio, low, high = ratio_interval([pair])
    x, y = ([Fraction(float(v)) for v in column] for column in pair.T)
    centre = lambda v: sum(v) / n
    cross = lambda u, v: sum((p - centre(u)) * (q - centre(v)) for p, q in zip(u, v)) / (n - 1) / n
    t2 = Fraction(stats.t.ppf(0.975, n - 1)) ** 2
    A, B, C = (centre(u) * centre(v) - t2 * cross(u, v) for u, v in ((y, y), (x, y), (x, x)))
    if A <= 0:
        assert math.isinf(high)
        return
    assert low <= ratio <= high
    assert high - low == pytest.approx(2 * math.sqrt(B * B - A * C) / float(A), rel=1e-5)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: t_interval([1, 2], 95), "level"),
        (lambda: sign_flip(np.ones((3, 2))), "differences"),
        (lambda: sign_flip([0.1, math.nan]), "differences"),
        (lambda: holm([[0.1, 0.2]]), "p"),
        (lambda: holm([2, 0.1]), "p"),
        (lambda: two_errors([[0.1, 0.2]], [math.nan]), "row_errors"),
        (lambda: two_errors([[0.1, 0.2]], []), "row_errors"),
        (lambda: two_errors([[0.1]], [0.1]), "differences"),
        (lambda: two_errors([]), "differences"),
        (lambda: equivalence({"error": 0.1, "difference": 0, "freedom": 3}, 0), "margin"),
        (lambda: ratio_interval([]), "pairs"),
        (lambda: ratio_interval([np.ones((1, 2))]), "pairs"),
        (lambda: ratio_interval([np.ones((4, 2))], level=2), "level"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()
