"""Measures of sentence and image vectors against NumPy, loops over pairs and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import skew
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from isoreg.isoscore import isoscore
from isoreg.vectors import alignment, alpha_req, dimensions_in_use, hubness, transformed, uniformity


def cloud(n=300, d=12, seed=0, mean=0.4):
    g = np.random.default_rng(seed)
    return g.normal(size=(n, d)) @ g.normal(size=(d, d)) * 0.5 + mean * g.normal(size=d)


def test_dimensions_in_use_are_the_participation_ratio():
    x = cloud(200, 12)
    values = np.linalg.eigvalsh(np.cov(x.T))
    assert dimensions_in_use(isoscore(x), 12) == pytest.approx(values.sum() ** 2 / (values**2).sum())
    assert (dimensions_in_use(-0.1, 12), dimensions_in_use(1.2, 12)) == (1, 12)
    with pytest.raises(ValueError, match="dims: 1 is out of range"):
        dimensions_in_use(0.5, 1)


@pytest.mark.parametrize("n, d", [(400, 130), (60, 130), (400, 30)])
def test_alpha_req_against_weighted_least_squares(n, d):
    x = cloud(n, d)
    values = np.linalg.eigvalsh(np.cov(x.T))[::-1][: min(n - 1, d)]
    k = np.arange(6, min(100, len(values)) + 1)
    slope = np.polyfit(np.log(k), np.log(values[k - 1]), 1, w=k**-0.5)[0]
    assert alpha_req(x) == pytest.approx(-slope, rel=1e-8) == alpha_req(3 * x + 5)
    k = np.arange(2, 21)
    slope = np.polyfit(np.log(k), np.log(values[k - 1]), 1, w=k**-0.5)[0]
    assert alpha_req(x, first=2, last=20) == pytest.approx(-slope, rel=1e-8)


def test_uniformity_and_alignment_by_a_loop():
    x, y = cloud(40, 6), cloud(40, 6, 1)
    u, v = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, y))
    kernel = [np.exp(-2 * ((u[i] - u[j]) ** 2).sum()) for i in range(40) for j in range(i)]
    assert uniformity(x) == pytest.approx(np.log(np.mean(kernel)), rel=1e-12) == uniformity(7 * x)
    assert alignment(x, y) == pytest.approx(((u - v) ** 2).sum(1).mean(), rel=1e-12)
    assert alignment(x, y, power=1) == pytest.approx(np.sqrt(((u - v) ** 2).sum(1)).mean(), rel=1e-12)
    assert alignment(x, 3 * x) == pytest.approx(0, abs=1e-12) and uniformity(np.ones((5, 3))) == pytest.approx(0)
    assert uniformity(np.eye(300)) == pytest.approx(-4)  # any two are orthogonal


def test_hubness_against_scikit_learn():
    for x in (cloud(500, 40), cloud(2100, 4) + 100):  # more rows than are compared at a time, far from the origin
        lists = NearestNeighbors(n_neighbors=7).fit(x).kneighbors(return_distance=False)
        counts = np.bincount(lists.ravel(), minlength=len(x))
        found = hubness(x, k=7)
        assert found.skewness == pytest.approx(skew(counts), rel=1e-6)
        assert (found.antihubs, found.largest) == (np.mean(counts == 0), counts.max())


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
        (lambda x: alpha_req(x[:6]), "points: 5 eigenvalues are not zero"),
        (lambda x: alpha_req(x, first=0), "first: 0"),
        (lambda x: alpha_req(x, first=6, last=7), "last: 7 .* three ranks"),
        (lambda x: uniformity(x * 0), "points: a row is zero"),
        (lambda x: uniformity(x, t=0), "t: 0"),
        (lambda x: alignment(x, x[:5]), r"partners: shape \(5, 12\) beside points"),
        (lambda x: hubness(x[:11]), "points: 11 rows count, need 12"),
        (lambda x: hubness(x, k=0), "k: 0"),
        (lambda x: transformed(x, "centred"), "steps: 'centred' is unknown; did you mean 'centre'"),
        (lambda x: transformed(x, 12), "number of directions below 12"),
        (lambda x: transformed(x, "centre", fitted_on=x[:, :1]), r"fitted_on: shape \(300, 1\) beside points"),
        (lambda x: transformed(x, "whiten", fitted_on=x[:9, :7]), r"fitted_on: shape \(9, 7\) beside points"),
        (lambda x: transformed(x, "whiten", strength=2), "strength: 2"),
        (lambda x: transformed(np.repeat(x[:1], 5, 0), "whiten"), "steps: nothing to whiten; all rows are equal"),
    ],
)
def test_what_these_measures_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud())


@pytest.mark.parametrize("t", [0.5, 2.0, 30.0])
def test_uniformity_of_a_narrow_kernel(t):
    u = torch.nn.functional.normalize(torch.randn(150, 40, dtype=torch.float64), dim=1)
    expected = (-t * torch.pdist(u) ** 2).logsumexp(0) - math.log(150 * 149 / 2)
    assert uniformity(u, t=t) == pytest.approx(float(expected), rel=1e-9)


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
