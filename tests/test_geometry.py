"""Measures of geometry against independent references: NumPy's decompositions, loops over pairs, SciPy's
neighbours, scikit-dimension."""

import inspect
import json
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import skdim
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

import isoreg.geometry as module
import isoreg.experiments.measure as measuring
from isoreg.corpus import TextBatches
from isoreg.experiments.finetune import sentence_vectors
from isoreg.geometry import (
    Dimensions,
    average_cosine,
    effective_rank,
    geometry,
    nearest_two,
    outlier_dimensions,
    partition_score,
    rankme,
    transformed,
    two_nn,
    variance_explained,
)
from isoreg.isoscore import isoscore
from isoreg.experiments.config import FisherConfig, GeometryConfig, choices
from isoreg.experiments.measure import collect_measurements, layer_points, load_body, measure
from isoreg.experiments.notebook import execute
from isoreg.experiments.toy import toy_corpus, toy_tokenizer

SCALARS = (average_cosine, partition_score, variance_explained, effective_rank, rankme, two_nn)


def cloud(n=300, d=12, seed=0, mean=0.4, dtype=np.float64):
    g = np.random.default_rng(seed)
    return (g.normal(size=(n, d)) @ g.normal(size=(d, d)) * 0.5 + mean * g.normal(size=d)).astype(dtype)


def entropy_rank(s, eps=0.0):
    p = s / s.sum() + eps
    p = p[p > 0]
    return math.exp(-(p * np.log(p)).sum())


def log_partition(x):
    "By the definition, one exponential at a time in long double, over columns of NumPy's eigenvectors and both signs."
    vectors = np.linalg.eigh(x.T @ x)[1]
    logs = []
    for v in np.concatenate([vectors.T, -vectors.T]):
        z = (x @ v).astype(np.longdouble)
        logs.append(z.max() + np.log(np.exp(z - z.max()).sum()))
    return float(min(logs) - max(logs))


def reference_skdim(x, discard=0.1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return skdim.id.TwoNN(discard_fraction=discard).fit(x).dimension_


@pytest.mark.parametrize("n, d", [(300, 12), (40, 40), (15, 60), (2, 5)])
def test_definitions(n, d):
    x = cloud(n, d, n)
    c = x - x.mean(0)
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [u[i] @ u[j] for i in range(n) for j in range(n) if i != j]
    assert average_cosine(x) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert average_cosine(x, isotropy=True) == pytest.approx(1 - abs(np.mean(pairs)), abs=1e-12)
    s, s0 = np.linalg.svd(c, compute_uv=False), np.linalg.svd(x, compute_uv=False)
    s = s[: min(n - 1, d)]
    assert effective_rank(x) == pytest.approx(entropy_rank(s), rel=1e-8)
    assert effective_rank(x, spectrum="eigen") == pytest.approx(entropy_rank(s**2), rel=1e-8)
    assert effective_rank(x, centred=False) == pytest.approx(entropy_rank(s0), rel=1e-8)
    assert rankme(x) == pytest.approx(entropy_rank(s0, 1e-7), rel=1e-8) and rankme(x, eps=0) == effective_rank(
        x, centred=False
    )
    k = max(1, math.floor(0.3 * d + 1e-9))
    assert variance_explained(x) == pytest.approx(k / d / ((s**2)[:k].sum() / (s**2).sum()), rel=1e-10)
    assert partition_score(x, log=True) == pytest.approx(log_partition(x), abs=1e-6)
    assert partition_score(x) == pytest.approx(math.exp(log_partition(x)), abs=1e-6)
    found = outlier_dimensions(x, k=2)
    np.testing.assert_allclose(found.std, x.std(0, ddof=1), rtol=1e-10)
    assert found.largest == list(np.argsort(-x.var(0))[:2])


def test_partition_uses_columns_and_both_signs():
    x = cloud(200, 6, 3)
    assert partition_score(x) == pytest.approx(partition_score(-x), rel=1e-12)
    wrong = np.linalg.eigh(x.T @ x)[1]  # rows for columns, as released
    z = [np.exp(x @ row).sum() for row in wrong]
    assert abs(partition_score(x) - min(z) / max(z)) > 0.01


def test_partition_neither_overflows_nor_underflows():
    x = cloud(200, 6, 4)
    for factor in (1e3, 1e30, 1e-30):
        logs = partition_score(factor * x, log=True)
        assert math.isfinite(logs) and logs == pytest.approx(log_partition(factor * x), rel=1e-9, abs=1e-9)
        assert 0 <= partition_score(factor * x) <= 1
    wide = cloud(5, 300, 1, mean=0.0) * 30  # directions without a point have Z = n
    full = np.linalg.svd(wide)[2]
    z = wide @ np.concatenate([full, -full]).T
    logs = z.max(0) + np.log(np.exp(z - z.max(0)).sum(0))
    assert partition_score(wide, log=True) == pytest.approx(logs.min() - logs.max(), rel=1e-9)


@pytest.mark.parametrize("n, d", [(500, 3), (400, 30), (60, 200)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nearest_two_by_scipy(n, d, dtype):
    x = cloud(n, d, d, dtype=dtype)
    right = cKDTree(x.astype(np.float64)).query(x.astype(np.float64), 3)[0][:, 1:]
    for chunk in (7, 128, 1024):
        np.testing.assert_allclose(nearest_two(torch.from_numpy(x), chunk), right, rtol=1e-12)


def hard_clouds():
    g = np.random.default_rng(5)
    x = g.normal(size=(260, 24))
    wide, far, offset = x.copy(), x.copy(), x + 1e6
    wide[:, 0] *= 1e4
    far[::2] += 1e7
    outlier = x.copy()
    outlier[0] = 1e9
    tiny = 1e-25 * x
    tiny[0], tiny[1] = 1.0, -1.0
    grid = np.stack(np.meshgrid(*[np.arange(6.0)] * 3), -1).reshape(-1, 3) + 1e5
    return {
        "one wide dimension": wide,
        "clusters far apart": far,
        "far from the origin": offset,
        "one far point": outlier,
        "tiny beside huge": tiny,
        "huge": 1e200 * x,
        "subnormal": 1e-300 * x,
        "constant dimension": np.concatenate([x, np.full((260, 1), 3e8)], 1),
        "ties": grid,
        "many copies": np.concatenate([np.tile(x[:1], (40, 1)), x]),
    }


@pytest.mark.parametrize("name", hard_clouds())
def test_nearest_two_whatever_the_points(name):
    x = hard_clouds()[name]
    scale = np.abs(x).max()
    right = np.sort(cdist(x / scale, x / scale) + np.diag(np.full(len(x), np.inf)), 1)[:, :2]
    np.testing.assert_allclose(nearest_two(torch.from_numpy(x)) / scale, right, rtol=1e-8, atol=1e-300)


def test_float32_certificate_is_needed_and_honest():
    x = torch.from_numpy(hard_clouds()["clusters far apart"]).float()
    y = x - x.mean(0)
    nominated, certain = module._two_by_product(x, y, torch.arange(len(x)), 1.0, 1024, 6)
    right = torch.from_numpy(np.sort(cdist(x.double(), x.double()) + np.diag(np.full(len(x), np.inf)), 1)[:, :2])
    wrong = ((nominated - right).abs() > 1e-9 * right).any(1)
    assert wrong.any() and not (wrong & certain).any()
    easy = torch.from_numpy(cloud(400, 24, 1)).float()
    y = easy - easy.mean(0)
    assert module._two_by_product(easy, y, torch.arange(400), 1.0, 100, 6)[1].float().mean() > 0.95


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(3, 60),
    d=st.integers(1, 8),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    copies=st.integers(0, 20),
    coarse=st.booleans(),
)
def test_nearest_two_property(n, d, chunk, seed, copies, coarse):
    x = np.random.default_rng(seed).normal(size=(n, d))
    if coarse:
        x = np.round(x)  # ties and copies
    x = np.concatenate([x, x[:copies]])
    right = np.sort(cdist(x, x) + np.diag(np.full(len(x), np.inf)), 1)[:, :2]
    np.testing.assert_allclose(nearest_two(torch.from_numpy(x), chunk), right, rtol=1e-12)


@pytest.mark.parametrize("n, d, discard", [(400, 3, 0.1), (500, 20, 0.0), (300, 60, 0.1), (120, 300, 0.25)])
def test_two_nn_is_scikit_dimension(n, d, discard):
    x = cloud(n, d, n)
    if discard:
        assert two_nn(x, discard=discard) == pytest.approx(reference_skdim(x, discard), rel=1e-6)
    else:
        assert two_nn(x, discard=1e-9) == pytest.approx(reference_skdim(x, 1e-9), rel=1e-6) and math.isfinite(
            two_nn(x, discard=0)
        )
    assert two_nn(torch.from_numpy(x).float()) == pytest.approx(two_nn(x), rel=1e-3)


@pytest.mark.parametrize("d", [4, 24])
def test_equal_points_count_once(d):
    x = cloud(300, d, 2)
    alone = two_nn(x)
    assert alone == pytest.approx(reference_skdim(x), rel=1e-6)
    for copies in (x[:60], x, np.concatenate([x[:9], x[:9]])):
        rows = np.concatenate([x, copies])
        assert two_nn(rows) == pytest.approx(alone, rel=1e-12)
        assert two_nn(torch.from_numpy(rows).float()) == pytest.approx(alone, rel=1e-4)


def test_two_nn_finds_the_dimension_and_keeps_its_numbers():
    g = np.random.default_rng(0)
    x = np.zeros((3000, 50))
    x[:, :4] = g.uniform(size=(3000, 4))
    assert two_nn(x @ np.linalg.qr(g.normal(size=(50, 50)))[0]) == pytest.approx(4, abs=0.3)
    plane = np.zeros((800, 60))
    plane[:, :5] = np.random.default_rng(0).normal(size=(800, 5))
    assert two_nn(plane) == pytest.approx(5.0044063681, rel=1e-9)  # the first version's


@pytest.mark.parametrize("discard", [-0.1, 1, "0.1", None, math.nan])
def test_two_nn_refuses_a_bad_share(discard):
    with pytest.raises(ValueError, match="discard"):
        two_nn(cloud(), discard=discard)


def test_memory_of_two_nn_is_bounded(monkeypatch):
    sizes, original = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: sizes.append((r := original(*a, **k)).numel()) or r)
    nearest_two(torch.randn(900, 8), 100)
    assert max(sizes) <= 100 * 900 and sum(sizes) == 900 * 900  # once


@pytest.mark.parametrize("n, d", [(200, 10), (9, 30)])
def test_geometry_is_each_function(n, d):
    x = cloud(n, d, 7)
    found = geometry(x)
    for f in SCALARS:
        assert found[f.__name__] == f(x)
    assert found["points"] == n and found["dims"] == d and found["log_partition_score"] == partition_score(x, log=True)
    assert found["isoscore"] == pytest.approx(float(isoscore(x)), rel=1e-10)
    assert isinstance(found["dimensions"], Dimensions) and found["dimensions"].by_mean == outlier_dimensions(x).by_mean
    assert all(isinstance(v, (float, int)) for k, v in found.items() if k != "dimensions")


def test_one_decomposition_of_each_matrix(monkeypatch):
    calls = []
    for name in ("eigh", "eigvalsh", "svdvals", "svd"):
        original = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda *a, _n=name, _f=original, **k: calls.append(_n) or _f(*a, **k))
    geometry(cloud())
    assert sorted(calls) == ["eigh", "eigvalsh"]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(20, 80),
    d=st.integers(2, 12),
    power=st.integers(-300, 300),
    shift=st.floats(-50, 50),
)
def test_invariances(seed, n, d, power, shift):
    g = np.random.default_rng(seed)
    x = cloud(n, d, seed, mean=1.0)
    q, scaled, order = np.linalg.qr(g.normal(size=(d, d)))[0], x * 2.0**power, g.permutation(n)
    a = geometry(x)
    same = {
        "rotation": (x @ q, SCALARS),
        "shift": (x + shift, (variance_explained, effective_rank, two_nn)),
        "scale": (scaled, (average_cosine, variance_explained, effective_rank, rankme, two_nn)),
        "order": (x[order], SCALARS),
    }
    for name, (y, measures) in same.items():
        for f in measures:
            assert f(y) == pytest.approx(a[f.__name__], rel=1e-5, abs=1e-7), (name, f.__name__)
    assert (
        1 - 1e-9 <= a["effective_rank"] <= min(n - 1, d) + 1e-9
        and a["effective_rank"] >= effective_rank(x, spectrum="eigen") - 1e-9
    )
    assert -1 / (n - 1) - 1e-9 <= a["average_cosine"] <= 1 and 0 <= a["partition_score"] <= 1
    assert max(1, int(0.3 * d)) / d - 1e-9 <= a["variance_explained"] <= 1 + 1e-9
    participation = (
        1 + (d - 1) * a["isoscore"]
    )  # Renyi entropy of order 2 never exceeds Shannon's, nor that the one of the roots
    assert participation <= effective_rank(x, spectrum="eigen") + 1e-9


def test_isotropic_and_collapsed():
    d = 10
    even = np.concatenate([np.eye(d), -np.eye(d)])
    assert variance_explained(even) == pytest.approx(1) and effective_rank(even) == pytest.approx(d) == pytest.approx(
        rankme(even), rel=1e-4
    )
    assert average_cosine(even) == pytest.approx(-1 / 19) and average_cosine(even, isotropy=True) == pytest.approx(
        18 / 19
    )
    assert partition_score(even) == pytest.approx(1) and geometry(even, undefined="nan")["isoscore"] == pytest.approx(1)
    line = np.linspace(-1, 2, 50)[:, None] * np.arange(1.0, 5)
    assert effective_rank(line) == pytest.approx(1, abs=1e-5) and variance_explained(line) == pytest.approx(1 / 4)
    assert geometry(line, undefined="nan")["isoscore"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n, mean", [(150, 0), (150, 30), (15, 30)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(dtype, n, mean):
    x = torch.from_numpy(cloud(n, 20, 3) + mean).to(dtype)  # 30: far from the origin, where half precision is coarse
    a, b = geometry(x), geometry(x.double())
    for k in a:
        if k != "dimensions":
            assert a[k] == pytest.approx(b[k], rel=1e-9), k
    assert a["dimensions"].mean.dtype == torch.float64
    grown = x.clone().requires_grad_()
    assert geometry(grown)["two_nn"] == a["two_nn"] and grown.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_is_left_alone(dtype):
    x = torch.from_numpy(cloud(100, 6, 1) * 8).to(dtype)
    before = x.clone()
    geometry(x), nearest_two(x), outlier_dimensions(x)
    assert torch.equal(x, before)


def test_half_precision_does_not_overflow():
    x = torch.full((64, 4), 6e4, dtype=torch.float16)
    x[::2] -= 2000
    x[:32, 1] -= 64 * torch.arange(32)
    assert outlier_dimensions(x).mean[2] == pytest.approx(59000, rel=1e-3)
    assert 0 < effective_rank(x) < 3


def test_masks():
    x = cloud(120, 7, 2)
    keep = np.random.default_rng(0).random(120) > 0.3
    bad = x.copy()
    bad[~keep] = np.nan
    for f in SCALARS:
        assert f(bad, mask=keep) == f(x[keep])
    assert geometry(torch.from_numpy(bad), torch.from_numpy(keep).int())["points"] == keep.sum()
    np.testing.assert_allclose(outlier_dimensions(bad, keep).mean, x[keep].mean(0), rtol=1e-12)
    with pytest.raises(ValueError, match="mask: shape"):
        average_cosine(x, keep[:50])
    with pytest.raises(ValueError, match="mask: 0.3 is one value; .*by name"):
        variance_explained(x, 0.3)
    with pytest.raises(ValueError, match="mask: holds -10000"):
        rankme(x, np.where(keep, 0, -1e4))
    with pytest.raises(ValueError, match="rows count"):
        rankme(x, np.arange(120) < 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: 1e150 * x,
        lambda x: 1e-150 * x,
        lambda x: np.concatenate([x, np.full((len(x), 1), 7.0)], 1),
        lambda x: np.concatenate([x, 1e4 * x[:, :1] ** 3], 1),
        lambda x: x[:8],
        lambda x: x + 1e6,
        lambda x: np.concatenate([x, x]),
    ],
)
def test_extremes_by_numpy(make):
    x = make(cloud(200, 12, 6))
    scale = np.abs(x).max()
    c = (x - x.mean(0)) / scale
    s = np.linalg.svd(c, compute_uv=False)[: min(len(x) - 1, x.shape[1])]
    found = geometry(x, undefined="nan")
    assert found["effective_rank"] == pytest.approx(entropy_rank(s), rel=1e-4)
    assert found["rankme"] == pytest.approx(entropy_rank(np.linalg.svd(x / scale, compute_uv=False), 1e-7), rel=1e-4)
    assert found["isoscore"] == pytest.approx(((s**2).sum() ** 2 / (s**4).sum() - 1) / (x.shape[1] - 1), rel=1e-6)
    assert math.isfinite(found["log_partition_score"]) and math.isfinite(found["average_cosine"])


def test_one_outlier_dimension():
    x = np.random.default_rng(0).normal(size=(400, 50))
    x[:, 9] *= 1e4
    x[:, 20] += 1e4
    found = outlier_dimensions(x)
    assert found.by_mean[0] == 20 and found.by_variance == [9] and found.largest[0] == 9
    assert variance_explained(x) == pytest.approx(0.3, rel=1e-6) and geometry(x)["isoscore"] < 1e-6
    assert average_cosine(x) > 0.3 and two_nn(x) == pytest.approx(reference_skdim(x), rel=1e-4)
    assert two_nn(x[:, [9]]) == pytest.approx(1, abs=0.15)


def test_outliers_by_the_rules():
    g = np.random.default_rng(1)
    x = g.normal(size=(500, 40)) * g.uniform(0.5, 4, size=40) + g.normal(size=40) ** 3
    m, v = x.mean(0), x.var(0, ddof=1)
    for sigmas, ratio in ((3, 5), (1.5, 1.2)):
        found = outlier_dimensions(x, sigmas=sigmas, ratio=ratio)
        assert set(found.by_mean) == set(np.flatnonzero(np.abs(m - m.mean()) >= sigmas * m.std()))
        assert found.by_variance == sorted(np.flatnonzero(v >= ratio * v.mean()), key=lambda j: -v[j])
    flat = outlier_dimensions(np.ones((5, 3)))
    assert flat.by_mean == [] and flat.by_variance == []


@pytest.mark.parametrize("f", [*SCALARS, geometry, outlier_dimensions])
@pytest.mark.parametrize(
    "points, message",
    [
        (np.zeros(5), "points: need shape"),
        (np.ones((4, 3), dtype=bool), "floating"),
        (np.full((9, 3), np.nan), "NaN"),
        (np.full((9, 3), np.inf), "infinite"),
        (np.ones((2, 9, 3)), "one cloud"),
        (np.zeros((0, 3)), "holds no value"),
    ],
)
def test_bad_points_are_refused(f, points, message):
    with pytest.raises(ValueError, match=f"points: .*{message}|{message}"):
        f(points)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("f", [*SCALARS, lambda x: nearest_two(x).numpy(), lambda x: list(geometry(x).values())[:-1]])
def test_whole_numbers_are_measured_in_float64(f, dtype):
    x = np.random.default_rng(0).integers(0, 200, size=(60, 7)).astype(dtype)
    np.testing.assert_array_equal(f(x), f(x.astype(np.float64)))
    np.testing.assert_array_equal(f(torch.from_numpy(x)), f(x.astype(np.float64)))


def test_large_whole_numbers_keep_their_digits():
    x = np.random.default_rng(0).integers(0, 9, size=(20, 3)) + 2**40
    np.testing.assert_allclose(nearest_two(x), nearest_two((x - 2**40).astype(float)), rtol=1e-9)


@pytest.mark.parametrize(
    "points, more, message",
    [
        (np.eye(2), {}, "points: 2 rows count, need 3 or more"),
        (np.full((5, 2), np.nan), {}, "points: hold NaN"),
        (np.eye(5), {"chunk": 0}, "chunk: 0 "),
        (np.eye(5), {"chunk": 2.5}, "chunk: 2.5 "),
        (np.ones(5), {}, "points: need shape"),
    ],
)
def test_nearest_two_refuses_with_a_remedy(points, more, message):
    with pytest.raises(ValueError, match=message):
        nearest_two(torch.from_numpy(points), **more)


@pytest.mark.parametrize("more", [{"sigmas": "a"}, {"ratio": None}, {"sigmas": float("nan")}, {"ratio": 0}])
def test_thresholds_are_positive_numbers(more):
    with pytest.raises(ValueError, match=f"{next(iter(more))}: "):
        outlier_dimensions(np.eye(4), **more)


def test_data_frames_and_numpy_integers():
    x = cloud(40, 6)
    frame = pd.DataFrame(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f in SCALARS:
            assert f(frame) == pytest.approx(f(x), rel=1e-9)
    assert average_cosine(frame, pd.Series([1] * 30 + [0] * 10)) == pytest.approx(average_cosine(x[:30]), rel=1e-9)
    assert (
        torch.equal(nearest_two(x, chunk=np.int64(7)), nearest_two(x, chunk=7))
        and outlier_dimensions(x, k=np.int64(2)).largest == outlier_dimensions(x, k=2).largest
    )


def test_what_has_no_value_says_so():
    same, zero = np.full((6, 3), 0.1), np.zeros((6, 3))
    for f in (variance_explained, effective_rank):
        pytest.raises(ValueError, f, same).match("zero variance")
    for f in (partition_score, rankme):
        pytest.raises(ValueError, f, zero).match("all are zero")
    with pytest.raises(ValueError, match="no direction"):
        average_cosine(np.eye(3)[:, :2])
    with pytest.raises(ValueError, match="different points"):
        two_nn(same)
    with pytest.raises(ValueError, match="grid"):
        two_nn(np.eye(8))
    with pytest.raises(ValueError, match="need 3 or more"):
        two_nn(np.eye(2))
    with pytest.raises(ValueError, match="zero variance.*undefined='nan'.*isoscore"):
        geometry(same)
    with pytest.raises(ValueError, match="0 of 12 are left.*different points.*undefined='nan'.*two_nn"):
        geometry(np.concatenate([cloud(2, 3)] * 6))
    found = geometry(same, undefined="nan")
    assert (
        math.isnan(found["isoscore"])
        and math.isnan(found["two_nn"])
        and found["average_cosine"] == pytest.approx(1)
        and found["rankme"] == pytest.approx(1, abs=1e-4)
    )
    assert math.isnan(geometry(np.random.rand(9, 1), undefined="nan")["isoscore"])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: variance_explained(x, p=0), "p: 0"),
        (lambda x: variance_explained(x, p=1.1), "p: 1.1"),
        (lambda x: rankme(x, eps=-1), "eps: -1"),
        (lambda x: effective_rank(x, spectrum="power"), "spectrum: 'power'"),
        (lambda x: outlier_dimensions(x, k=0), "k: 0"),
        (lambda x: outlier_dimensions(x, sigmas=0), "sigmas"),
        (lambda x: geometry(x, undefined="zero"), "undefined: 'zero'"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud())


def test_documented():
    for name in module.__all__:
        f = getattr(module, name)
        assert inspect.getdoc(f), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_on_an_accelerator():
    x = torch.from_numpy(cloud(500, 40, 1))
    a, b = geometry(x), geometry(x.cuda())
    for k in a:
        if k != "dimensions":
            assert a[k] == pytest.approx(b[k], rel=1e-8), k
    for rows in hard_clouds().values():
        torch.testing.assert_close(
            nearest_two(torch.from_numpy(rows).cuda()).cpu(), nearest_two(torch.from_numpy(rows)), rtol=1e-8, atol=0
        )


# The record of a model, layer by layer

TINY = dict(limit=60, batch_size=7)


def states_of(model, tokenizer, texts):
    "Hidden states of each text alone, without padding: lists of (layers, tokens, d)."
    with torch.no_grad():
        return [
            torch.stack(
                model(input_ids=torch.tensor([tokenizer(t)["input_ids"]]), output_hidden_states=True).hidden_states
            )[:, 0]
            for t in texts
        ]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    from transformers import GPT2Config, GPT2Model

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    tokenizer = toy_tokenizer()
    GPT2Model(GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=2, n_head=2, n_positions=64)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("pooling", choices(GeometryConfig.model_fields["pooling"]))
def test_record_by_single_texts(tmp_path, gpt2, kind, pooling):
    config = GeometryConfig(**TINY, pooling=pooling, **({"model": gpt2} if kind == "decoder" else {}))
    record = measure(config, tmp_path)
    model, tokenizer, _ = load_body(config)
    states = states_of(model, tokenizer, toy_corpus(60, seed=1))
    pool = {
        "tokens": lambda h: h,
        "cls": lambda h: h[:, :1],
        "mean": lambda h: h.mean(1, keepdim=True),
        "last": lambda h: h[:, -1:],
    }[pooling]
    points = torch.cat([pool(h) for h in states], 1)
    assert (
        record["points"] == record["available"] == points.shape[1]
        and record["dims"] == points.shape[2]
        and record["samples"] == 60
    )
    assert [row["layer"] for row in record["layers"]] == list(range(len(points)))
    for row, x in zip(record["layers"], points):
        right = geometry(x, undefined="nan")
        for name in ("isoscore", "average_cosine", "effective_rank", "rankme", "log_partition_score"):
            if math.isnan(right[name]) or (pooling == "cls" and row["layer"] == 0):
                continue
            assert row[name] == pytest.approx(right[name], rel=1e-3, abs=1e-3), (row["layer"], name)
        if pooling == "tokens":
            assert "isoscore_corrected" not in row
        elif row["isoscore"] is not None:
            assert row["isoscore_corrected"] == pytest.approx(
                float(isoscore(x, correction="ustat")), rel=2e-2, abs=1e-3
            )
    np.testing.assert_allclose(record["dimensions"]["mean"], points[-1].mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(record["dimensions"]["std"], points[-1].std(0), rtol=1e-3, atol=1e-4)


def test_first_token_before_the_first_layer_has_no_geometry(tmp_path):
    record = measure(GeometryConfig(**TINY, pooling="cls"), tmp_path)
    first = record["layers"][0]
    assert first["isoscore"] is None and first["two_nn"] is None and first["average_cosine"] == pytest.approx(1)
    assert any("layer 0: isoscore" in note for note in record["notes"]) and record["layers"][1]["isoscore"] > 0


def test_pooling_is_that_of_the_finetuning_record(tmp_path):
    config = GeometryConfig(**TINY)
    model, tokenizer, _ = load_body(config)
    batches = [
        {k: v for k, v in b.items() if k != "labels"} for b in TextBatches(toy_corpus(60, seed=1), tokenizer, "clm", 7)
    ]
    vectors = sentence_vectors(model, batches)
    for pooling in ("cls", "mean"):
        torch.testing.assert_close(layer_points(model, batches, pooling)[1], vectors[pooling])
    tokens = layer_points(model, batches, "tokens")[1]
    torch.testing.assert_close(tokens[-1].mean(0), vectors["mean_activation"])


def test_points_are_drawn_alike_in_all_layers_and_layers_chosen(tmp_path):
    model, tokenizer, _ = load_body(GeometryConfig())
    batches = TextBatches(toy_corpus(40, seed=1), tokenizer, "clm", 7)
    every, some = layer_points(model, batches), layer_points(model, batches, limit=50, seed=3)
    rows = [int((every[1][0] == x).all(1).nonzero()[0, 0]) for x in some[1][0]]
    assert some[1].shape[1] == 50 and some[2] == every[1].shape[1]
    assert all(any((e == x).all() for e in every[1][-1]) for x in some[1][-1]) and len(set(rows)) > 20
    config = GeometryConfig(**TINY, layers="0, -1,0", points=100)
    record = measure(config, tmp_path / "a")
    assert (
        [row["layer"] for row in record["layers"]] == [0, 4]
        and record["points"] == 100
        and record["dimensions"]["layer"] == 4
    )
    with pytest.raises(ValueError, match="layers: .*0 to 4"):
        measure(GeometryConfig(**TINY, layers="7"), tmp_path / "b")
    assert not (tmp_path / "b" / "record.json").exists()


def test_finished_record_is_returned_and_collected(tmp_path, monkeypatch):
    config = GeometryConfig(**TINY, layers="-1")
    told = []
    record = measure(config, tmp_path / "runs" / "a", told.append)
    assert (
        record["kind"] == "geometry" and record["status"] == "done" and record["key"] == config.key and len(told) == 2
    )
    monkeypatch.setattr(measuring, "load_body", lambda config: pytest.fail("measured again"))
    assert measure(config, tmp_path / "runs" / "a") == record
    assert collect_measurements(tmp_path / "runs", tmp_path / "all.jsonl") == [record]


def test_a_record_of_a_text_that_has_changed_is_not_recloud(tmp_path):
    text, sentences = tmp_path / "t.txt", toy_corpus(60)
    text.write_text("\n".join(sentences[:40]))
    config = GeometryConfig(**TINY | {"corpus": str(text)}, layers="-1")
    first = measure(config, tmp_path / "a")
    assert measure(config, tmp_path / "a") == first and set(first["inputs"]) == {"corpus"}
    text.write_text("\n".join(sentences[20:]))
    second = measure(config, tmp_path / "a")
    assert second["key"] == first["key"] and second["layers"] != first["layers"]


def test_a_fisher_run_begins_anew_when_its_text_has_changed(tmp_path):
    text, sentences, told = tmp_path / "t.txt", toy_corpus(60), []
    text.write_text("\n".join(sentences[:40]))
    config = FisherConfig(corpus=str(text), shares="50", draws=1)
    first = measure(config, tmp_path / "a")
    text.write_text("\n".join(sentences[20:]))
    second = measure(config, tmp_path / "a", told.append)
    assert "corpus changed since the record of" in told[0] and not second["resumed"]
    assert second["draws"] == measure(config, tmp_path / "b")["draws"] != first["draws"]


def test_models_without_all_weights_and_texts_from_files(tmp_path, gpt2):
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{gpt2}/model.safetensors")
    for f in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / f).write_bytes(open(f"{gpt2}/{f}", "rb").read())
    save_file(
        {k: v for k, v in weights.items() if "h.0.attn" not in k}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="lacks weights"):
        load_body(GeometryConfig(model=str(tmp_path)))
    with pytest.raises(ValueError, match="'nobody/nothing' is no folder"):
        load_body(GeometryConfig(model="nobody/nothing"))
    pd.DataFrame({"sentence": toy_corpus(30, seed=4)}).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.txt").write_text("\n".join(toy_corpus(30, seed=4)))
    one = measure(GeometryConfig(corpus=str(tmp_path / "rows.parquet"), column="sentence", layers="-1"), tmp_path / "a")
    two = measure(GeometryConfig(corpus=str(tmp_path / "rows.txt"), layers="-1", precision="bf16"), tmp_path / "b")
    assert one["samples"] == 30 and one["layers"][0]["isoscore"] == pytest.approx(
        two["layers"][0]["isoscore"], rel=0.05
    )


def test_notebook_runs(tmp_path, gpt2):
    execute("geometry", tmp_path / "out.ipynb", {"model": gpt2, "limit": 40, "pooling": "mean", "out": str(tmp_path)})
    (record,) = [json.loads(p.read_text()) for p in tmp_path.rglob("record.json")]
    assert record["config"]["pooling"] == "mean" and len(record["layers"]) == 3


def test_fingerprint_leaves_the_drawn_pooler_out(tmp_path):
    one, two = (
        measure(GeometryConfig(limit=8, layers="-1"), tmp_path / name) for name in "ab"
    )  # toy-bert comes without a pooler
    assert one["fingerprint"] == two["fingerprint"] and one["layers"] == two["layers"]


def test_the_result_prints_as_a_small_table():
    points = torch.randn(60, 20) * torch.tensor([9.0] + [1.0] * 19)
    found = geometry(points)
    lines = str(found).splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) < 100 and "tensor" not in str(found)
    shown = dict(line.split(maxsplit=1) for line in lines if not line.startswith("dimensions"))
    assert shown["points"] == "60" and float(shown["isoscore"]) == pytest.approx(found["isoscore"], rel=1e-3)
    assert set(shown) == set(found) - {"dimensions"} and isinstance(found, dict)
    (variance,) = (line for line in lines if line.startswith("dimensions, by variance"))
    assert variance.split()[-1] == "0" and "nan" in str(geometry(torch.ones(5, 3), undefined="nan"))


# ---- linear steps


def test_linear_steps_against_scikit_learn():
    x, new = cloud(200, 10), cloud(50, 10, 5)
    assert np.allclose(transformed(x, "centre", "normalise"), normalize(x - x.mean(0)))
    pca = PCA(whiten=True).fit(x)
    for rows in (x, new):
        assert np.allclose(np.abs(transformed(rows, "whiten", fitted_on=x)), np.abs(pca.transform(rows)))
    plain = PCA().fit(x)
    scores = plain.transform(new)
    assert np.allclose(transformed(new, 3, fitted_on=x), scores[:, 3:] @ plain.components_[3:])
    half = transformed(x, "whiten", strength=0.5)
    assert np.allclose(half.var(0, ddof=1), plain.explained_variance_**0.5)
    few = transformed(cloud(6, 10), "whiten")  # fewer rows than dimensions: the directions that there are
    assert few.shape == (6, 5) and np.allclose(np.cov(few.T), np.eye(5))
    unit = normalize(x)
    assert np.allclose(transformed(new, "normalise", "centre", fitted_on=x), normalize(new) - unit.mean(0))
    assert torch.is_tensor(transformed(torch.tensor(x), "centre"))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: transformed(x, "centred"), "steps: 'centred' is unknown; did you mean 'centre'"),
        (lambda x: transformed(x, 12), "number of directions below 12"),
        (lambda x: transformed(x, "centre", fitted_on=x[:, :1]), r"fitted_on: shape \(300, 1\) beside points"),
        (lambda x: transformed(x, "whiten", fitted_on=x[:9, :7]), r"fitted_on: shape \(9, 7\) beside points"),
        (lambda x: transformed(x, "whiten", strength=2), "strength: 2"),
        (lambda x: transformed(np.repeat(x[:1], 5, 0), "whiten"), "steps: nothing to whiten; all rows are equal"),
    ],
)
def test_steps_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_whitened(dtype):
    x = torch.randn(400, 10, dtype=torch.float64) @ torch.randn(10, 25, dtype=torch.float64)
    assert transformed(x.to(dtype), "whiten").shape == (400, 10)
    far = torch.randn(30, 60, dtype=torch.float64) + 100
    assert transformed(far.to(dtype), "whiten").shape == (30, 29)  # fewer rows than dimensions, far from the origin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("steps", [["whiten"], ["centre", "whiten"], ["normalise", "whiten"]])
def test_rounding_of_half_precision_is_not_whitened(dtype, offset, steps):
    "Nine directions of noise would stand beside the one that is there, and a direction without noise stays."
    torch.manual_seed(0)
    x = (torch.randn(500, 3) @ torch.randn(3, 10) + offset).to(dtype)
    left = 4 if steps[0] == "normalise" and offset else 3  # of the cone over a space that misses the origin
    assert transformed(x, *steps).shape == (500, left)
    assert transformed(torch.randn(500, 10).to(dtype), *steps).shape == (500, 10)


def test_rounding_of_half_precision_is_that_of_each_entry():
    "A large column does not hide the others, and what is left when a large direction goes is known no better."
    torch.manual_seed(0)
    rogue = torch.randn(1000, 64) * 0.1
    rogue[:, 0] = 100 + 50 * rogue[:, 0]
    assert transformed(rogue.bfloat16(), "whiten").shape == (1000, 64)
    rogue[:, 0] = 100
    assert transformed(rogue.bfloat16(), "whiten").shape == (1000, 63)
    x = torch.randn(500, 3) @ torch.randn(3, 10) + 50 * torch.randn(500, 1) @ torch.randn(1, 10)
    assert transformed(x.half(), 1, "whiten").shape == (500, 3)
    assert transformed(x.half(), "whiten", "whiten").shape == (500, 4)
    with pytest.raises(ValueError, match="steps: nothing to whiten"):
        transformed((torch.randn(500, 3) @ torch.randn(3, 10)).half(), 3, "whiten")
