"""Measurements: settings checked first, nothing computed twice, records that say what they are."""

import hashlib
import json
import shutil
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForMaskedLM, AutoTokenizer

from isoreg.dropout import load_scores
from isoreg.fisher import FisherEstimate, empirical_fisher
from isoreg.landscape import direction, mean_loss, step_length, subset
from isoreg.experiments.config import CONFIGS, FisherConfig, GeometryConfig, LandscapeConfig
from isoreg.experiments.measure import as_surface, load_language_model, measure
from isoreg.experiments.record import collect
from isoreg.experiments.toy import toy_model_path

SCHEMA = Draft202012Validator(json.loads((Path(__file__).parents[1] / "nbs/results/landscape.schema.json").read_text()))
TINY = dict(limit=60, shares="33,5", draws=2)
LINE = dict(limit=12, shape="line", points=5)


@pytest.fixture(scope="module")
def fisher_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fisher")
    return folder, measure(FisherConfig(**TINY), folder / "a")


def test_fisher_record(fisher_run):
    folder, record = fisher_run
    model, corpus, loss, _ = load_language_model(FisherConfig(**TINY))
    right = empirical_fisher(model, corpus)
    for n, v in right.scores().items():
        assert record["tensor_scores"][n] == pytest.approx(v, rel=1e-3, abs=1e-12)
    assert (record["samples"], record["kind"], record["status"]) == (60, "fisher", "done")
    assert "mean loss of a sequence" in record["unit"]
    draws = [(d["share"], d["draw"], d["samples"]) for d in record["draws"]]
    assert draws == [(33, 0, 20), (33, 1, 20), (5, 0, 3), (5, 1, 3)]
    for d in record["draws"]:
        assert -1 <= d["tensor_order"] <= 1 and -1 <= d["schedule"] <= 1 and len(d["top"]) == 4
    values, total = record["entries"]["value"], sum(p.numel() for p in model.parameters())
    assert values == sorted(values, reverse=True) and record["entries"]["of"] == record["parameters"] == total
    largest = max(float(v.max()) for v in empirical_fisher(model, corpus, "diagonal").mean().values())
    assert values[0] == pytest.approx(largest, rel=1e-4)
    rates = record["sites"]["rates"]
    assert len(rates) == 13 and max(rates.values()) == pytest.approx(0.1) and min(rates.values()) == 0
    stored = json.loads((folder / "a" / "record.json").read_text())
    assert load_scores(folder / "a") == (record["tensor_scores"], record["numel"]) and stored == record
    for n, v in load_scores(folder / "a" / "full")[0].items():
        assert v == pytest.approx(record["tensor_scores"][n])


@pytest.mark.parametrize("name, given", [("geometry", {"pooling": "mean"}), ("mlm_head", {"steps": 4})])
def test_a_run_notebook_writes_its_record(name, given, tmp_path):
    forked.run(Path(__file__).parents[1] / f"nbs/runs/{name}.ipynb", limit=100, out=str(tmp_path), **given)
    (record,) = [json.loads(p.read_text()) for p in tmp_path.rglob("record.json")]
    config = CONFIGS[name](limit=100, **given)
    assert (record["status"], record["key"], record["config"]) == ("done", config.key, config.to_dict())


def test_a_layer_without_a_corrected_score_gets_a_note(tmp_path):
    "Before the first layer, the last tokens of these texts are equal, except one."
    words = [w for w in AutoTokenizer.from_pretrained(toy_model_path()).get_vocab() if w.isalpha()][:40]
    (tmp_path / "texts.txt").write_text("\n".join(f"{w} sleeps ." for w in words) + "\na cat sleeps in a park .\n")
    record = measure(GeometryConfig(corpus=str(tmp_path / "texts.txt"), pooling="last", limit=100), tmp_path / "out")
    scores = [row["isoscore_corrected"] for row in record["layers"]]
    assert scores[0] is None and all(scores[1:]), record["notes"]
    assert any("layer 0" in note and "isoscore_corrected" in note for note in record["notes"])


def test_the_mean_loss_is_that_of_the_samples_it_says(tmp_path):
    config = FisherConfig(limit=101, batch_size=2, shares="5", draws=1)  # 51 batches, a half-empty one in the first 50
    model, corpus, loss, _ = load_language_model(config)
    first, record = [b for b, _ in zip(corpus, range(50))], measure(config, tmp_path)
    assert record["mean_loss_over"] == sum(len(b["labels"]) for b in first) == 99
    assert record["mean_loss"] == pytest.approx(mean_loss(model, first), rel=1e-6)


@pytest.mark.parametrize("by, level", [("tensor", "tensor"), ("scalar", "diagonal")])
def test_landscape_record(tmp_path, by, level, fisher_run):
    config = LandscapeConfig(**LINE, subset="top", share=0.25, by=by)
    record = measure(config, tmp_path)
    model, corpus, _, _ = load_language_model(config)
    estimate = empirical_fisher(model, corpus, level)
    scores = estimate.mean() if by == "scalar" else {n: torch.tensor(v) for n, v in estimate.scores().items()}
    d = direction(model, 0, mask=subset(model, scores, 0.25, "top", by))
    assert record["moved"] == sum(int((v != 0).sum()) for v in d.values())
    assert record["lengths"] == pytest.approx([step_length(d)])
    assert record["origin"] == pytest.approx(mean_loss(model, corpus), rel=1e-5)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n in d:
                p.add_(0.75 * d[n])
    assert record["losses"][3][0] == pytest.approx(mean_loss(model, corpus), rel=1e-4) and record["alphas"][3] == 0.75
    surface = as_surface(record)
    assert surface.is_line and surface.origin == record["origin"] and np.isfinite(record["hessian"][0][0])
    wild = json.loads(json.dumps(record | {"losses": [["inf"], ["nan"], *record["losses"][2:]]}))
    assert as_surface(wild).losses[0, 0] == np.inf and np.isnan(as_surface(wild).losses[1, 0])
    assert measure(config, tmp_path) == record


def test_the_mean_as_released_is_over_random_batches(tmp_path):
    config = LandscapeConfig(**LINE, batch_size=5, reduction="batch", hessian=False)
    record = measure(config, tmp_path / "batch")
    model, corpus, _, _ = load_language_model(config)
    with torch.no_grad():
        losses = [(float(model(**b).loss), len(b["labels"])) for b in corpus]
    values, sizes = zip(*losses)
    assert sizes == (5, 5, 2) and record["origin"] == pytest.approx(np.average(values, weights=sizes), rel=1e-5)
    assert record["corpus"]["by_length"] is False and record["config"]["reduction"] == "batch"
    assert measure(config, tmp_path / "batch") == record


def test_estimates_of_another_kind_are_refused(tmp_path, fisher_run):
    folder = str(fisher_run[0] / "a" / "full")
    estimate = FisherEstimate.load(folder)
    estimate.fingerprint = "other"
    estimate.save(tmp_path / "other")
    with pytest.raises(ValueError, match="fisher: .* of the weights"):
        measure(LandscapeConfig(**LINE, subset="top", fisher=str(tmp_path / "other")), tmp_path / "x")
    model, corpus, _, _ = load_language_model(FisherConfig(**TINY))
    empirical_fisher(model, [next(iter(corpus))]).save(tmp_path / "t")
    with pytest.raises(ValueError, match="fisher: .* no diagonal"):
        measure(LandscapeConfig(**LINE, subset="top", by="scalar", fisher=str(tmp_path / "t")), tmp_path / "x")


def test_a_changed_estimate_makes_another_landscape(tmp_path, fisher_run):
    shutil.copytree(fisher_run[0] / "a" / "full", tmp_path / "f")
    some = dict(subset="top", share=0.3, fisher=str(tmp_path / "f"))
    config = LandscapeConfig(limit=4, shape="line", points=3, one_d="scale", hessian=False, **some)
    first, path = measure(config, tmp_path / "run"), tmp_path / "run" / "record.json"
    sha256 = lambda content: hashlib.sha256(content).hexdigest()[:16]
    read = sha256(sha256((tmp_path / "f" / "fisher.json").read_bytes()).encode())  # of the digests of the files
    assert first["inputs"] == {"fisher": read} and measure(config, tmp_path / "run") == first
    SCHEMA.validate(first)
    estimate = FisherEstimate.load(tmp_path / "f")
    estimate.sums = {n: 1 / (s + 1e-30) for n, s in estimate.sums.items()}
    estimate.save(tmp_path / "f")
    path.write_text(json.dumps({k: v for k, v in first.items() if k != "inputs"}))
    # an older record does not say what it was made from
    assert measure(config, tmp_path / "run")["losses"] == first["losses"]
    SCHEMA.validate(json.loads(path.read_text()))
    path.write_text(json.dumps(first))
    second = measure(config, tmp_path / "run")
    assert second["moved"] != first["moved"]
    assert second["losses"] == measure(config, tmp_path / "fresh")["losses"] != first["losses"]


def test_a_measurement_found_again_takes_the_place_of_its_line(tmp_path):
    line = {"key": "k", "kind": "fisher", "status": "done", "finished": "2026-05-01", "notes": []}
    again = line | {"finished": "2026-04-01", "notes": ["again"]}
    (tmp_path / "all.jsonl").write_text(json.dumps(line))
    (tmp_path / "record.json").write_text(json.dumps(again))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/record.json").write_text(json.dumps(again | {"kind": "geometry"}))
    assert collect(tmp_path, tmp_path / "all.jsonl", "fisher") == [again]


def test_collecting_goes_on_after_broken_records(tmp_path, fisher_run):
    for name, text in (
        ("a", '{"key": "x", "kind": "fis'),
        ("b", "[1, 2]"),
        ("c", '{"kind": "fisher"}'),
        ("d", (fisher_run[0] / "a" / "record.json").read_text()),
        ("e", '{"key": "k", "config": {}}'),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "record.json").write_text(text)
    (tmp_path / "all.jsonl").write_text('{"key": "x"}\n\n{"key": "y"}\n')
    with pytest.warns(UserWarning) as caught:
        records = collect(tmp_path / "runs", tmp_path / "all.jsonl", "fisher")
    assert [r["key"] for r in records] == [FisherConfig(**TINY).key, "x", "y"]
    for name in "abc":
        assert any("left out" in str(w.message) and f"{name}/record.json" in str(w.message) for w in caught)
    with pytest.warns(UserWarning, match="left out"):
        assert collect(tmp_path / "runs", tmp_path / "all.jsonl", "fisher") == records
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="folder: no folder"):
        collect(tmp_path / "nowhere", tmp_path / "other.jsonl", "fisher")
    assert not (tmp_path / "other.jsonl").exists()


def test_headless_and_unknown_models(tmp_path):
    AutoModelForMaskedLM.from_pretrained(toy_model_path()).bert.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toy_model_path()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="no pretrained head for mlm .*: isoreg sweep head --set model=.* --set corpus="
    ):
        load_language_model(FisherConfig(model=str(tmp_path)))
    with pytest.raises(ValueError, match="model: 'nobody/nothing' cannot be read"):
        load_language_model(FisherConfig(model="nobody/nothing"))
