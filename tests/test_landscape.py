"""The loss landscape: directions, subsets, a walk that leaves no trace, surfaces, curvature, plots."""

import random

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_models import make
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.data import DataLoader

from isoreg.corpus import sample_losses
from isoreg.landscape import RINGS, Surface, direction, displaced, expected_curvature, grid
from isoreg.landscape import loss_surface, plane_hessian, plot, step_length, subset

matplotlib.use("Agg")


class Quadratic(nn.Module):
    "Loss 1/2 (t - m)^T A (t - m) + x g^T t of sample x, t all parameters in one vector; A is symmetric."

    def __init__(self, m=0.0):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
        self.w, self.v, self.b = (nn.Parameter(draw(*s)) for s in ((3, 4), (2, 2, 2), (5,)))
        B = draw(25, 25)
        self.A, self.g, self.m = B @ B.T / 25, draw(25), m

    def vector(self, d=None):
        tensors = dict(self.named_parameters()) if d is None else d
        return torch.cat([tensors.get(n, torch.zeros_like(p)).flatten() for n, p in self.named_parameters()])


def quadratic_loss(model, batch):
    t = model.vector() - model.m
    return 0.5 * t @ model.A @ t + batch["x"] * (model.g @ t)


XS = [{"x": torch.tensor(x, dtype=torch.float64)} for x in ([1, 2, -4], [3])]  # mean 0.5 over 4 samples


def tiny_bert(attention="eager"):
    return make("bert", attention, "ForMaskedLM").eval()


def mlm_batches(n=2, size=3, length=9, seed=0):
    g, out = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        ids = torch.randint(5, 99, (size, length), generator=g)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=g) > 0.3, -100)
        labels[:, 1] = ids[:, 1]
        out.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return out


def state(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


def untouched(model, before):
    "Whether all tensors are the same bit for bit: NaN equals NaN, 0 differs from -0."
    as_bytes = lambda t: t.reshape(-1).view(torch.uint8)
    return all(torch.equal(as_bytes(t), as_bytes(before[n])) for n, t in model.state_dict().items())


def second_difference(model, batches, h, loss="mlm", **options):
    "The second derivative along direction 0, of fourth order in h."
    steps = dict(alphas=h * np.arange(-2, 3), loss=loss)
    f = loss_surface(model, batches, direction(model, 0), **steps, **options).losses[:, 0]
    return pytest.approx(f @ [-1, 16, -30, 16, -1] / 12 / h**2, rel=1e-3)


@given(st.integers(0, 2**40), st.sampled_from(["zero", "scale"]))
@settings(max_examples=20, deadline=None)
def test_filters_have_the_length_of_the_weights(seed, one_d):
    model = Quadratic()
    d = direction(model, seed, one_d)
    for n in "wv":
        assert_close(d[n].flatten(1).norm(dim=1), model.get_parameter(n).flatten(1).norm(dim=1), rtol=1e-8, atol=0)
    assert ("b" in d) == (one_d == "scale")
    assert "b" not in d or float(d["b"].norm()) == pytest.approx(float(model.b.data.norm()), rel=1e-8)
    assert step_length(d) == pytest.approx(model.vector(d).norm().item())


def test_normal_before_it_is_normalised():
    "Entries of one long filter: mean 0, fourth moment 3, independent of those of another seed, name or shape."
    model = nn.Sequential(nn.Linear(200_000, 1, bias=False), nn.Linear(200_000, 1, bias=False))
    draws = (0, "0.weight"), (1, "0.weight"), (0, "1.weight")
    a, b, c = (direction(model, seed)[name].double() for seed, name in draws)
    z = a / a.square().mean().sqrt()
    assert abs(z.mean()) < 0.01 and z.pow(4).mean().item() == pytest.approx(3, abs=0.1)
    for other in (b, c):
        assert abs((a * other).sum() / a.norm() / other.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_direction_depends_on_seed_and_name_alone(dtype, request):
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    model, name = tiny_bert(), "bert.embeddings.word_embeddings.weight"
    first = direction(model, 4)
    torch.manual_seed(321)
    torch.set_default_dtype(dtype)
    alone = direction(model, 4, mask={name: torch.tensor(True)})
    assert list(alone) == [name] and torch.equal(alone[name], first[name])
    assert not torch.equal(direction(model, 5)[name], first[name])
    assert "cls.predictions.decoder.weight" not in first  # tied: once
    assert len(first) == sum(p.ndim > 1 for p in model.parameters())


@pytest.mark.parametrize("one_d", ["zero", "scale"])
def test_mask_and_equal_norm(one_d):
    model = Quadratic()
    half = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = {"w": half, "v": torch.tensor(False), "b": torch.tensor(True)}
    rest = {n: ~m for n, m in mask.items()}
    whole, part, other = (direction(model, 1, one_d, m) for m in (None, mask, rest))
    equal = direction(model, 1, one_d, mask, norm="equal")
    assert_close(part["w"], whole["w"] * half)
    assert "v" not in part and ("b" in part) == (one_d == "scale")
    assert step_length(equal) == pytest.approx(step_length(whole), rel=1e-9) and step_length(part) < step_length(whole)
    assert_close(equal["w"], part["w"] * (step_length(whole) / step_length(part)))
    assert_close(model.vector(part) + model.vector(other), model.vector(whole))  # two subsets cut a step in two


def test_zero_filters_and_filters_of_one_entry():
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(1, 4))
    d = direction(model, 0)
    assert not d["0.weight"][0].any() and d["0.weight"][1:].any()
    assert_close(d["1.weight"].abs(), model[1].weight.detach().abs())


def flat(masks):
    return torch.cat([m.flatten() for m in masks.values()])


@given(st.integers(0, 10**6), st.floats(0.01, 1), st.sampled_from(["top", "bottom"]), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_scalars_against_a_sort(seed, share, which, levels):
    "The chosen scores are the largest (smallest) ones and exactly as many as asked for, with many ties too."
    model, g = Quadratic(), torch.Generator().manual_seed(seed)
    scores = {n: torch.randint(0, levels, p.shape, generator=g).float() for n, p in model.named_parameters()}
    chosen, values = flat(subset(model, scores, share, which, seed=seed)), flat(scores)
    best = values.sort(descending=which == "top").values[: max(1, round(share * 25))]
    assert values[chosen].sort().values.tolist() == best.sort().values.tolist()


def test_ties_are_drawn_over_all_tensors():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    scores = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    masks, other = (subset(model, scores, 0.5, "bottom", seed=seed) for seed in (1, 2))
    assert all(abs(int(m.sum()) - 5000) < 300 for m in masks.values()) and int(flat(masks).sum()) == 10_000
    assert not torch.equal(flat(masks), flat(other))


def test_scalars_are_ranked_in_the_precision_of_their_scores():
    weight = torch.tensor([[1, 1 + 1e-9], [1 + 3e-9, 1 + 2e-9]], dtype=torch.float64)
    for seed in range(3):
        chosen = subset(nn.Linear(2, 2).double(), {"weight": weight, "bias": torch.zeros(2)}, 1 / 6, seed=seed)
        assert chosen["weight"].tolist() == [[False, False], [True, False]] and not chosen["bias"].any()


@pytest.mark.parametrize("per_scalar", [True, False])
def test_tensors_against_the_released_ranks(per_scalar):
    model, g = tiny_bert(), torch.Generator().manual_seed(0)
    scores = {n: torch.rand(p.shape, generator=g) * torch.rand((), generator=g) for n, p in model.named_parameters()}
    order = sorted(scores, key=lambda n: scores[n].double().mean())
    given = scores if per_scalar else {n: float(s.mean()) for n, s in scores.items()}
    for which, names in (("bottom", order[: len(order) // 2]), ("top", order[len(order) // 2 :])):
        masks = subset(model, given, 0.5, which, by="tensor")
        for n, p in model.named_parameters():
            assert masks[n].dtype == torch.bool and torch.equal(masks[n], torch.full(p.shape, n in names)), n


@pytest.mark.parametrize("by", ["scalar", "tensor"])
def test_random_subsets_are_seeded(by):
    model = tiny_bert()
    a, b, c = (subset(model, None, 0.3, "random", by, seed) for seed in (0, 0, 1))
    assert torch.equal(flat(a), flat(b)) and not torch.equal(flat(a), flat(c))
    for masks in (a, c):
        units = flat(masks) if by == "scalar" else torch.stack([m.any() for m in masks.values()])
        assert int(units.sum()) == round(0.3 * len(units))
    if by == "scalar":
        assert all(0.1 < m.float().mean() < 0.5 for m in a.values() if m.numel() > 200)


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_a_random_subset_knows_nothing_of_the_direction_of_its_seed(share):
    "A share of the scalars chosen at random has that share of a direction's squared length, for equal seeds too."
    model, parts = tiny_bert(), []
    for seed in range(5):
        mask = subset(model, None, share, "random", seed=seed)
        part, whole = (step_length(direction(model, seed, "scale", m)) for m in (mask, None))
        parts.append((part / whole) ** 2)
    assert np.mean(parts) == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_bit_for_bit_in_every_dtype(dtype):
    model, w = tiny_bert().to(dtype), "bert.embeddings.word_embeddings.weight"
    with torch.no_grad():
        model.cls.predictions.bias[:3] = torch.tensor([float("nan"), -0.0, 0.0])
    before, d1, d2 = state(model), direction(model, 0), direction(model, 1)
    with displaced(model, d1, d2) as place:
        for a, b in ((1.3, -0.7), (1.3, 0.1), (0.0, 0.0)):
            place(a, b)
        assert untouched(model, before)
        place(0.9, 0.3)
        right, rtol = before[w].float() + 0.9 * d1[w] + 0.3 * d2[w], 1e-5 if dtype == torch.float32 else 2e-2
        assert_close(model.get_parameter(w).float(), right, rtol=rtol, atol=1e-6)
    assert untouched(model, before)


def test_nothing_else_of_the_model_changes():
    model, batches = tiny_bert(), mlm_batches()
    model.train()
    model.bert.embeddings.eval()
    model.bert.encoder.requires_grad_(False)
    sample_losses(model, batches[0]).sum().backward()
    parameter = lambda p: (id(p), p.requires_grad, None if p.grad is None else p.grad.tolist())
    before, found = state(model), []
    for walk in (False, True):
        if walk:
            d1, d2 = direction(model, 0), direction(model, 1)
            loss_surface(model, batches, d1, d2, alphas=[0.0, 1.0])
            plane_hessian(model, batches, d1, d2)
        found.append(([m.training for m in model.modules()], [parameter(p) for p in model.parameters()]))
    assert found[0] == found[1] and untouched(model, before)


def test_a_graph_from_before_the_walk_can_be_differentiated_after_it():
    model, batches = tiny_bert(), mlm_batches()
    of = lambda loss: torch.autograd.grad(loss, model.cls.predictions.transform.dense.weight)[0]
    right, loss = of(sample_losses(model, batches[0]).sum()), sample_losses(model, batches[0]).sum()
    loss_surface(model, batches, direction(model, 0), alphas=[0.0, 1.0])
    assert_close(of(loss), right)


@pytest.mark.parametrize("error, after", [(RuntimeError, 1), (KeyboardInterrupt, 4)])
def test_restored_after_an_error_in_the_loss(error, after):
    model, calls = nn.Linear(3, 3).train(), []
    before = state(model)

    def loss(model, batch):
        calls.append(1)
        if len(calls) == after + 1:
            raise error("now")
        return model(batch["x"]).square().sum(1)

    with pytest.raises(error, match="now"):
        loss_surface(model, [{"x": torch.randn(8, 3)}], direction(model, 0), alphas=grid(1, 7), loss=loss)
    assert untouched(model, before) and model.training


def moved(model, *steps):
    "The weights of a model after steps (length, direction)."
    return {n: p.detach() + sum(a * d.get(n, 0) for a, d in steps) for n, p in model.named_parameters()}


def test_every_point_against_a_loop():
    "Each loss is the mean over samples, not batches, of the model with its weights replaced."
    model, batches = tiny_bert(), mlm_batches(2) + mlm_batches(1, size=1, seed=3)
    d1, d2 = direction(model, 0), direction(model, 1, "scale")
    s = loss_surface(model, batches, d1, d2, alphas=[-0.4, 0.0, 0.3])
    for i, j in np.ndindex(3, 3):
        weights, losses = moved(model, (s.alphas[i], d1), (s.betas[j], d2)), []
        for batch in batches:
            logits = functional_call(model, weights, (batch["input_ids"],), tie_weights=True).logits
            losses += [nn.functional.cross_entropy(x, y).item() for x, y in zip(logits, batch["labels"])]
        assert s.losses[i, j] == pytest.approx(np.mean(losses), rel=2e-5)
    line = loss_surface(model, batches, d1, alphas=[-0.4, 0.0, 0.3])
    np.testing.assert_allclose(line.losses, s.losses[:, 1:2], rtol=1e-12)
    assert line.is_line and line.betas.tolist() == [0] and not s.is_line and s.origin == s.losses[1, 1]


def test_the_mean_as_released_against_a_loop():
    """The model's own loss of each batch, over its predicted tokens, and the mean of these over samples, as
    Trainer.evaluate has it."""
    model, batches = tiny_bert(), mlm_batches(2) + mlm_batches(1, size=1, seed=3)
    for b, n in zip(batches, (7, 2, 4)):
        b["labels"][0, n:] = -100  # samples that predict different numbers of tokens
    d, sizes = direction(model, 0), [len(b["labels"]) for b in batches]
    line = lambda batches, how: loss_surface(model, batches, d, alphas=[0.0, 0.3], reduction=how)
    ours, s = (line(batches, how) for how in ("mean", "batch"))
    for a, loss in zip(s.alphas, s.losses[:, 0]):
        losses = [functional_call(model, moved(model, (a, d)), (), b, tie_weights=True).loss.item() for b in batches]
        assert loss == pytest.approx(np.average(losses, weights=sizes), rel=2e-5)
    assert abs(ours.losses - s.losses).min() > 1e-3
    one = [{k: v[i : i + 1] for k, v in b.items()} for b in batches for i in range(len(b["labels"]))]
    np.testing.assert_allclose(line(one, "batch").losses, ours.losses, rtol=1e-6)
    double = model.double()
    H = plane_hessian(double, batches, direction(double, 0), reduction="batch")
    assert H[0, 0] == second_difference(double, batches, 0.01, reduction="batch")


@pytest.mark.parametrize("kind", ["clm", "seq2seq"])
def test_other_losses(kind):
    model = make("gpt2") if kind == "clm" else make("t5", feed_forward_proj="gated-gelu")
    model, ids = model.eval(), torch.randint(5, 99, (3, 9))
    batches, d = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}], direction(model, 0)
    s = loss_surface(model, batches, d, alphas=[0.0, 0.5], loss=kind)
    with torch.no_grad():
        expected = model(**batches[0]).loss.item()  # all samples have equally many tokens
    assert s.origin == pytest.approx(expected, rel=1e-5) and s.losses[1, 0] != s.origin
    double = model.double()  # T5 normalises in float32: no smaller step
    assert plane_hessian(double, batches, d, loss=kind)[0, 0] == second_difference(double, batches, 0.02, kind)


def test_a_random_loader_is_read_once():
    "The loss does not depend on the moved weight: any difference between points comes from the data."
    collate = lambda rows: {"x": torch.rand(len(rows)) + np.random.rand() + random.random()}
    loader, model = DataLoader(range(20), batch_size=4, shuffle=True, collate_fn=collate), nn.Linear(2, 2)
    s = loss_surface(model, loader, direction(model, 0), alphas=grid(1, 5), loss=lambda model, batch: batch["x"])
    assert np.ptp(s.losses) == 0 and s.origin > 0


def test_nan_and_infinity_are_kept():
    values = {-2.0: float("nan"), -1.0: float("inf"), 0.0: 1.0, 1.0: 2.0, 2.0: float("-inf")}
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    loss = lambda model, batch: batch["x"] * values[round(float(model.weight), 4)]
    s = loss_surface(model, [{"x": torch.ones(2)}], {"weight": torch.ones(1, 1)}, alphas=list(values), loss=loss)
    np.testing.assert_array_equal(s.losses[:, 0], list(values.values()))


def test_bf16_sees_the_weights_of_each_point():
    "Autocast keeps copies of the weights; a copy of the last point would make the line flat."
    model, batches = tiny_bert(), mlm_batches()
    line = lambda: loss_surface(model, batches, direction(model, 0), alphas=grid(1, 5)).losses
    exact = line()
    with torch.autocast("cpu", torch.bfloat16):
        half = line()
    np.testing.assert_allclose(half, exact, rtol=5e-3)
    assert np.ptp(half) > 0.5 * np.ptp(exact) > 0 and not np.array_equal(half, exact)


def test_sequences_with_nothing_to_predict_are_left_out():
    batches, model = mlm_batches(), tiny_bert()
    d, line = direction(model, 0), [0.0, 1.0]
    blank = {k: v[:2].clone() for k, v in batches[0].items()}
    blank["labels"][:] = -100
    padded = [{k: torch.cat([b[k], blank[k]]) for k in b} for b in batches] + [blank]
    for how in ("mean", "batch"):
        whole, more = (loss_surface(model, b, d, alphas=line, reduction=how).losses for b in (batches, padded))
        np.testing.assert_allclose(more, whole, rtol=1e-5)
    np.testing.assert_allclose(plane_hessian(model, padded, d), plane_hessian(model, batches, d), rtol=1e-4)
    with pytest.raises(ValueError, match="batches: no sample came"):
        plane_hessian(model, [blank], d)


def test_a_quadratic_model_has_the_known_curvature():
    model = Quadratic(m=0.3)
    d1, d2 = direction(model, 0, "scale"), direction(model, 1, "scale")
    s = loss_surface(model, XS, d1, d2, alphas=grid(1.5, 9), loss=quadratic_loss)
    D = torch.stack([model.vector(d) for d in (d1, d2)])
    H = (D @ model.A @ D.T).numpy()
    for radius in (0.6, 1.0, 9.0):
        np.testing.assert_allclose(s.curvature(radius), H, rtol=1e-8)
    np.testing.assert_allclose(plane_hessian(model, XS, d1, d2, loss=quadratic_loss), H, rtol=1e-10)
    assert plane_hessian(model, XS, d2, loss=quadratic_loss)[0, 0] == pytest.approx(H[1, 1])
    line = loss_surface(model, XS, d1, alphas=grid(1, 5), loss=quadratic_loss)
    np.testing.assert_allclose(line.curvature(1.1), H[:1, :1], rtol=1e-8)
    s.losses[s.radii > 1] = np.inf
    s.losses[4, 5] = np.nan
    np.testing.assert_allclose(s.curvature(1.2), H, rtol=1e-8)  # what is not finite is left out
    with pytest.raises(ValueError, match="radius: 1 finite points"):
        s.curvature(0.3)


def test_hessian_vector_products_against_finite_differences():
    "A transformer with fused attention, frozen and unused parameters, in double precision."
    model, h = tiny_bert("sdpa").double(), 1e-3
    model.bert.encoder.layer[0].requires_grad_(False)
    batches = mlm_batches(2) + mlm_batches(1, size=1, seed=5)
    first = {n: torch.tensor("layer.0" in n) for n, _ in model.named_parameters()}
    d1, d2 = direction(model, 0), direction(model, 1, "scale", first)
    f = loss_surface(model, batches, d1, d2, alphas=[-h, 0.0, h]).losses / h**2
    with torch.no_grad():
        H = plane_hessian(torch.compile(model), batches, d1, d2)
    cross = (f[2, 2] + f[0, 0] - f[0, 2] - f[2, 0]) / 4
    right = [[f[2, 1] + f[0, 1] - 2 * f[1, 1], cross], [cross, f[1, 2] + f[1, 0] - 2 * f[1, 1]]]
    np.testing.assert_allclose(H, right, rtol=2e-3, atol=1e-5)
    assert plane_hessian(model, batches, d1)[0, 0] == pytest.approx(H[0, 0], rel=1e-9)
    half = plane_hessian(model.bfloat16(), batches, d1)[0, 0]
    assert half == pytest.approx(H[0, 0], rel=0.1)


def test_expected_curvature_is_the_mean_over_directions():
    model, params = Quadratic(), dict(Quadratic().named_parameters())
    parts = zip(params, model.A.diagonal().split([12, 8, 5]))
    H = {n: h.view(params[n].shape) for n, h in parts}
    mask = {"w": torch.arange(12).view(3, 4) % 3 > 0, "b": torch.tensor(True)}
    for one_d, m in (("zero", None), ("scale", None), ("scale", mask)):
        D = torch.stack([model.vector(direction(model, seed, one_d, m)) for seed in range(1500)])
        values = torch.einsum("si,ij,sj->s", D, model.A, D)
        error = float(values.std() / 1500**0.5)
        assert expected_curvature(model, H, m, one_d) == pytest.approx(float(values.mean()), abs=4 * error)
    rest = {"w": ~mask["w"], "v": torch.tensor(True)}
    whole, *parts = (expected_curvature(model, H, m, "scale") for m in (None, mask, rest))
    assert whole == pytest.approx(sum(parts))


@given(st.floats(1e-3, 1e3), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_a_grid_is_symmetric_and_holds_the_origin(span, half):
    x = grid(span, 2 * half + 1)
    assert len(x) == 2 * half + 1 and x[half] == 0 and np.array_equal(x, -x[::-1])
    assert (half == 0 or x[-1] == span) and (np.diff(x) > 0).all()


@pytest.mark.parametrize("reach", [0.15, 1.5, 10.0])
def test_rings_grow_with_the_grid(reach):
    alphas, usual = np.linspace(-reach, reach, 13), np.linspace(-1.5, 1.5, 13)
    radii = np.hypot(alphas[:, None], alphas[None])
    rings, same = (Surface(radii**2, x, x).radius_profile() for x in (alphas, usual))
    assert rings.points.sum() == radii.size and rings.points.tolist() == same.points.tolist()
    assert rings["from"].tolist() == pytest.approx([e * reach / 1.5 for e in RINGS[:-1]])


def test_panels_share_one_scale():
    x = grid(1, 5)
    low, high = (Surface(c * np.hypot(x[:, None], x[None]) ** 2, x, x) for c in (1.0, 7.0))
    low.losses[0, 0], high.losses[4, 4] = np.nan, np.inf
    both = {"low": low, "high": high}
    fig = plot(both, label="nats")
    panels = {ax.get_title(): ax.collections[0].get_clim() for ax in fig.axes if ax.get_title()}
    assert panels == {"low": pytest.approx((0, 14)), "high": panels["low"]}
    assert any("nats" in ax.get_ylabel() for ax in fig.axes)
    lines = {name: Surface(s.losses[:, 2:3], x, np.zeros(1)) for name, s in both.items()}
    ax = plot(lines, top=8.0).axes[0]
    assert {t.get_text() for t in ax.get_legend().get_texts()} == set(lines) and ax.get_ylim()[1] == 8
    matplotlib.pyplot.close("all")


# ---- bad input

MODEL = Quadratic()
SCORES = {n: torch.rand(p.shape) for n, p in MODEL.named_parameters()}


def line(d=None, batches=XS, alphas=(0.0,), loss=quadratic_loss, **options):
    return loss_surface(MODEL, batches, direction(MODEL, 0) if d is None else d, alphas=alphas, loss=loss, **options)


REFUSED = {
    "one_d: 'ones'": lambda: direction(MODEL, 0, "ones"),
    "norm: 'layer'": lambda: direction(MODEL, 0, norm="layer"),
    "mask: the model has no parameter 'x'": lambda: direction(MODEL, 0, mask={"x": torch.tensor(True)}),
    "mask: w has shape": lambda: direction(MODEL, 0, mask={"w": torch.ones(4, 3, dtype=torch.bool)}),
    "mask: need booleans": lambda: direction(MODEL, 0, mask={"w": torch.ones(3, 4)}),
    "moves nothing": lambda: direction(MODEL, 0, mask={"b": torch.tensor(True)}),
    "share: 0 ": lambda: subset(MODEL, SCORES, 0),
    "which: 'best'": lambda: subset(MODEL, SCORES, 0.5, "best"),
    "by: 'layer'": lambda: subset(MODEL, SCORES, 0.5, by="layer"),
    "scores: b is missing": lambda: subset(MODEL, {n: SCORES[n] for n in "wv"}, 0.5),
    "scores: need tensors by parameter name": lambda: subset(MODEL, None, 0.5),
    "scores: w .* NaN": lambda: subset(MODEL, SCORES | {"w": SCORES["w"] * float("nan")}, 0.5),
    "batches: no sample came": lambda: line(batches=[]),
    "loss: 'nll' is unknown": lambda: line(loss="nll", batches=mlm_batches()),
    "reduction: 'tokens' is unknown": lambda: plane_hessian(tiny_bert(), mlm_batches(), reduction="tokens"),
    "alphas: .* hold 0": lambda: line(alphas=np.linspace(-1.5, 1.5, 16)),
    "alphas: .* increase": lambda: line(alphas=[0.0, 0.0]),
    "d1: w has shape": lambda: line({"w": torch.ones(4, 3)}),
    "n: 16 points do not hold the origin": lambda: grid(1.5, 16),
}


@pytest.mark.parametrize("match", REFUSED)
def test_bad_input_is_named(match):
    with pytest.raises(ValueError, match=match):
        REFUSED[match]()
