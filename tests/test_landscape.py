"""The loss landscape: directions, subsets, a walk that leaves no trace, surfaces, resuming, curvature, plots."""

import json
import random
import signal

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from isoreg.corpus import TextBatches, sample_losses
from isoreg.landscape import (
    RINGS,
    Surface,
    direction,
    displaced,
    expected_curvature,
    grid,
    loss_surface,
    plane_hessian,
    plot,
    subset,
)
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer

matplotlib.use("Agg")


# ---- models ----------------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    "Loss 1/2 (t - m)^T A (t - m) + x g^T t of sample x, t all parameters in one vector; A is symmetric."

    def __init__(self, seed=0, m=0.0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
        self.w, self.v, self.b = (nn.Parameter(draw(*s)) for s in ((3, 4), (2, 2, 2), (5,)))
        B = draw(25, 25)
        self.A, self.g, self.m = B @ B.T / 25, draw(25), m

    def vector(self, d=None):
        tensors = dict(self.named_parameters()) if d is None else d
        return torch.cat([tensors.get(n, torch.zeros_like(p)).flatten() for n, p in self.named_parameters()])

    def loss(self, batch):
        t = self.vector() - self.m
        return 0.5 * t @ self.A @ t + batch["x"] * (self.g @ t)


def quadratic_loss(model, batch):
    return model.loss(batch)


XS = [
    {"x": torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)},
    {"x": torch.tensor([3.0], dtype=torch.float64)},
]  # mean 0.5 over 4 samples


def tiny_bert(seed=0, **kw):
    torch.manual_seed(seed)
    kw = (
        dict(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
        )
        | kw
    )
    return BertForMaskedLM(BertConfig(**kw)).eval()


def mlm_batches(n=2, size=3, length=9, seed=0):
    g, out = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        ids = torch.randint(5, 60, (size, length), generator=g)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=g) > 0.3, -100)
        labels[:, 1] = ids[:, 1]
        out.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return out


def state(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


def same_bits(a, b):
    "NaN equals NaN, 0 differs from -0."
    as_bytes = lambda t: t.reshape(-1).view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def untouched(model, before):
    return all(same_bits(t, before[n]) for n, t in model.state_dict().items())


def along(model, batches, d, alphas=None, loss="mlm", **options):
    "The loss on a line."
    return loss_surface(model, batches, d, None, alphas, None, loss, **options)


# ---- directions ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.sampled_from(["zero", "scale"]))
@settings(max_examples=20, deadline=None)
def test_filters_have_the_length_of_the_weights(seed, one_d):
    model = Quadratic()
    d = direction(model, seed, one_d)
    for n, w in (("w", model.w), ("v", model.v)):
        for row, filter in zip(d[n], w):
            torch.testing.assert_close(row.norm(), filter.norm(), rtol=1e-8, atol=0)
    assert ("b" in d) == (one_d == "scale")
    if one_d == "scale":
        torch.testing.assert_close(d["b"].norm(), model.b.detach().norm(), rtol=1e-8, atol=0)
    assert d.info["length"] == pytest.approx(model.vector(d).norm().item())


def test_normal_before_it_is_normalised():
    "Entries of one long filter: mean 0, fourth moment 3, independent of those of another seed, name or shape."
    model = nn.Sequential(nn.Linear(200_000, 1, bias=False), nn.Linear(200_000, 1, bias=False))
    a, b, c = (
        direction(model, seed)[name].double() for seed, name in ((0, "0.weight"), (1, "0.weight"), (0, "1.weight"))
    )
    z = a / a.square().mean().sqrt()
    assert abs(z.mean()) < 0.01 and z.pow(4).mean().item() == pytest.approx(3, abs=0.1)
    for other in (b, c):
        assert abs((a * other).sum() / a.norm() / other.norm()) < 0.01


def test_a_direction_depends_on_seed_and_name_alone():
    model, other = tiny_bert(), tiny_bert()
    torch.manual_seed(123)
    first = direction(model, 4)
    torch.manual_seed(321)
    mask = {"bert.embeddings.word_embeddings.weight": torch.tensor(True)}
    alone = direction(other, 4, mask=mask)
    assert list(alone) == list(mask) and torch.equal(alone[list(mask)[0]], first[list(mask)[0]])
    assert not torch.equal(direction(model, 5)[list(mask)[0]], first[list(mask)[0]])
    assert "cls.predictions.decoder.weight" not in first and len(first) == sum(
        p.ndim > 1 for p in model.parameters()
    )  # tied: once


@pytest.mark.parametrize("one_d", ["zero", "scale"])
def test_mask_and_equal_norm(one_d):
    model = Quadratic()
    whole = direction(model, 1, one_d)
    mask = {
        "w": torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5,
        "v": torch.tensor(False),
        "b": torch.tensor(True),
    }
    part, equal = direction(model, 1, one_d, mask), direction(model, 1, one_d, mask, norm="equal")
    torch.testing.assert_close(part["w"], whole["w"] * mask["w"])
    assert "v" not in part and ("b" in part) == (one_d == "scale")
    assert equal.length() == pytest.approx(whole.length(), rel=1e-9) and part.length() < whole.length()
    torch.testing.assert_close(equal["w"], part["w"] * (whole.length() / part.length()))
    rest = direction(model, 1, one_d, {n: ~m for n, m in mask.items()})
    for n in whole:
        torch.testing.assert_close(part.get(n, 0) + rest.get(n, 0), whole[n])  # two subsets cut a step in two
    moved = int(mask["w"].sum()) + (5 if one_d == "scale" else 0)
    assert part.info["moved"] == pytest.approx(moved / 25)


@pytest.mark.parametrize("mask", [None, {"w": torch.arange(12).view(3, 4) % 2 == 0, "v": torch.tensor(True)}])
def test_orthogonal_and_still_filter_normalised(mask):
    model = Quadratic()
    a = direction(model, 0, mask=mask)
    whole = direction(model, 1, orthogonal_to=a)
    b = direction(model, 1, mask=mask, orthogonal_to=a)
    for n in a:
        torch.testing.assert_close(
            (a[n] * b[n]).flatten(1).sum(1), torch.zeros(len(a[n]), dtype=torch.float64), atol=1e-12, rtol=0
        )
    for row, w in zip(whole["w"], model.w):
        torch.testing.assert_close(row.norm(), w.norm(), rtol=1e-8, atol=0)


def test_zero_filters_and_filters_of_one_entry():
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(1, 4))
    d = direction(model, 0)
    assert not d["0.weight"][0].any() and d["0.weight"][1:].any()
    torch.testing.assert_close(d["1.weight"].abs(), model[1].weight.detach().abs())
    assert "1.weight" not in direction(model, 1, orthogonal_to=d)


# ---- subsets ---------------------------------------------------------------------------------------------------------


def flat(masks):
    return torch.cat([m.flatten() for m in masks.values()])


@given(st.integers(0, 10**6), st.floats(0.01, 1), st.sampled_from(["top", "bottom"]), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_scalars_against_a_sort(seed, share, which, levels):
    "The chosen scores are the largest (smallest) ones and exactly as many as asked for, with many ties too."
    model, g = Quadratic(), torch.Generator().manual_seed(seed)
    scores = {n: torch.randint(0, levels, p.shape, generator=g).float() for n, p in model.named_parameters()}
    chosen, values = flat(subset(model, scores, share, which, seed=seed)), flat(scores)
    k = max(1, round(share * 25))
    assert int(chosen.sum()) == k
    np.testing.assert_array_equal(
        values[chosen].sort().values, values.sort(descending=which == "top").values[:k].sort().values
    )


def test_ties_are_drawn_over_all_tensors():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    scores = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    masks = subset(model, scores, 0.5, "bottom", seed=1)
    assert [abs(int(m.sum()) - 5000) < 300 for m in masks.values()] == [True, True] and int(flat(masks).sum()) == 10_000
    assert not torch.equal(flat(masks), flat(subset(model, scores, 0.5, "bottom", seed=2)))


@pytest.mark.parametrize("per_scalar", [True, False])
def test_tensors_against_the_released_ranks(per_scalar):
    model = tiny_bert()
    g = torch.Generator().manual_seed(0)
    scores = {n: torch.rand(p.shape, generator=g) * torch.rand((), generator=g) for n, p in model.named_parameters()}
    order = sorted(scores, key=lambda n: scores[n].double().mean())
    given = scores if per_scalar else {n: float(s.mean()) for n, s in scores.items()}
    top, bottom = (subset(model, given, 0.5, which, by="tensor") for which in ("top", "bottom"))
    n = len(order)
    assert {k for k, m in top.items() if m.all()} == set(order[n // 2 :]) and {
        k for k, m in bottom.items() if m.all()
    } == set(order[: n // 2])
    for k, p in model.named_parameters():
        assert top[k].shape == p.shape and top[k].dtype == torch.bool and bool(top[k].any()) == bool(top[k].all())


@pytest.mark.parametrize("reach", [0.15, 1.5, 10.0])
def test_rings_grow_with_the_grid(reach):
    alphas = np.linspace(-reach, reach, 13)
    radii = np.hypot(alphas[:, None], alphas[None])
    rings = Surface(radii**2, alphas, alphas).radius_profile()
    assert rings.points.sum() == radii.size and rings["from"].tolist() == pytest.approx(
        [e * reach / 1.5 for e in RINGS[:-1]]
    )
    usual = 1.5 / reach * alphas
    assert rings.points.tolist() == Surface(radii, usual, usual).radius_profile().points.tolist()


def test_scalars_are_ranked_in_the_precision_of_their_scores():
    scores = {
        "weight": torch.tensor([[1, 1 + 1e-9], [1 + 3e-9, 1 + 2e-9]], dtype=torch.float64),
        "bias": torch.zeros(2),
    }
    for seed in range(3):
        chosen = subset(nn.Linear(2, 2).double(), scores, 1 / 6, seed=seed)
        assert chosen["weight"].tolist() == [[False, False], [True, False]] and not chosen["bias"].any()


def of_first_output(model, batch):
    return model(batch["x"])[:, 0]


@pytest.mark.parametrize("by", ["scalar", "tensor"])
def test_random_subsets_are_seeded(by):
    model = tiny_bert()
    a, b, c = (subset(model, None, 0.3, "random", by, seed) for seed in (0, 0, 1))
    count = (lambda m: int(flat(m).sum())) if by == "scalar" else (lambda m: sum(bool(x.any()) for x in m.values()))
    whole = sum(p.numel() if by == "scalar" else 1 for p in model.parameters())
    assert (
        count(a) == count(c) == round(0.3 * whole)
        and torch.equal(flat(a), flat(b))
        and not torch.equal(flat(a), flat(c))
    )
    if by == "scalar":
        assert all(0.1 < m.float().mean() < 0.5 for m in a.values() if m.numel() > 200)


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_a_random_subset_knows_nothing_of_the_direction_of_its_seed(share):
    "A share of the scalars chosen at random has that share of a direction's squared length, for equal seeds too."
    model = tiny_bert()
    parts = [
        (
            direction(model, s, "scale", mask=subset(model, None, share, "random", seed=s)).length()
            / direction(model, s, "scale").length()
        )
        ** 2
        for s in range(5)
    ]
    assert np.mean(parts) == pytest.approx(share, rel=0.15)


# ---- the walk --------------------------------------------------------------------------------------------------------


def test_places_are_where_they_should_be():
    model = Quadratic()
    start, d1, d2 = model.vector().detach(), direction(model, 0), direction(model, 1, "scale")
    with displaced(model, d1, d2) as place:
        for a, b in ((0.5, 0.0), (0.5, -1.0), (0.0, 2.0), (0.5, -1.0), (0.0, 0.0)):
            place(a, b)
            torch.testing.assert_close(
                model.vector().detach(), start + a * model.vector(d1) + b * model.vector(d2), rtol=1e-12, atol=1e-12
            )
    assert torch.equal(model.vector().detach(), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_bit_for_bit_in_every_dtype(dtype):
    model = tiny_bert().to(dtype)
    with torch.no_grad():
        model.cls.predictions.bias[:3] = torch.tensor([float("nan"), -0.0, 0.0])
    before, d1, d2 = state(model), direction(model, 0), direction(model, 1)
    with displaced(model, d1, d2) as place:
        for a, b in ((1.3, -0.7), (1.3, 0.1), (0.0, 0.0)):
            place(a, b)
        assert untouched(model, before)
        place(0.9, 0.3)
        w = "bert.embeddings.word_embeddings.weight"
        expected, rtol = before[w].float() + 0.9 * d1[w] + 0.3 * d2[w], 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(model.get_parameter(w).float(), expected, rtol=rtol, atol=1e-6)
        assert not untouched(model, before)
    assert untouched(model, before)


def test_nothing_else_of_the_model_changes():
    model, batches = tiny_bert(), mlm_batches()
    model.train()
    model.bert.pooler = None
    model.bert.embeddings.eval()
    model.bert.encoder.requires_grad_(False)
    sample_losses(model, batches[0]).sum().backward()
    before, grads = state(model), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    modes, needs, objects = (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [id(p) for p in model.parameters()],
    )
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    expected = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    d1, d2 = direction(model, 0), direction(model, 1)
    loss_surface(model, batches, d1, d2, [0.0, 1.0])
    plane_hessian(model, batches, d1, d2)
    assert (
        torch.equal(torch.rand(3), expected[0])
        and np.array_equal(np.random.rand(3), expected[1])
        and random.random() == expected[2]
    )
    assert untouched(model, before) and [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == needs and [id(p) for p in model.parameters()] == objects
    for n, p in model.named_parameters():
        assert (p.grad is None) == (grads[n] is None) and (p.grad is None or torch.equal(p.grad, grads[n]))


def test_between_forward_and_backward():
    "A graph built before the walk can still be differentiated after it."
    model, batches = tiny_bert(), mlm_batches()
    a = torch.autograd.grad(sample_losses(model, batches[0]).sum(), model.cls.predictions.transform.dense.weight)[0]
    loss = sample_losses(model, batches[0]).sum()
    along(model, batches, direction(model, 0), [0.0, 1.0])
    torch.testing.assert_close(torch.autograd.grad(loss, model.cls.predictions.transform.dense.weight)[0], a)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("after", [1, 4])
def test_restored_after_an_error_in_the_loss(error, after):
    model, calls = tiny_bert(), []
    before, handler = state(model), signal.getsignal(signal.SIGINT)

    def loss(model, batch):
        calls.append(1)
        if len(calls) > after:
            raise error("now")
        return sample_losses(model, batch)

    with pytest.raises(error, match="now"):
        loss_surface(model, mlm_batches(), direction(model, 0), direction(model, 1), grid(1, 3), loss=loss)
    assert untouched(model, before) and not model.training and signal.getsignal(signal.SIGINT) is handler


def test_buffers_are_put_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = state(model)

    def loss(model, batch):
        model.train()
        return model(batch["x"]).square().sum(1)

    along(model, [{"x": torch.randn(8, 3)}], direction(model, 0), grid(1, 3), loss=loss)
    assert untouched(model, before)


# ---- lines and surfaces ----------------------------------------------------------------------------------------------


def test_every_point_against_a_loop():
    "Each loss is the mean over samples, not batches, of the model with its weights replaced."
    model, batches = tiny_bert(), mlm_batches(2) + mlm_batches(1, size=1, seed=3)
    d1, d2 = direction(model, 0), direction(model, 1, "scale")
    s = loss_surface(model, batches, d1, d2, [-0.4, 0.0, 0.3], [0.0, 0.2])
    params = {n: p.detach() for n, p in model.named_parameters()}
    for i, a in enumerate(s.alphas):
        for j, b in enumerate(s.betas):
            moved = {n: p + float(a) * d1.get(n, 0) + float(b) * d2.get(n, 0) for n, p in params.items()}
            losses = []
            for batch in batches:
                logits = functional_call(
                    model, moved, (), {k: v for k, v in batch.items() if k != "labels"}, tie_weights=True
                ).logits
                losses += [nn.functional.cross_entropy(x, y).item() for x, y in zip(logits, batch["labels"])]
            assert s.losses[i, j] == pytest.approx(np.mean(losses), rel=2e-5)
    assert (
        s.info["n_samples"] == 7 and s.origin == s.losses[1, 0] and [d["seed"] for d in s.info["directions"]] == [0, 1]
    )
    assert (s.info["loss"], s.info["precision"], s.info["directions"][1]["one_d"]) == (
        "mlm",
        "fp32",
        "scale",
    ) and s.info["model"] == "BertForMaskedLM"
    line = along(model, batches, d1, [-0.4, 0.0, 0.3])
    np.testing.assert_allclose(line.losses, s.losses[:, :1], rtol=1e-12)
    assert line.is_line and not s.is_line


def test_the_mean_as_released_against_a_loop():
    """The model's own loss of each batch, over its predicted tokens, and the mean of these over samples, as
    Trainer.evaluate has it."""
    model, batches = tiny_bert(), mlm_batches(2) + mlm_batches(1, size=1, seed=3)
    for b, n in zip(batches, (7, 2, 4)):
        b["labels"][0, n:] = -100  # samples that predict different numbers of tokens
    d = direction(model, 0)
    s = along(model, batches, d, [0.0, 0.3], reduction="batch")
    params, sizes = {n: p.detach() for n, p in model.named_parameters()}, [len(b["labels"]) for b in batches]
    for i, a in enumerate(s.alphas):
        moved = {n: p + float(a) * d.get(n, 0) for n, p in params.items()}
        losses = [functional_call(model, moved, (), b, tie_weights=True).loss.item() for b in batches]
        assert s.losses[i, 0] == pytest.approx(np.average(losses, weights=sizes), rel=2e-5)
    ours = along(model, batches, d, [0.0, 0.3])
    assert abs(ours.losses - s.losses).min() > 1e-3 and s.info["reduction"] == "batch" and s.info["n_samples"] == 7
    one = [{k: v[i : i + 1] for k, v in b.items()} for b in batches for i in range(len(b["labels"]))]
    np.testing.assert_allclose(
        along(model, one, d, [0.0, 0.3], reduction="batch").losses, ours.losses, rtol=1e-6
    )  # one a batch
    double, h = model.double(), 0.01
    f = along(double, batches, direction(double, 0), h * np.arange(-2, 3), reduction="batch").losses[:, 0]
    H = plane_hessian(double, batches, direction(double, 0), reduction="batch")
    assert H[0, 0] == pytest.approx(f @ [-1, 16, -30, 16, -1] / 12 / h**2, rel=1e-4)


@pytest.mark.parametrize("kind", ["clm", "seq2seq"])
def test_other_losses(kind):
    torch.manual_seed(0)
    if kind == "clm":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=20))
    else:
        sizes = dict(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        model = T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0))
    ids = torch.randint(5, 60, (3, 9))
    batches, d = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}], direction(model, 0)
    s = along(model, batches, d, [0.0, 0.5], kind)
    model.eval()
    with torch.no_grad():
        expected = model(**batches[0]).loss.item()  # all samples have equally many tokens
    assert s.origin == pytest.approx(expected, rel=1e-5) and s.losses[1, 0] != s.origin
    h, double = 0.02, model.double()  # T5 normalises in float32: no smaller step
    f = along(double, batches, direction(double, 0), h * np.arange(-2, 3), kind).losses[:, 0]
    assert plane_hessian(double, batches, direction(double, 0), loss=kind)[0, 0] == pytest.approx(
        f @ [-1, 16, -30, 16, -1] / 12 / h**2, rel=5e-3
    )


def test_all_points_of_a_corpus_see_the_same_masks():
    model = AutoModelForMaskedLM.from_pretrained(toy_model_path())
    corpus = TextBatches(toy_corpus(10), toy_tokenizer(), batch_size=4, seed=3)
    s = along(model, corpus, direction(model, 0), [0.0, 1e-9, 2e-9])
    assert np.ptp(s.losses) < 1e-5 < s.origin and s.info["n_samples"] == 10
    with pytest.raises(ValueError, match="loss: 'clm', but the batches were made for 'mlm'"):
        along(model, corpus, direction(model, 0), [0.0], "clm")


class Nowhere(nn.Module):
    "The loss does not depend on the moved weight: any difference between points comes from the data."

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("own", [None, "loader"])
def test_random_loaders_and_losses_draw_the_same_at_every_point(own):
    g = torch.Generator().manual_seed(3) if own else None

    def collate(rows):
        x = torch.tensor(rows, dtype=torch.float32)
        return {"x": x * (torch.rand(x.shape) < 0.5) + np.random.rand() + random.random()}

    loader = DataLoader(list(range(20)), batch_size=4, shuffle=True, drop_last=True, collate_fn=collate, generator=g)
    loss = lambda model, batch: batch["x"] * torch.rand(4)
    losses = along(Nowhere(), loader, direction(Nowhere(), 0), grid(1, 5), loss).losses
    assert np.ptp(losses) == 0 and losses[0, 0] > 0


def test_nan_and_infinity_are_kept():
    model = Nowhere()
    values = {-2.0: float("nan"), -1.0: float("inf"), 0.0: 1.0, 1.0: 2.0, 2.0: float("-inf")}

    def loss(model, batch, values=values):
        return batch["x"] * values[round(float(model.w[0, 0].detach()) - 1, 4)]

    s = along(model, [{"x": torch.ones(2)}], {"w": torch.ones(2, 2)}, list(values), loss)
    np.testing.assert_array_equal(s.losses[:, 0], list(values.values()))
    assert torch.equal(model.w, torch.ones(2, 2))
    back = Surface.from_dict(json.loads(json.dumps(s.to_dict(), allow_nan=False)))
    assert back.losses.tobytes() == s.losses.tobytes() and back.info == s.info


@pytest.mark.parametrize("surrounding", [False, True])
def test_bf16_sees_the_weights_of_each_point(surrounding):
    "Autocast keeps copies of the weights; a copy of the last point would make the line flat."
    model, batches = tiny_bert(), mlm_batches()
    exact = along(model, batches, direction(model, 0), grid(1, 5)).losses
    with torch.autocast("cpu", torch.bfloat16, enabled=surrounding):
        half = along(model, batches, direction(model, 0), grid(1, 5), precision="bf16").losses
        full = along(model, batches, direction(model, 0), grid(1, 5)).losses
    np.testing.assert_allclose(half, exact, rtol=5e-3)
    np.testing.assert_array_equal(full, exact)
    assert np.ptp(half) > 0.5 * np.ptp(exact) > 0 and not np.array_equal(half, exact)


# ---- curvature -------------------------------------------------------------------------------------------------------


def test_a_quadratic_model_has_the_known_curvature():
    model = Quadratic(m=0.3)
    d1, d2 = direction(model, 0, "scale"), direction(model, 1, "scale")
    s = loss_surface(model, XS, d1, d2, grid(1.5, 9), loss=quadratic_loss)
    D = torch.stack([model.vector(d) for d in (d1, d2)])
    H = (D @ model.A @ D.T).numpy()
    slope = (D @ (model.A @ (model.vector() - 0.3) + 0.5 * model.g)).detach().numpy()
    for radius in (0.6, 1.0, 9.0):
        c = s.curvature(radius)
        np.testing.assert_allclose(c.hessian, H, rtol=1e-8)
        np.testing.assert_allclose(c.gradient, slope, rtol=1e-8)
        assert c.loss == pytest.approx(s.origin) and c.residual < 1e-9 and c.points == (s.radii < radius).sum()
    np.testing.assert_allclose(plane_hessian(model, XS, d1, d2, loss=quadratic_loss), H, rtol=1e-10)
    assert plane_hessian(model, XS, d2, loss=quadratic_loss)[0, 0] == pytest.approx(H[1, 1])
    line = along(model, XS, d1, grid(1, 5), quadratic_loss).curvature(1.1)
    np.testing.assert_allclose(line.hessian, H[:1, :1], rtol=1e-8)
    s.losses[s.radii > 1] = np.inf
    s.losses[4, 5] = np.nan
    np.testing.assert_allclose(s.curvature(1.2).hessian, H, rtol=1e-8)  # what is not finite is left out
    with pytest.raises(ValueError, match="radius: 1 finite points"):
        s.curvature(0.3)


def test_hessian_vector_products_against_finite_differences():
    "A transformer with fused attention, frozen and unused parameters, in double precision."
    model = tiny_bert(attn_implementation="sdpa").double()
    model.bert.encoder.layer[0].requires_grad_(False)
    batches, h = mlm_batches(2) + mlm_batches(1, size=1, seed=5), 1e-3
    d1, d2 = (
        direction(model, 0),
        direction(model, 1, "scale", {n: torch.tensor("layer.0" in n) for n, _ in model.named_parameters()}),
    )
    f = loss_surface(model, batches, d1, d2, [-h, 0.0, h]).losses
    H = plane_hessian(model, batches, d1, d2)
    expected = [
        [f[2, 1] + f[0, 1] - 2 * f[1, 1], (f[2, 2] + f[0, 0] - f[0, 2] - f[2, 0]) / 4],
        [0, f[1, 2] + f[1, 0] - 2 * f[1, 1]],
    ]
    np.testing.assert_allclose(
        H[[0, 0, 1], [0, 1, 1]], np.array(expected)[[0, 0, 1], [0, 1, 1]] / h**2, rtol=2e-3, atol=1e-5
    )
    np.testing.assert_array_equal(H, H.T)
    assert plane_hessian(model, batches, d1)[0, 0] == pytest.approx(H[0, 0], rel=1e-9)
    half = plane_hessian(model.bfloat16(), batches, d1)[0, 0]
    assert half == pytest.approx(H[0, 0], rel=0.1)


def test_a_linear_loss_has_no_curvature():
    model = Quadratic()
    linear = lambda model, batch: batch["x"] * model.w.sum()
    assert plane_hessian(model, XS, direction(model, 0), loss=linear)[0, 0] == 0
    assert plane_hessian(model, XS, direction(model, 0), loss=lambda model, batch: batch["x"])[0, 0] == 0


def test_expected_curvature_is_the_mean_over_directions():
    model = Quadratic()
    H = dict(zip(("w", "v", "b"), model.A.diagonal().split([12, 8, 5])))
    H = {n: H[n].view(p.shape) for n, p in model.named_parameters()}
    mask = {"w": torch.arange(12).view(3, 4) % 3 > 0, "b": torch.tensor(True)}
    for one_d, m in (("zero", None), ("scale", None), ("scale", mask)):
        D = torch.stack([model.vector(direction(model, seed, one_d, m)) for seed in range(1500)])
        values = torch.einsum("si,ij,sj->s", D, model.A, D)
        assert expected_curvature(model, H, m, one_d) == pytest.approx(
            values.mean().item(), abs=4 * (values.std() / 1500**0.5).item()
        )
    parts = [expected_curvature(model, H, m, "scale") for m in (None, mask, {"w": ~mask["w"], "v": torch.tensor(True)})]
    assert parts[0] == pytest.approx(parts[1] + parts[2])


# ---- summaries and pictures ------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_a_grid_is_symmetric_and_holds_the_origin(span, half):
    x = grid(span, 2 * half + 1)
    assert (
        len(x) == 2 * half + 1
        and x[half] == 0
        and np.array_equal(x, -x[::-1])
        and (half == 0 or x[-1] == span)
        and (np.diff(x) > 0).all()
    )


def surfaces():
    x = grid(1, 5)
    low, high = (Surface(c * np.hypot(x[:, None], x[None]) ** 2, x, x) for c in (1.0, 7.0))
    low.losses[0, 0], high.losses[4, 4] = np.nan, np.inf
    return {"low": low, "high": high}


def test_panels_share_one_scale():
    fig = plot(surfaces(), "contour", label="nats")
    panels = [ax for ax in fig.axes if ax.get_title()]
    assert [ax.get_title() for ax in panels] == ["low", "high"] and len(
        {ax.collections[0].get_clim() for ax in panels}
    ) == 1
    assert panels[0].collections[0].get_clim() == pytest.approx((0, 14))
    assert any("nats" in ax.get_ylabel() for ax in fig.axes)
    for kind, top in (("lines", 8.0), ("radius", None)):
        ax = plot(surfaces(), kind, top=top).axes[0]
        assert (
            {t.get_text() for t in ax.get_legend().get_texts()} == {"low", "high"}
            and ax.get_xlabel()
            and ax.get_ylabel()
        )
    line = Surface(np.arange(3.0)[:, None], grid(1, 3), np.zeros(1))
    assert plot(line, "lines").axes[0].get_legend() is None
    matplotlib.pyplot.close("all")


# ---- bad input -------------------------------------------------------------------------------------------------------


def model():
    return Quadratic()


def scores(**change):
    return {n: torch.rand(p.shape) for n, p in model().named_parameters()} | change


def line(**kw):
    return along(**dict(model=model(), batches=XS, d=direction(model(), 0), alphas=[0.0], loss=quadratic_loss) | kw)


BAD = {
    "seed: 1.5": lambda: direction(model(), 1.5),
    "one_d: 'ones'": lambda: direction(model(), 0, "ones"),
    "norm: 'layer'": lambda: direction(model(), 0, norm="layer"),
    "mask: the model has no parameter 'x'": lambda: direction(model(), 0, mask={"x": torch.tensor(True)}),
    "mask: w has shape": lambda: direction(model(), 0, mask={"w": torch.ones(4, 3, dtype=torch.bool)}),
    "mask: w has dtype": lambda: direction(model(), 0, mask={"w": torch.ones(3, 4)}),
    "moves nothing": lambda: direction(model(), 0, mask={"b": torch.tensor(True)}),
    "orthogonal_to: the model has no": lambda: direction(model(), 0, orthogonal_to={"x": torch.ones(1)}),
    "share: 0 ": lambda: subset(model(), scores(), 0),
    "which: 'best'": lambda: subset(model(), scores(), 0.5, "best"),
    "by: 'layer'": lambda: subset(model(), scores(), 0.5, by="layer"),
    "scores: None": lambda: subset(model(), None, 0.5),
    "scores: b is missing": lambda: subset(model(), {n: s for n, s in scores().items() if n != "b"}, 0.5),
    "scores: w holds NaN": lambda: subset(model(), scores(w=torch.full((3, 4), float("nan"))), 0.5),
    "batches: none came": lambda: line(batches=[]),
    "loss: 'nll' is unknown": lambda: line(loss="nll"),
    "loss: returned other": lambda: line(loss=lambda m, b: m.w.sum()),
    "precision: 'fp16'": lambda: line(precision="fp16"),
    "reduction: 'tokens' is unknown": lambda: line(reduction="tokens"),
    "reduction: 'batch' is unknown": lambda: line(reduction="batch"),
    "alphas: .* hold 0": lambda: line(alphas=np.linspace(-1.5, 1.5, 16)),
    "alphas: .* increase": lambda: line(alphas=[0.0, 0.0]),
    "betas: .* hold 0": lambda: loss_surface(
        model(), XS, direction(model(), 0), direction(model(), 1), [0.0], [1.0], quadratic_loss
    ),
    "d1: w has shape": lambda: line(d={"w": torch.ones(4, 3)}),
    "n: 16 points do not hold the origin": lambda: grid(1.5, 16),
    "span: -1": lambda: grid(-1),
    "kind: 'pie'": lambda: plot({}, "pie"),
}


@pytest.mark.parametrize("match", BAD)
def test_bad_input_is_named(match):
    with pytest.raises(ValueError, match=match):
        BAD[match]()


def test_sequences_with_nothing_to_predict_are_left_out():
    batches, model = mlm_batches(), tiny_bert()
    d = direction(model, 0)
    whole, hessian = along(model, batches, d, [0.0, 1.0]), plane_hessian(model, batches, d)
    blank = {k: v[:2].clone() for k, v in batches[0].items()}
    blank["labels"][:] = -100
    padded = [{k: torch.cat([b[k], blank[k]]) for k in b} for b in batches] + [blank]
    more = along(model, padded, d, [0.0, 1.0])
    np.testing.assert_allclose(more.losses, whole.losses, rtol=1e-5)
    assert more.info["n_samples"] == whole.info["n_samples"] == 6
    np.testing.assert_allclose(plane_hessian(model, padded, d), hessian, rtol=1e-4)
    by_batch = [along(model, b, d, [0.0], reduction="batch").origin for b in (batches, [*batches, blank])]
    assert by_batch[0] == by_batch[1]
    with pytest.raises(ValueError, match="batches: none came"):
        along(model, [blank], d)


def test_without_a_second_direction_the_surface_is_a_line():
    plain = loss_surface(model(), XS, direction(model(), 0), None, [0.0, 1.0], loss=quadratic_loss)
    np.testing.assert_array_equal(plain.losses, line(alphas=[0.0, 1.0]).losses)
    assert plain.is_line and list(plain.betas) == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_direction_does_not_depend_on_the_usual_dtype(dtype):
    model = tiny_bert()
    before = direction(model, 3)
    torch.set_default_dtype(dtype)
    try:
        after = direction(model, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
