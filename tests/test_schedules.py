"""Scores of tensors become scores of sites, schedules are equations 9 and 10, controls keep what they do not test."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import IDS, make, rates, scores_of
from torch import nn

from isoreg.fisher import FisherEstimate, empirical_fisher
from isoreg.noise import apply_dropout, save_schedule, set_dropout
from isoreg.schedules import AGGREGATES, CONTROLS, control_schedule, guided_schedule, released_schedule, site_scores
from isoreg.sites import Site, dropout_sites


def test_site_scores_against_a_loop():
    model = make()
    scores, sites = scores_of(model), dropout_sites(model)
    parameters = dict(model.named_parameters())
    got = {a: site_scores(model, scores, a) for a in AGGREGATES}
    for s in (s for s in sites if s.kind != "classifier"):
        f = [scores["bert." + t] for t in s.tensors]
        entries = torch.cat(
            [
                torch.full((parameters["bert." + t].numel(),), scores["bert." + t], dtype=torch.float64)
                for t in s.tensors
            ]
        )
        assert got["mean_of_means"][s.name] == pytest.approx(sum(f) / len(f))
        assert got["mean"][s.name] == pytest.approx(float(entries.mean()))
        assert got["sum"][s.name] == pytest.approx(float(entries.sum()))
    assert "classifier" not in got["sum"] and got["sum"] == site_scores(sites, scores, "sum")


def test_bad_scores():
    model = make()
    scores = scores_of(model)
    key = "bert.encoder.layer.0.output.dense.weight"
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="encoder.layer.0.output.dense.weight"):
            site_scores(model, scores | {key: value})
    with pytest.raises(
        ValueError, match="1 of 33 tensors have none, for example 'encoder.layer.0.output.dense.weight'"
    ):
        site_scores(model, {k: v for k, v in scores.items() if k != key})
    with pytest.raises(ValueError, match="aggregate"):
        site_scores(model, scores, "median")
    with pytest.raises(ValueError, match="scores"):
        site_scores(model, {})
    with pytest.raises(ValueError, match="tensors have none"):
        site_scores(model, scores_of(make("gpt2")))
    with pytest.raises(
        ValueError, match="'embeddings.word_embeddings.weight'.*frozen during the estimate are left out"
    ):
        site_scores(model, {n: v for n, v in scores.items() if "embeddings" not in n})
    with pytest.raises(ValueError, match="'0.1' is not a number"):
        site_scores(model, scores | {key: "0.1"})
    empty = [Site("a", "other", 0.1, (), (), ("a",), 1, "a")]
    with pytest.raises(ValueError, match="stands for no tensor"):
        site_scores(empty, scores)


@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_scores_of_an_estimate(level):
    source = make(head="ForMaskedLM", num_hidden_layers=1)
    rows = [
        {"input_ids": torch.randint(3, 99, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
        for _ in range(2)
    ]
    for r in rows:
        r["labels"] = torch.where(torch.arange(8) % 3 == 0, r["input_ids"], -100)
    estimate = empirical_fisher(source, rows, level)
    model = make(num_hidden_layers=1)
    for a in AGGREGATES:
        assert site_scores(model, estimate, a) == site_scores(model, estimate.scores(), a)
    assert apply_dropout(model, "guided", scores=estimate)["scores"] == site_scores(model, estimate)
    for call in (site_scores, lambda m, s: apply_dropout(m, "guided", scores=s)):
        with pytest.raises(ValueError, match=r"scores\[.*ensor.* is not a number.*\.scores\(\)"):
            call(make(num_hidden_layers=1), estimate.mean())


def estimate_of(model, value=1.0):
    return FisherEstimate(
        {n: torch.tensor(value * q.numel() * (1 + i)) for i, (n, q) in enumerate(model.named_parameters())},
        1,
        "tensor",
        "mlm",
        numel={n: q.numel() for n, q in model.named_parameters()},
    )


def test_scores_of_another_model_are_refused():
    model, deep, wide = make(), make(head="ForMaskedLM", num_hidden_layers=4), make(head="ForMaskedLM", hidden_size=32)
    before = rates(model)
    for call in (
        site_scores,
        lambda m, s: apply_dropout(m, "guided", scores=s),
        lambda m, s: apply_dropout(m, "shuffled", scores=s),
    ):
        for scores in (scores_of(deep), estimate_of(deep)):
            with pytest.raises(
                ValueError, match=r"scores: name 'encoder.layer.2', a layer that the model does not have"
            ):
                call(model, scores)
        with pytest.raises(
            ValueError,
            match=r"'encoder.layer.0.attention.self.query.weight' has 1024 scalars in the estimate, 256 in the model",
        ):
            call(model, estimate_of(wide))
        with pytest.raises(ValueError, match="tensors have none"):
            call(deep, scores_of(model))
    assert rates(model) == before
    some = [s for s in dropout_sites(model) if "layer.1" not in s.name]
    assert len(site_scores(some, estimate_of(model))) == len(some) - 1  # part of the sites, scores of all
    grown = make()
    grown.resize_token_embeddings(120)
    assert site_scores(grown, estimate_of(model)) == site_scores(model, estimate_of(model))


def test_layers_that_share_their_weights_may_be_named_each():
    model, scores = make(), scores_of(make())
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    assert site_scores(model, scores)["encoder.layer.0.ffn_output"] > 0


@pytest.mark.parametrize("kind", ["embedding", "attention_probs", "attention_output", "ffn_output"])
def test_a_schedule_without_a_site_of_the_body_is_refused(kind):
    model = make()
    names = {s.name: 0.1 for s in dropout_sites(model) if s.kind != "classifier"}
    one = next(s.name for s in dropout_sites(model) if s.kind == kind)
    with pytest.raises(ValueError, match=f"1 of {len(names)} sites have no rate, for example '{one}'"):
        set_dropout(model, {n: p for n, p in names.items() if n != one})
    assert set_dropout(model, names)["rates"] == names | {"classifier": 0.1}


class Wrap(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc = enc
        self.cls = nn.Linear(16, 2)

    def forward(self, input_ids):
        return self.cls(self.enc(input_ids=input_ids)[0][:, 0])


@pytest.mark.parametrize(
    "name,head",
    [
        ("bert", "ForMaskedLM"),
        ("distilbert", "ForMaskedLM"),
        ("llama", "ForCausalLM"),
        ("t5", "ForConditionalGeneration"),
    ],
)
def test_scores_fit_an_encoder_inside_another_module(name, head):
    scores = scores_of(make(name, head=head))
    inner = make(name, head="EncoderModel" if name == "t5" else "Model")
    plain = apply_dropout(inner, "guided", scores=scores)
    plain.undo()
    wrapped = apply_dropout(Wrap(inner), "guided", scores=scores, batch={"input_ids": IDS})
    assert list(wrapped["rates"].values()) == list(plain["rates"].values()) == list(rates(inner).values())
    assert [n.removeprefix("enc.") for n in wrapped["rates"]] == list(plain["rates"])


def test_the_remedy_for_scores_that_do_not_fit_a_wrapper_works():
    scores, inner = scores_of(make(head="ForMaskedLM")), make(head="Model")

    class Pair(Wrap):
        def __init__(self):
            super().__init__(inner)
            self.first = nn.Sequential(nn.Embedding(99, 16), nn.Dropout(0.1))

        def forward(self, input_ids):
            return self.cls(self.enc(inputs_embeds=self.first(input_ids))[0][:, 0])

    with pytest.raises(ValueError, match="such as model.enc, give that part") as error:
        apply_dropout(Pair(), "guided", scores=scores, batch={"input_ids": IDS})
    assert "prefix" not in str(error.value)
    assert apply_dropout(Pair().enc, "guided", scores=scores)["mean"] == pytest.approx(0.05)
    assert site_scores(make(), {f"a.b.{n}": v for n, v in scores.items()}, prefix="a.b.bert") == site_scores(
        make(), scores
    )


def test_scores_from_a_path(tmp_path):
    estimate, model = estimate_of(make()), make()
    estimate.save(tmp_path / "estimate")
    (tmp_path / "sc.json").write_text(json.dumps(estimate.scores()))
    want = apply_dropout(make(), "guided", scores=estimate)
    for path in (tmp_path / "estimate", str(tmp_path / "sc.json")):
        assert apply_dropout(make(), "guided", scores=path) == want and site_scores(model, path) == want["scores"]
    with pytest.raises(ValueError, match="scalars in the estimate"):
        site_scores(make(hidden_size=32), tmp_path / "estimate")
    with pytest.raises(ValueError, match="scores: .*none.json"):
        apply_dropout(model, "guided", scores=tmp_path / "none.json")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 0.9), st.floats(0, 0.9))
def test_guided_schedule_is_equation_10(values, a, b):
    p_min, p_max = sorted((a, b))
    scores = {f"s{i}": v for i, v in enumerate(values)}
    plan = guided_schedule(scores, p_max, p_min)
    assert list(plan) == list(scores)
    n, order = len(values), sorted(range(len(values)), key=lambda i: (values[i], i))  # ascending, ties by place
    for i, at in enumerate(order):
        assert plan[f"s{at}"] == pytest.approx(p_max - i * (p_max - p_min) / max(1, n - 1), abs=1e-12)
    assert all(p_min <= p <= p_max for p in plan.values()) and plan[f"s{order[0]}"] == p_max
    if n > 1:
        assert plan[f"s{order[-1]}"] == p_min


def test_equal_scores_lose_no_site():
    with pytest.warns(
        UserWarning, match="scores: all 5 sites have the same, 1, so the rates follow the order of the sites"
    ):
        plan = guided_schedule(dict.fromkeys("abcde", 1.0))
    assert list(plan) == list("abcde") and list(plan.values()) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


def test_shapes():
    scores = dict(zip("abc", (3.0, 1.0, 2.0)))
    assert guided_schedule(scores, 0.4, 0.2, lambda u: (1 - u) ** 2) == pytest.approx({"b": 0.4, "c": 0.25, "a": 0.2})
    for bad in ("cosine", lambda u: 2 - u, lambda u: float("nan")):
        with pytest.raises(ValueError, match="shape"):
            guided_schedule(scores, shape=bad)
    with pytest.raises(ValueError, match="p_max"):
        guided_schedule(scores, 1.0)
    with pytest.raises(ValueError, match=r"p_min: 0.2 is out of range; need a number in \[0, 0.1\]"):
        guided_schedule(scores, 0.1, 0.2)
    with pytest.raises(ValueError, match=r"scores\['b'\]: nan"):
        guided_schedule(scores | {"b": float("nan")})
    with pytest.raises(ValueError, match="no site"):
        guided_schedule({})
    with pytest.raises(ValueError, match="a FisherEstimate is no mapping.*site_scores"):
        guided_schedule(estimate_of(make()))


def test_the_released_schedule_is_the_authors_arithmetic():
    plan = released_schedule()
    assert np.allclose(sorted(plan.values()), np.arange(0, 0.099, 0.00275), atol=1e-12) and len(plan) == 37
    assert np.mean(list(plan.values())) == pytest.approx(0.0495)
    assert (
        plan["embeddings"] == 0
        and plan["encoder.layer.7.attention_probs"] == 0.099
        and plan["encoder.layer.3.ffn_output"] == 0.00275
    )
    assert plan["encoder.layer.11.attention_output"] == 0.066 and plan["encoder.layer.11.ffn_output"] == 0.033
    deep = make(num_hidden_layers=12)
    assert (
        set_dropout(deep, plan)["mean"] == pytest.approx(0.0495) and rates(deep)["classifier"] == 0.1
    )  # never scheduled


@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=20), st.integers(0, 2**31))
def test_controls_keep_the_mean_and_the_sites(values, seed):
    plan = {f"s{i}": v for i, v in enumerate(values)}
    kinds = [Site(n, "ab"[i % 2], 0.1, (), (), (), 1, "") for i, n in enumerate(plan)]
    for kind in CONTROLS:
        control = control_schedule(kind, plan, kinds, seed)
        assert list(control) == list(plan) and math.fsum(control.values()) == pytest.approx(math.fsum(values), abs=1e-9)
    assert (
        sorted(control_schedule("shuffled", plan, seed=seed).values())
        == sorted(values)
        == sorted(control_schedule("reversed", plan).values())
    )
    mirrored = control_schedule("reversed", plan)
    for a in plan:
        for b in plan:
            if plan[a] < plan[b]:
                assert mirrored[a] >= mirrored[b]


def test_controls_do_what_they_say():
    plan = released_schedule()
    sites = dropout_sites(make(num_hidden_layers=12))
    by_type = control_schedule("type-only", plan, sites)
    means = dict(embedding=0.0, attention_probs=0.0839, attention_output=0.0509, ffn_output=0.0179)
    assert all(round(by_type[s.name], 4) == means[s.kind] for s in sites if s.kind != "classifier")
    assert list(control_schedule("constant-mean", plan).values()) == pytest.approx([0.0495] * 37)
    shuffled = [control_schedule("shuffled", plan, seed=s) for s in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert [shuffled[0][n] for n in ("embeddings", "encoder.layer.0.attention_probs")] == [
        0.066,
        0.09075,
    ]  # the same everywhere
    with pytest.raises(ValueError, match="kind: 'random'"):
        control_schedule("random", plan)
    with pytest.raises(ValueError, match="sites: type-only"):
        control_schedule("type-only", plan)
    with pytest.raises(ValueError, match="no sites"):
        control_schedule("type-only", plan, make())
    with pytest.raises(ValueError, match="is out of range"):
        control_schedule("reversed", {"a": 2.0})


@pytest.mark.parametrize("how", ["guided", *CONTROLS])
@pytest.mark.parametrize("name", ["bert", "deberta"])
def test_a_control_from_a_file_is_the_control_from_scores(name, how, tmp_path):
    scores = scores_of(make(name))
    guided = apply_dropout(make(name), "guided", scores=scores, p_max=0.2, p_min=0.02)
    model = make(name)
    want, sites = apply_dropout(make(name), how, scores=scores, p_max=0.2, p_min=0.02, seed=3), dropout_sites(model)
    head = {s.name: s.p for s in sites if s.kind == "classifier"}
    for schedule in (
        save_schedule(tmp_path / "rates.json", guided["rates"]),
        save_schedule(tmp_path / "applied.json", guided),
        guided,
        dict(guided),
    ):
        done = apply_dropout(model, how, schedule=schedule, seed=3)
        assert done["rates"] == want["rates"] == rates(model) and done["mean"] == want["mean"]
        assert {n: p for n, p in done["rates"].items() if n in head} == head  # untouched
        done.undo()
    if how in CONTROLS:
        bare = {n: p for n, p in guided["rates"].items() if n not in head}
        assert (
            control_schedule(how, guided, model, 3)
            == control_schedule(how, bare, sites, 3)
            == {n: p for n, p in want["rates"].items() if n not in head}
        )
        if how != "type-only":
            assert control_schedule(how, guided["rates"], seed=3) == control_schedule(how, bare, seed=3)


def test_a_control_knows_the_head_by_kind_and_refuses_it_alone():
    vgg = [
        Site(n, "other", 0.5, (), (), (), 1, "") for n in ("classifier.2", "classifier.5")
    ]  # named so, but no head of a pretrained model
    assert control_schedule("reversed", {"classifier.2": 0.1, "classifier.5": 0.3}, vgg) == {
        "classifier.2": 0.3,
        "classifier.5": 0.1,
    }
    with pytest.raises(ValueError, match="head's dropout only.*pass sites="):
        control_schedule("reversed", {"classifier.2": 0.1, "classifier.5": 0.3})


def test_a_shuffle_that_cannot_be_repeated_is_refused():
    rates = {"a": 0.1, "b": 0.2, "c": 0.3}
    for seed in (None, 1.5, True):
        with pytest.raises(ValueError, match="seed: "):
            control_schedule("shuffled", rates, seed=seed)
    assert control_schedule("shuffled", rates, seed=np.int64(3)) == control_schedule("shuffled", rates, seed=3)
