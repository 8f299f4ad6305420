"""Moments against their definition, under merging, masking, dtypes, memory and ranks."""

import itertools
import os
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ranks import on_ranks
from torch.testing import assert_close

from isoreg.isoscore import isoscore_from_cov
from isoreg.moments import few_operations, all_reduce, check_finite, check_points, merge, moments, pool, union_moments


def by_definition(x):
    y = x - x.mean(0)
    r = y.square().sum(1)
    return x.mean(0), y.T @ y, (r[:, None] * y).sum(0), r.square().sum()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.sampled_from([1, 2, 7, 193, 400]), st.integers(0, 10**6), st.floats(0.05, 1))
def test_equals_definition(n, d, seed, kept):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * 3 + torch.randn(d, generator=g, dtype=torch.float64) * 100
    mask = torch.rand(n, generator=g) < kept
    mask[int(torch.randint(n, (1,), generator=g))] = True
    m = moments(x.masked_fill(~mask[:, None], float("nan")), mask, order=4)  # a masked row may hold anything
    assert m.count == mask.sum()
    assert_close(m[1:], by_definition(x[mask]), rtol=1e-9, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(1, 299), min_size=1, max_size=4, unique=True), seed=st.integers(0, 1000))
def test_parts_merge_to_the_whole(cuts, seed):
    x = torch.randn(300, 9, generator=torch.Generator().manual_seed(seed)).double() * torch.arange(1, 10) + 40
    parts = [moments(x[a:b], order=4) for a, b in itertools.pairwise([0, *sorted(cuts), 300])]
    assert_close(list(merge(parts)), list(moments(x, order=4)), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_union_in_one_pass_is_that_of_the_joined_rows_and_so_is_its_gradient(masked, order):
    torch.manual_seed(0)
    clouds = [(3 * torch.randn(3000, 200) + 50 * k).double().requires_grad_() for k in range(3)]  # several chunks each
    mask = torch.rand(3000) < 0.6 if masked else None
    kept = [x[mask] if masked else x for x in clouds]
    weights = [torch.randn(s, dtype=torch.float64) for s in [(200,), (200, 200), (200,), ()][: order // 2 * 2]]
    ours = union_moments(clouds, mask, order)
    exact = by_definition(torch.cat(kept))[:order]
    assert ours.count == sum(map(len, kept))
    assert_close(ours[1 : order + 1], exact, rtol=1e-8, atol=1e-6)
    weigh = lambda fields: sum((w * f).sum() for w, f in zip(weights, fields))
    grads = [torch.autograd.grad(weigh(fields), clouds) for fields in (ours[1:], exact)]
    assert_close(*grads, rtol=1e-8, atol=1e-6)


def test_batched_and_pooled():
    x, mask = torch.randn(4, 50, 6).double(), torch.rand(50) > 0.3
    m = moments(x, mask, order=4)
    for i in range(4):
        assert_close([f[i] for f in m], list(moments(x[i], mask, order=4)))
    assert_close(list(pool(m)), list(moments(x.flatten(0, 1), mask.repeat(4), order=4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    x = (torch.randn(20_000, 16) + 5).to(dtype).requires_grad_()
    m = moments(x)
    assert m.m2.dtype == torch.float32
    assert_close(m.cov(), torch.cov(x.detach().double().T).float(), rtol=1e-4, atol=1e-4)
    m.m2.sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn.matmul, "fp32_precision"), reason="the older switch alone")
def test_the_newer_switches_of_precision_are_used_and_put_back():
    code = """
import torch
from isoreg.moments import full_precision, moments
torch.backends.fp32_precision = "tf32"
read = lambda: (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
with full_precision(torch.zeros(1)): assert read() == ("tf32", "ieee", "ieee"), read()
moments(torch.randn(20, 4))
assert read() == ("tf32",) * 3, read()
torch.backends.fp32_precision = "ieee"  # and the general setting still reaches the products
assert read() == ("ieee",) * 3, read()
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_memory_beside_the_input_stays_below_8_mib():
    script = """
import torch
from isoreg.moments import moments
def kib(key): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(key))
def extra(x):
    open('/proc/self/clear_refs', 'w').write('5')     # reset the high-water mark
    before = kib('VmRSS')
    moments(x)
    return (kib('VmHWM') - before) / 1024
for dtype in (torch.float32, torch.bfloat16):
    moments(torch.randn(2000, 768).to(dtype))         # code and libraries' own buffers are loaded on first use
    x = torch.randn(100_000, 768).to(dtype)
    try: print(min(extra(x) for _ in range(3)))       # other pages of the process only add
    except OSError: print('skip')
"""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    if "skip" in out:
        pytest.skip("the peak memory of a process cannot be reset here")
    single, half = map(float, out.split())
    assert 0 < single < 8 and 0 < half < 8


def two_clouds():
    return torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 7


def _rank_moments(rank, world):
    x = two_clouds()
    mine = (x[:, :12] if rank == 0 else x[:, 12:]).clone().requires_grad_()
    m = all_reduce(moments(mine, order=4))
    isoscore_from_cov(m.cov()).sum().backward()
    return list(m), mine.grad


def test_all_reduce_is_one_cloud_and_so_is_its_gradient():
    x = two_clouds().requires_grad_()
    m = moments(x, order=4)
    isoscore_from_cov(m.cov()).sum().backward()
    ranks = on_ranks(_rank_moments)
    for fields, _ in ranks:
        assert_close(fields, [f.detach() for f in m])
    # every rank adds the same global score to its loss, so summed gradients are twice those of one process;
    # DistributedDataParallel averages over ranks, which restores them
    assert_close(torch.cat([g for _, g in ranks], 1) / 2, x.grad)


def _mapped(x, folder):
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize("dtype", ["i8", ">i4", "u2", "i1"])
def test_whole_numbers_are_summed_in_float64(dtype):
    x = np.random.default_rng(0).integers(0, 100, size=(30, 4))
    for values in (x.astype(dtype), torch.from_numpy(x.astype(np.dtype(dtype).newbyteorder("=")))):
        assert_close(moments(values)[1:3], moments(x.astype(float))[1:3], rtol=0, atol=0)


def test_a_mapped_file_is_not_read_into_memory(tmp_path):
    x = _mapped(np.random.default_rng(0).normal(size=(30, 4)), tmp_path)
    for part in (x, x.T, x[::2, 1:]):
        assert check_points(part)[0].data_ptr() == part.ctypes.data


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivative(order, masked):
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]).bool() if masked else None
    fields = lambda x: [f for f in moments(x, mask, order=order)[1:] if f is not None]
    assert torch.autograd.gradcheck(fields, (x,)) and torch.autograd.gradgradcheck(fields, (x,))


def test_a_union_takes_masked_rows_of_any_value_and_mixed_precision():
    mask, clouds = torch.arange(9) % 4 > 0, torch.randn(3, 9, 4, dtype=torch.float64).unbind()
    holes = [x.masked_fill(~mask[:, None], float("nan")).requires_grad_() for x in clouds]
    m = union_moments(holes, mask)
    assert_close(m.m2, union_moments(clouds, mask).m2)
    for g in torch.autograd.grad(m.m2.square().sum(), holes):
        assert bool((g[~mask] == 0).all()) and bool(torch.isfinite(g).all())
    short = [clouds[0].bfloat16().requires_grad_(), clouds[1].float().requires_grad_()]
    m = union_moments(short)
    assert_close(m.m2, moments(torch.cat([x.float() for x in short])).m2)
    assert [g.dtype for g in torch.autograd.grad(m.m2.sum(), short)] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("order", [2, 4])
def test_second_derivative_of_a_union_where_some_clouds_have_none_and_one_comes_twice(order):
    torch.manual_seed(0)
    a, b = torch.randn(6, 3).double(), torch.randn(6, 3).double().requires_grad_()
    total = lambda *clouds: sum(f.square().sum() for f in union_moments(clouds, order=order)[1 : order + 1])
    for clouds in ([a, b], [b, a, b]):
        (plain,), (kept,) = (torch.autograd.grad(total(*clouds), b, create_graph=c) for c in (False, True))
        assert_close(plain, kept.detach())


def test_short_products_are_not_used_in_a_compiled_function():
    x = torch.randn(400, 64)
    f = lambda x: moments(x).m2
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(x), f(x), rtol=1e-5, atol=1e-3)


def test_short_products_are_not_used_where_the_user_allows_them():
    x = torch.randn(4000, 300)
    before, exact = torch.get_float32_matmul_precision(), torch.cov(x.double().T).float()
    torch.set_float32_matmul_precision("medium")
    try:
        assert_close(moments(x).cov(), exact, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(moments(x).cov(), exact, rtol=1e-4, atol=1e-5)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


ROWS = {"all": slice(None), "seven tenths": slice(0, 42_000), "thirteen far inside": slice(41_007, 41_020)}


@pytest.mark.parametrize("which", ROWS)
def test_the_first_rows_may_be_a_group_of_their_own_and_few_may_count(which):
    "What is subtracted first is a mean of rows from all over the cloud; with the first rows alone the error is 1e-4."
    torch.manual_seed(0)
    x, mask = torch.randn(60_000, 32), torch.zeros(60_000, dtype=torch.bool)
    x[300:] += 100
    mask[ROWS[which]] = True
    exact = torch.cov(x[mask].double().T)
    assert (moments(x, None if which == "all" else mask).cov() - exact).norm() / exact.norm() < 5e-6


HOLDERS = [
    lambda x, _: list(torch.from_numpy(x)),
    lambda x, _: x.tolist(),
    lambda x, _: x[:, ::-1].copy()[:, ::-1],
    lambda x, _: np.rec.fromarrays([x, x[:, 0] > 0], "4f8, ?").f0,  # rows that lie 33 bytes apart
    lambda x, _: x.astype(">f8"),
    lambda x, _: x.astype(np.longdouble),
    lambda x, _: pd.DataFrame(x),
    _mapped,
]


@pytest.mark.parametrize("make", HOLDERS)
def test_whatever_holds_the_same_numbers_gives_the_same(make, tmp_path):
    x, mask = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) < 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [moments(make(x, tmp_path), kind) for kind in (mask, mask.astype(np.uint8), mask.tolist())]
    exact = moments(torch.from_numpy(x), torch.from_numpy(mask))
    for m in found:
        assert_close(m[:3], exact[:3], rtol=1e-13, atol=1e-13)


x43 = torch.randn(4, 3)
REFUSED = [
    (lambda: moments(torch.randn(5)), r"points: .*\(5,\), which lacks an axis"),
    (lambda: moments(torch.zeros(0, 5, 4)), r"points: .*\(0, 5, 4\)"),
    (lambda: moments(pd.DataFrame(np.eye(4)).assign(text="a")), "points: this DataFrame .*numeric columns"),
    (lambda: moments([[1.0, 2.0], [3.0]]), "points: this list .*equal length"),
    (lambda: moments(x43, torch.ones(3)), r"mask: shape \(3,\) does not fit points \(4, 3\)"),
    (lambda: moments(x43, torch.tensor(0)), r"mask: shape \(\) does not fit"),
    (lambda: moments(x43, torch.tensor([0.0, 0, -1e4, -torch.inf])), "mask: holds values other than .*mask == 0"),
    (lambda: moments(x43, order=3), "order: 3 "),
    (lambda: moments(x43[:1]).cov(), "count: 1 rows"),
    (lambda: merge([]), "parts: .*none is there"),
    (lambda: merge([moments(x43), moments(x43, order=4)]), "parts: clouds differ"),
    (lambda: merge([moments(x43), moments(x43[:, :2])]), "parts: clouds differ"),
    (lambda: check_finite(x43.masked_fill(torch.eye(4, 3) > 0, torch.nan)), r"points: row 0 \(from 0\) holds NaN"),
    (lambda: check_finite(torch.stack([x43, x43 / 0])), r"points: row 1, 0 \(from 0\)"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_large_cloud_on_a_gpu_is_taken_in_chunks_and_blocks():
    x = torch.randn(90_000, 768)  # more than 256 MiB
    one = moments(x)
    with mock.patch.object(few_operations, "on_cpu", True):
        other = moments(x)
    assert float((other.m2 - one.m2).norm() / one.m2.norm()) < 1e-6 and other.count == one.count
    torch.testing.assert_close(other.mean, one.mean, rtol=0, atol=1e-7)
