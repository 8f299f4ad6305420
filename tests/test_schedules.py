"""Scores of tensors become scores of sites, schedules are equations 9 and 10, controls keep what they do not test."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import make, rates, scores_of

from isoreg.fisher import FisherEstimate, empirical_fisher
from isoreg.dropout import apply_dropout, set_dropout, site_scores
from isoreg.schedules import CONTROLS, control_schedule, guided_schedule, load_schedule
from isoreg.schedules import released_schedule, save_schedule
from isoreg.sites import Site, dropout_sites


def test_site_scores_against_a_loop():
    model = make()
    scores, sites = scores_of(model), dropout_sites(model)
    parameters = dict(model.named_parameters())
    got = {a: site_scores(model, scores, a) for a in ("mean_of_means", "mean")}
    for s in (s for s in sites if s.kind != "classifier"):
        f = [scores["bert." + t] for t in s.tensors]
        entries = [x for t, x in zip(s.tensors, f) for _ in range(parameters["bert." + t].numel())]
        assert got["mean_of_means"][s.name] == pytest.approx(sum(f) / len(f))
        assert got["mean"][s.name] == pytest.approx(math.fsum(entries) / len(entries))
    assert "classifier" not in got["mean"] and got["mean"] == site_scores(sites, scores, "mean")


@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_scores_of_an_estimate(level):
    ids = torch.randint(3, 99, (2, 8))
    labels = torch.where(torch.arange(8) % 3 == 0, ids, -100)
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}]
    estimate = empirical_fisher(make(head="ForMaskedLM", num_hidden_layers=1), rows, level)
    model = make(num_hidden_layers=1)
    assert site_scores(model, estimate) == site_scores(model, estimate.scores())
    assert apply_dropout(model, "guided", scores=estimate)["scores"] == site_scores(model, estimate)
    with pytest.raises(ValueError, match=r"scores\[.*ensor.* is not a number.*\.scores\(\)"):
        site_scores(make(num_hidden_layers=1), estimate.mean())


def estimate_of(model):
    sizes = {n: q.numel() for n, q in model.named_parameters()}
    sums = {n: torch.tensor(float(size * (1 + i))) for i, (n, size) in enumerate(sizes.items())}
    return FisherEstimate(sums, 1, "tensor", "mlm", numel=sizes)


def test_scores_of_another_model_are_refused(tmp_path):
    model, deep, wide = make(), make(head="ForMaskedLM", num_hidden_layers=4), make(head="ForMaskedLM", hidden_size=32)
    before = rates(model)
    for scores in (scores_of(deep), estimate_of(deep)):
        with pytest.raises(ValueError, match=r"0 of 33 .* 32 scores are of other layers, such as 'encoder.layer.2"):
            site_scores(model, scores)
    estimate, file = estimate_of(wide), tmp_path / "record.json"
    file.write_text(json.dumps({"tensor_scores": estimate.scores(), "numel": estimate.numel}))
    for scores in (estimate, file):
        with pytest.raises(ValueError, match="query.weight' has 1024 scalars in the estimate, 256 in"):
            apply_dropout(model, "guided", scores=scores)
    with pytest.raises(ValueError, match="tensors have no score"):
        apply_dropout(deep, "shuffled", scores=scores_of(model))
    assert rates(model) == before
    grown = make()
    grown.resize_token_embeddings(120)
    assert site_scores(grown, estimate_of(model)) == site_scores(model, estimate_of(model))


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


@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=20), st.integers(0, 2**31))
def test_controls_keep_the_mean_and_the_sites(values, seed):
    plan = {f"s{i}": v for i, v in enumerate(values)}
    kinds = [Site(n, "ab"[i % 2], 0.1, (), (), "", 1) for i, n in enumerate(plan)]
    for kind in CONTROLS:
        control = control_schedule(kind, plan, kinds, seed)
        assert list(control) == list(plan) and math.fsum(control.values()) == pytest.approx(math.fsum(values), abs=1e-9)
    mirrored, shuffled = (control_schedule(kind, plan, kinds, seed) for kind in ("reversed", "shuffled"))
    assert sorted(mirrored.values()) == sorted(values) == sorted(shuffled.values())
    assert all(mirrored[a] >= mirrored[b] for a in plan for b in plan if plan[a] < plan[b])


def test_equal_scores_warn_and_follow_the_order():
    with pytest.warns(UserWarning, match="scores: all are equal, so the rates follow the order"):
        plan = guided_schedule(dict.fromkeys("abcde", 1.0))
    assert list(plan) == list("abcde") and list(plan.values()) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


def test_controls_of_the_released_schedule():
    plan, deep = released_schedule(), make(num_hidden_layers=12)
    sites = dropout_sites(deep)
    assert set_dropout(deep, plan)["mean"] == pytest.approx(0.0495) and rates(deep)["classifier"] == 0.1
    by_type = control_schedule("type-only", plan, sites)
    means = dict(embedding=0.0, attention_probs=0.0839, attention_output=0.0509, ffn_output=0.0179)
    assert all(round(by_type[s.name], 4) == means[s.kind] for s in sites if s.kind != "classifier")
    assert list(control_schedule("constant-mean", plan, sites).values()) == pytest.approx([0.0495] * 37)
    shuffled = [control_schedule("shuffled", plan, sites, s) for s in (np.int64(0), 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    drawn = [shuffled[0][n] for n in ("embeddings", "encoder.layer.0.attention_probs")]
    assert drawn == [0.066, 0.09075]  # the same everywhere


@pytest.mark.parametrize("how", CONTROLS)
def test_a_control_from_a_file_is_the_control_from_scores(how, tmp_path):
    "DeBERTa has two sites in its head, which no control touches."
    scores, model = scores_of(make("deberta")), make("deberta")
    sites = dropout_sites(model)
    guided = apply_dropout(make("deberta"), "guided", scores=scores, p_max=0.2, p_min=0.02)
    want = apply_dropout(make("deberta"), how, scores=scores, p_max=0.2, p_min=0.02, seed=3)
    path = save_schedule(tmp_path / "rates.json", guided)
    done = apply_dropout(model, control_schedule(how, load_schedule(path), sites, seed=3))
    assert done["rates"] == want["rates"] == rates(model) and done["mean"] == want["mean"]
    assert all(done["rates"][s.name] == s.p for s in sites if s.kind == "classifier")


def test_schedule_files(tmp_path):
    path = save_schedule(tmp_path / "new" / "s.json", released_schedule())
    assert list(load_schedule(path).items()) == list(released_schedule().items())
    assert len(list(path.parent.iterdir())) == 1
    (tmp_path / "plain.json").write_text('{"embeddings": 0.2}', encoding="utf-8-sig")
    assert load_schedule(tmp_path / "plain.json") == {"embeddings": 0.2}
    bad = {
        "{": "cannot be read",
        '{"a": 2}': "out of range",
        '{"a": -0.1}': "out of range",
        "[1]": "no mapping",
        '{"format": "x"}': "not a number",
    }
    for text, message in bad.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=f"bad.json.*{message}"):
            load_schedule(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="missing.json"):
        load_schedule(tmp_path / "missing.json")


PLAN = {"a": 0.1, "b": 0.2}
REFUSED = [
    (lambda: guided_schedule({"a": 1}, 1.0), "p_max"),
    (lambda: guided_schedule({"a": 1}, 0.1, 0.2), r"p_min: 0.2 is out of range; need a number in \[0, 0.1\]"),
    (lambda: guided_schedule({"b": float("nan")}), r"scores\['b'\]: nan"),
    (lambda: control_schedule("random", {"embeddings": 0.1}, dropout_sites(make())), "kind: 'random'"),
    (lambda: control_schedule("type-only", PLAN, dropout_sites(make())), "2 names are no sites of this model"),
    (lambda: control_schedule("reversed", {"a": 2.0}, []), "is out of range"),
    (lambda: site_scores(make(), scores_of(make()) | {LAST: -1.0}), "encoder.layer.0.output.dense.weight"),
    (lambda: site_scores(make(), {n: v for n, v in scores_of(make()).items() if n != LAST}), "1 of 33 tensors have"),
    (lambda: site_scores(make(), scores_of(make()), "median"), "aggregate"),
    (lambda: site_scores(make(), "none.json"), "scores: .*none.json"),
    (lambda: site_scores(make(), scores_of(make("gpt2"))), "33 of 33 tensors have no score"),
]
LAST = "bert.encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
