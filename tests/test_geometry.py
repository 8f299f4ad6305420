"""Measures of geometry against independent references: NumPy's decompositions, loops over pairs, SciPy's distances,
scikit-dimension."""

import math
import warnings

import numpy as np
import pytest
import skdim
import torch
from hypothesis import given, settings, strategies as st
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize
from small_models import make

from isoreg.corpus import TextBatches
from isoreg.geometry import MEASURES, Dimensions, Measure, geometry, nearest_two, outlier_dimensions, transformed
from isoreg.geometry import average_cosine, effective_rank, partition_score, rankme, two_nn, variance_explained
from isoreg.isoscore import isoscore
from isoreg.experiments.config import GeometryConfig, choices
from isoreg.experiments.measure import layer_points, load_body, measure
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


def reference_skdim(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return skdim.id.TwoNN().fit(x).dimension_


@pytest.mark.parametrize("n, d", [(300, 12), (40, 40), (15, 60), (2, 5)])
def test_definitions(n, d):
    x = cloud(n, d, n)
    c = x - x.mean(0)
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [u[i] @ u[j] for i in range(n) for j in range(n) if i != j]
    assert average_cosine(x) == pytest.approx(np.mean(pairs), abs=1e-12)
    s, s0 = np.linalg.svd(c, compute_uv=False), np.linalg.svd(x, compute_uv=False)
    s = s[: min(n - 1, d)]
    assert effective_rank(x) == pytest.approx(entropy_rank(s), rel=1e-8)
    assert rankme(x) == pytest.approx(entropy_rank(s0, 1e-7), rel=1e-8)
    k = max(1, math.floor(0.3 * d + 1e-9))
    assert variance_explained(x) == pytest.approx(k / d / ((s**2)[:k].sum() / (s**2).sum()), rel=1e-10)
    assert partition_score(x, log=True) == pytest.approx(log_partition(x), abs=1e-6)
    assert partition_score(x) == pytest.approx(math.exp(log_partition(x)), abs=1e-6)
    found = outlier_dimensions(x)
    np.testing.assert_allclose(found.std, x.std(0, ddof=1), rtol=1e-10)


def nearest_by_scipy(x):
    return np.sort(cdist(x, x) + np.diag(np.full(len(x), np.inf)), 1)[:, :2]


@pytest.mark.parametrize("n, d", [(400, 3), (500, 20), (300, 60), (120, 300)])
def test_two_nn_is_scikit_dimension_and_counts_equal_points_once(n, d):
    x = cloud(n, d, n)
    found = two_nn(x)
    assert found == pytest.approx(reference_skdim(x), rel=1e-6)
    assert two_nn(np.concatenate([x, x[:60], x[:9]])) == pytest.approx(found, rel=1e-12)
    assert two_nn(torch.from_numpy(x).float()) == pytest.approx(two_nn(x), rel=1e-3)


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


def test_outliers_by_the_rules():
    g = np.random.default_rng(1)
    x = g.normal(size=(500, 40)) * g.uniform(0.5, 4, size=40) ** 3 + g.normal(size=40) ** 5
    m, v = x.mean(0), x.var(0, ddof=1)
    found = outlier_dimensions(x)
    assert {*found.by_mean} == {*np.flatnonzero(np.abs(m - m.mean()) >= 3 * m.std())} != set()
    assert found.by_variance == sorted(np.flatnonzero(v >= 5 * v.mean()), key=lambda j: -v[j]) != []
    flat = outlier_dimensions(np.ones((5, 3)))
    assert flat.by_mean == [] and flat.by_variance == []


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 60), st.integers(1, 8), st.integers(1, 70), st.data(), st.booleans(), st.sampled_from([0, 1e6]))
def test_nearest_two_of_any_points(n, d, chunk, data, coarse, offset):
    seed, copies = data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 20))
    x = np.random.default_rng(seed).normal(size=(n, d)) + offset
    if coarse:
        x = np.round(x)  # ties and copies
    x = np.concatenate([x, x[:copies]])
    np.testing.assert_allclose(nearest_two(torch.from_numpy(x), chunk), nearest_by_scipy(x), rtol=1e-12)


def test_nearest_two_of_hard_clouds():
    x = np.random.default_rng(5).normal(size=(260, 24))
    wide, far, outlier = x.copy(), x.copy(), x.copy()
    wide[:, 0] *= 1e4
    far[::2] += 1e5
    outlier[0] = 1e6
    for rows in (wide, far, outlier, 1e-30 * x, np.concatenate([x, np.full((260, 1), 3e8)], 1)):
        np.testing.assert_allclose(nearest_two(torch.from_numpy(rows)), nearest_by_scipy(rows), rtol=1e-8)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(20, 80), d=st.integers(2, 12), shift=st.floats(-50, 50))
def test_invariances(seed, n, d, shift):
    g = np.random.default_rng(seed)
    x, a = cloud(n, d, seed, mean=1.0), geometry(cloud(n, d, seed, mean=1.0))
    same = {
        "rotation": (x @ np.linalg.qr(g.normal(size=(d, d)))[0], SCALARS),
        "shift": (x + shift, (variance_explained, effective_rank, two_nn)),
        "scale": (x * 2.0**20, (average_cosine, variance_explained, effective_rank, rankme, two_nn)),
        "order": (x[g.permutation(n)], SCALARS),
    }
    for name, (y, measures) in same.items():
        for f in measures:
            assert f(y) == pytest.approx(a[f.__name__], rel=1e-5, abs=1e-7), (name, f.__name__)
    assert 1 - 1e-9 <= a["effective_rank"] <= min(n - 1, d) + 1e-9
    assert -1 / (n - 1) - 1e-9 <= a["average_cosine"] <= 1 and 0 <= a["partition_score"] <= 1
    # the entropy of order 2 never exceeds Shannon's
    assert 1 + (d - 1) * a["isoscore"] <= a["effective_rank"] + 1e-9


def test_isotropic_and_collapsed():
    even, line = np.concatenate([np.eye(10), -np.eye(10)]), np.linspace(-1, 2, 50)[:, None] * np.arange(1.0, 5)
    found = geometry(even)
    assert math.isnan(found["two_nn"]) and found["isoscore"] == pytest.approx(1) == found["partition_score"]
    assert found["variance_explained"] == pytest.approx(1) and found["effective_rank"] == pytest.approx(10)
    assert found["average_cosine"] == pytest.approx(-1 / 19)
    assert effective_rank(line) == pytest.approx(1, abs=1e-5) and variance_explained(line) == pytest.approx(1 / 4)
    assert geometry(line)["isoscore"] == pytest.approx(0, abs=1e-12)


def test_partition_score_does_not_overflow_and_counts_unused_directions():
    x = cloud(200, 6, 4)
    assert partition_score(1e3 * x, log=True) == pytest.approx(log_partition(1e3 * x), rel=1e-9)
    wide = cloud(5, 300, 1, mean=0.0) * 30  # directions without a point have Z = n
    full = np.linalg.svd(wide)[2]
    z = wide @ np.concatenate([full, -full]).T
    logs = z.max(0) + np.log(np.exp(z - z.max(0)).sum(0))
    assert partition_score(wide, log=True) == pytest.approx(logs.min() - logs.max(), rel=1e-9)


def test_masks_and_whole_numbers():
    x, keep = np.random.default_rng(0).integers(0, 200, size=(120, 7)), np.random.default_rng(0).random(120) > 0.3
    bad = x.astype(float)
    bad[~keep] = np.nan
    for f in SCALARS:
        assert f(bad, mask=keep) == f(x[keep]) == f(torch.from_numpy(x[keep]))
    assert geometry(torch.from_numpy(bad), torch.from_numpy(keep).int())["points"] == keep.sum()
    np.testing.assert_allclose(outlier_dimensions(bad, keep).mean, x[keep].mean(0), rtol=1e-12)


REFUSED = [
    (lambda x: geometry(x[0]), "points: need shape"),
    (lambda x: geometry(x * np.nan), r"points: row 0 \(from 0\) holds NaN"),
    (lambda x: geometry(x[None]), "points: one cloud"),
    (lambda x: rankme(x, np.arange(300) < 1), "points: 1 rows count, need 2"),
    (lambda x: two_nn(x[:2]), "points: 2 rows count, need 3"),
    (lambda x: two_nn(np.ones((6, 3))), "points: .*different points"),
    (lambda x: two_nn(np.eye(8)), "points: .*grid"),
    (lambda x: variance_explained(np.ones((6, 3))), "points: .*zero variance"),
    (lambda x: partition_score(np.zeros((6, 3))), "points: all are zero"),
    (lambda x: average_cosine(np.eye(3)[:, :2]), "points: .*no direction"),
    (lambda x: transformed(x, "centred"), "steps: 'centred' is unknown.*'centre'"),
    (lambda x: transformed(x, 12), "steps: 12 is unknown.*whiten"),
    (lambda x: transformed(x, "whiten", strength=2), "strength: 2 "),
    (lambda x: transformed(np.repeat(x[:1], 5, 0), "whiten"), "steps: nothing to whiten; all rows are equal"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud())


TINY = dict(limit=60, batch_size=7)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    make("gpt2", head="Model", n_positions=64, vocab_size=len(toy_tokenizer())).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_measure_is_added_in_one_place(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASURES, "width", Measure(lambda c: float(c.x.abs().max()), "largest value", 2))
    x = cloud()
    assert geometry(x)["width"] == abs(x).max()
    assert measure(GeometryConfig(**TINY, layers="-1"), tmp_path)["layers"][0]["width"] > 0


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("pooling", choices(GeometryConfig.model_fields["pooling"]))
def test_record_by_single_texts(tmp_path, gpt2, kind, pooling):
    config = GeometryConfig(**TINY, pooling=pooling, **({"model": gpt2} if kind == "decoder" else {}))
    record = measure(config, tmp_path)
    model, tokenizer, _ = load_body(config)
    places, points = {"tokens": slice(None), "cls": slice(1), "last": slice(-1, None)}, []
    for text in toy_corpus(60, seed=1):  # each alone, without padding
        with torch.no_grad():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        h = torch.cat(states)
        points.append(h.mean(1, keepdim=True) if pooling == "mean" else h[:, places[pooling]])
    points = torch.cat(points, 1)
    assert record["points"] == record["available"] == points.shape[1] and record["dims"] == points.shape[2]
    assert [row["layer"] for row in record["layers"]] == list(range(len(points)))
    for row, x in zip(record["layers"], points):
        right = geometry(x)
        for name in ("isoscore", "average_cosine", "effective_rank", "rankme", "log_partition_score"):
            if not (math.isnan(right[name]) or (pooling == "cls" and row["layer"] == 0)):
                assert row[name] == pytest.approx(right[name], rel=1e-3, abs=1e-3), (row["layer"], name)
        assert ("isoscore_corrected" in row) == (pooling != "tokens")
    for name in ("mean", "std"):
        np.testing.assert_allclose(record["dimensions"][name], getattr(points[-1], name)(0), rtol=1e-3, atol=1e-4)


def test_first_token_before_the_first_layer_has_no_geometry(tmp_path):
    record = measure(GeometryConfig(**TINY, pooling="cls"), tmp_path)
    first = record["layers"][0]
    assert first["isoscore"] is None and first["two_nn"] is None and first["average_cosine"] == pytest.approx(1)
    assert any("layer 0: isoscore" in note for note in record["notes"]) and record["layers"][1]["isoscore"] > 0


def test_points_are_drawn_alike_in_all_layers_and_layers_chosen(tmp_path):
    model, tokenizer, _ = load_body(GeometryConfig())
    batches = TextBatches(toy_corpus(40, seed=1), tokenizer, "clm", 7)
    every, some = layer_points(model, batches), layer_points(model, batches, limit=50, seed=3)
    rows = [int((every[1][0] == x).all(1).nonzero()[0, 0]) for x in some[1][0]]
    assert some[1].shape[1] == 50 and some[2] == every[1].shape[1]
    assert all(any((e == x).all() for e in every[1][-1]) for x in some[1][-1]) and len(set(rows)) > 20
    record = measure(GeometryConfig(**TINY, layers="0,-1,0", points=100), tmp_path / "a")
    assert [row["layer"] for row in record["layers"]] == [0, 4]
    assert record["points"] == 100 and record["dimensions"]["layer"] == 4
    with pytest.raises(ValueError, match="layers: .*0 to 4"):
        measure(GeometryConfig(**TINY, layers="7"), tmp_path / "b")
    assert not (tmp_path / "b" / "record.json").exists()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_whitened(dtype):
    x = torch.randn(400, 10, dtype=torch.float64) @ torch.randn(10, 25, dtype=torch.float64)
    assert transformed(x.to(dtype), "whiten").shape == (400, 10)
    far = torch.randn(30, 60, dtype=torch.float64) + 100
    assert transformed(far.to(dtype), "whiten").shape == (30, 29)  # fewer rows than dimensions, far from the origin


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
