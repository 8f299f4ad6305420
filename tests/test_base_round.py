"""The base-size round: its rows, the choice of its final runs, and the parts that travel to a GPU."""

import hashlib
import json
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from isoreg.experiments.grid import expand, load_grid

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import base_round
import gpu


pytestmark = pytest.mark.usefixtures("project")


def test_the_primary_runs_come_first_seed_by_seed():
    runs = expand(load_grid("base-dropout")).runs
    first = [(r.config["seed"], r.config["task"], r.config["dropout"]) for r in runs[:50]]
    assert len(runs) == 125 and len(set(first)) == 50
    assert [seed for seed, *_ in first] == sorted(seed for seed, *_ in first)
    assert {how for *_, how in first} == {"guided", "constant-mean"}
    assert {r.config["eval_split"] for r in runs if r.config["task"] == "sst5"} == {"validation_test"}


def test_final_runs_have_the_chosen_settings_and_the_whole_rows(tmp_path):
    plan = expand(load_grid("base-search"))
    records = [{"key": r.key, "config": r.config, "status": "done", "metric": "m", "value": 0.5} for r in plan.runs]
    for r in records:  # the best of CoLA: batch 16 at 1e-5, and λ = -1 at 5e-5; all else ties
        c = r["config"]
        best = (1e-5, 16, 0.0) if c["regularizer"] == "none" else (5e-5, 32, -1.0)
        r["value"] += 0.1 * (c["task"] == "cola" and (c["lr"], c["batch_size"], c["lam"]) == best)
    (tmp_path / "final.yaml").write_text(yaml.safe_dump(base_round.final_grid(records)))
    runs = [r.config for r in expand(load_grid(tmp_path / "final.yaml"), only=("tuned",)).runs]
    chosen = {(c["task"], c["regularizer"]): (c["lr"], c["batch_size"], c["lam"]) for c in runs}
    assert len(runs) == 50 and {c["seed"] for c in runs} == set(range(5))
    assert chosen["cola", "none"] == (1e-5, 16, 0.0) and chosen["cola", "istar"] == (5e-5, 32, -1.0)
    assert chosen["mrpc", "none"] == (1e-5, 16, 0.0) and chosen["mrpc", "istar"] == (1e-5, 32, -1.0)  # the first
    assert {c["zeta"] for c in runs if c["regularizer"] == "istar"} == {0.2}
    splits = {c["task"]: (c["train_split"], c["eval_split"]) for c in runs}
    assert splits["mrpc"] == ("train", None) and splits["sst5"] == ("train_4000_part", "validation_test")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    "Folders as `pack` fills them, with tiny contents."
    monkeypatch.setattr(gpu, "GPU", tmp_path / "parts")
    monkeypatch.setattr(gpu, "BUILT", tmp_path / "built")
    weights, small = bytes(range(200)), tmp_path / "parts/0"
    for folder in ("wheels", "base-data", "model"):
        (small / folder).mkdir(parents=True)
    (small / "model/config.json").write_text("{}")
    (small / "commit").write_text("abc")
    (small / "sha256").write_text(hashlib.sha256(weights).hexdigest())
    tarfile.open(small / "code.tar", "w").close()
    for i in range(gpu.PARTS):
        (tmp_path / f"parts/{i + 1}").mkdir()
        (tmp_path / f"parts/{i + 1}/weights").write_bytes(weights[34 * i : 34 * (i + 1)])
    return tmp_path


def test_the_parts_become_the_weights_again(parts):
    assert gpu.unpack() == "abc"
    model = parts / "built" / gpu.MODEL
    assert (model / "model.safetensors").read_bytes() == bytes(range(200)) and (model / "config.json").is_file()


def test_weights_that_changed_on_the_way_are_refused(parts):
    (parts / "parts/3/weights").write_bytes(bytes(34))
    with pytest.raises(SystemExit, match="sha256"):
        gpu.unpack()
    assert not (parts / "built" / gpu.MODEL / "model.safetensors").exists()


class Run:
    def __init__(self, key):
        self.key, self.config = key, {"task": key, "seed": 99}


def scored(config, value):
    return {"key": config["task"], "status": "done", "value": value, "config": config}


@pytest.fixture
def card(tmp_path, monkeypatch):
    "Stages whose runs take no time: the score of a task is what `scores` says, an error where it says nothing."
    scores = {}
    failed = lambda c: {"key": c["task"], "status": "failed", "error": "no", "config": c}
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", lambda *a: ThreadPoolExecutor(2))
    monkeypatch.setattr(gpu, "one", lambda c: scored(c, scores[c["task"]]) if c["task"] in scores else failed(c))
    monkeypatch.setattr(
        gpu, "planned", lambda grid, only=(): [Run(t) for t in ([*base_round.GATE] if "gate" in grid else "x")]
    )
    (tmp_path / "results").mkdir()
    (tmp_path / "out").mkdir()
    return scores, tmp_path / "out"


def test_counted_runs_wait_for_the_gate(card):
    scores, out = card
    scores |= {task: 0.95 for task in base_round.GATE if task != "cola"} | {"x": 1.0}
    with pytest.raises(SystemExit, match="cola"):  # it failed
        gpu.primary(out, time.monotonic() + 60, False)
    scores["cola"] = 0.4
    with pytest.raises(SystemExit, match="cola"):  # it is below
        gpu.primary(out, time.monotonic() + 60, False)
    assert "x" not in {r["key"] for r in gpu.recorded(out)}


def test_a_card_goes_on_where_another_stopped_and_nothing_is_kept_twice(card):
    scores, out = card
    scores |= dict.fromkeys(base_round.GATE, 0.95) | {"x": 1.0}
    gpu.primary(out, time.monotonic() + 60, False)
    for _ in range(2):
        gpu.take(out)
    kept = [json.loads(line) for line in (gpu.RESULTS / "base_gpu.jsonl").read_text().splitlines()]
    assert sorted(r["key"] for r in kept) == sorted([*base_round.GATE, "x"])
    scores.clear()  # whatever ran now would fail
    assert gpu.work([Run(r["key"]) for r in kept], out.parent / "next", time.monotonic() + 60, False)
