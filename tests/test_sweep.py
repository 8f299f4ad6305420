"""Grids and their runs: what a file says, what a kill leaves, who does what."""
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import sweep_stub
from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.config import GeometryConfig, RunConfig
from isoreg.sweep import (
    Folder, Gpus, Kernel, Run, _Board, _ray_run, _receive, choose, expand, final_grid, find_gpus, gpu_need, gpu_share, grid_path, is_disk_full, load_grid, plan_jobs, restore, run_one, set_aside,
    status, sweep, sweep_on_ray, time_left)

ROOT = Path(__file__).parents[1]
invoke = lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])
TINY = "{max_train: 32, max_eval: 20, epochs: 1, lam: -0.1}"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def grid(path, text):
    path.write_text(text)
    return path


def stub(folder, name="g", wait=0.05, tasks="[a, b]", seeds="[0, 1]", extra=""):
    "A grid of stub runs; its log is folder/log."
    sweep_stub.enter(folder)
    return grid(folder / f"{name}.yaml", f"notebook: stub\nfixed: {{wait: {wait}, log: {folder / 'log'}}}\naxes: {{task: {tasks}, seed: {seeds}}}\n{extra}")


def start(path, out, **options):
    return subprocess.Popen([sys.executable, sweep_stub.__file__, str(path), str(out), *(f"{k}={json.dumps(v)}" for k, v in options.items())],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(path, out, **options):
    process = start(path, out, **options)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def records(out): return {p.parent.name: json.loads(p.read_text()) for p in Path(out).glob("*/record.json")}


def logged(folder, word): return sorted(line.split()[1] for line in (folder / "log").read_text().splitlines() if line.startswith(word))


# What a grid file says


def test_axes_tables_include_exclude_and_blocks(tmp_path):
    path = grid(tmp_path / "g.yaml", """
description: all that a file can say
fixed: {epochs: 1, lr: 1e-3}
axes:
  seed: 0..2
exclude:
  - {seed: 2, method: base}
blocks:
  - name: first
    axes:
      method:
        - {name: base, regularizer: none}
        - {name: istar, regularizer: istar, lam: [-1, 1], zeta: 0.4}
    include:
      - {task: toy-rte, regularizer: none, seed: [7, 8]}
  - name: second
    fixed: {seed: 5, regularizer: none, epochs: 2}
    axes: {max_train: [10, 20]}
  - name: third
    fixed: {regularizer: none}
    exclude: [{seed: [1, 2]}]
""")
    plan = expand(load_grid(path))
    got = [(r.block, r.config["task"], r.config["regularizer"], r.config["lam"], r.config["zeta"], r.config["seed"], r.config["epochs"], r.config["max_train"]) for r in plan.runs]
    istar = [("first", "toy-cola", "istar", lam, 0.4, seed, 1, None) for seed in (0, 1, 2) for lam in (-1.0, 1.0)]
    base = [("first", "toy-cola", "none", 0.0, 0.0, seed, 1, None) for seed in (0, 1)]
    assert sorted(map(str, got)) == sorted(map(str, istar + base + [("first", "toy-rte", "none", 0.0, 0.0, seed, 1, None) for seed in (7, 8)]
                                               + [("second", "toy-cola", "none", 0.0, 0.0, 5, 2, n) for n in (10, 20)]))
    assert got[0][:6] == ("first", "toy-cola", "none", 0.0, 0.0, 0) and got[1][3] == -1.0  # the last axis runs fastest
    assert all(r.config["lr"] == 1e-3 for r in plan.runs)
    assert plan.combinations == 8 + 2 + 2 + 1 and plan.duplicates == 1  # third has seed 0 alone, which first has
    assert plan.excluded == 1 + 2 and dict((b[0], b[3]) for b in plan.blocks) == {"first": 10, "second": 2, "third": 0}
    assert any("second" in note and "takes nothing away" in note for note in plan.notes)


def test_keys_are_those_of_isoreg_run_and_order_is_the_grids():
    plan = expand(load_grid("toy"))
    assert [r.key for r in plan.runs] == [RunConfig(task=t, regularizer=m, lam=None if m == "none" else -0.1, seed=s, epochs=1, max_train=600, max_eval=200).key
                                          for t in ("toy-cola", "toy-rte") for m in ("none", "istar") for s in (0, 1)]


def test_overrides_take_the_place_of_what_the_grid_gives(tmp_path):
    path = grid(tmp_path / "g.yaml", "axes:\n  seed: [0, 1, 2]\n  m: [{dropout: standard}, {dropout: constant, dropout_p: 0.05}]\nfixed: {regularizer: none}\n")
    plan = expand(load_grid(path), overrides={"seed": [4, 5], "dropout_p": "1e-2", "max_train": 9})
    assert sorted((r.config["seed"], r.config["dropout"], r.config["dropout_p"], r.config["max_train"]) for r in plan.runs) == [
        (4, "constant", 0.01, 9), (4, "standard", None, 9), (5, "constant", 0.01, 9), (5, "standard", None, 9)]


@pytest.mark.parametrize("text, words", [
    ("axes: {seed: [0]}\nfix: {}", ["fix", "fixed"]),
    ("axes: {sed: [0, 1]}", ["sed", "did you mean seed", "2 of 2"]),
    ("axes: {lam: [1, 2]}\nfixed: {lam: 1}", ["lam", "fixed and under axes"]),
    ("axes: {seed: 3}", ["seed", "no list"]),
    ("axes: {seed: []}", ["seed", "empty"]),
    ("axes: {seed: [4..0, 7]}", ["seed", "4..0", "write 0..4"]),
    ("axes: {m: [{name: a, seed: []}]}", ["seed", "empty"]),
    ("axes: {seed: [0]}\ninclude: [{seed: []}]", ["include: seed", "empty"]),
    ("axes: {seed: [0]}\ninclude: [null]", ["include", "entry 1 is empty"]),
    ("axes: {seed: [0]}\nexclude: [{}]", ["exclude", "entry 1 is empty"]),
    ("# nothing", ["g.yaml is empty"]),
    ("notebook: [finetune]", ["notebook", "no name"]),
    ("fixed: {seed: [1, 2]}", ["seed", "axes"]),
    ("axes: {m: [{lam: 1}, {lam: 2}], lam: [1]}", ["lam", "two axes"]),
    ("axes: {m: [{lam: 1}, 2]}", ["mixes"]),
    ("axes: {seed: [0]}\naxes: {seed: [1]}", ["axes", "twice"]),
    ("axes: {seed: [0]}\nexclude: [{see: 0}]", ["see", "seed"]),
    ("axes: {seed: [0]}\nexclude: [{seed: 0}]", ["no run"]),
    ("blocks: [{name: a}, {name: a}]", ["same name"]),
    ("blocks: [{names: a}]", ["names", "name"]),
    ("blocks: []", ["no block"]),
    ("notebook: finetun", ["finetun", "finetune"]),
    ("axes: {lam: [.inf, 1]}", ["lam", "1 of 2"]),
    ("axes: !!python/object/apply:os.system [ls]", ["YAML"]),
    ("a: [", ["YAML"]),
    ("- 1", ["no table"]),
])
def test_bad_grids_are_refused_with_their_reason(tmp_path, text, words):
    path = grid(tmp_path / "g.yaml", text)
    with pytest.raises(ValueError) as caught: expand(load_grid(path))
    for word in words: assert word in str(caught.value)
    result = invoke("sweep", path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_ranges_may_be_negative_and_overrides_not_empty(tmp_path):
    path = grid(tmp_path / "g.yaml", "axes: {lam: -2..1}\n")
    assert [r.config["lam"] for r in expand(load_grid(path)).runs] == [-2.0, -1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="set: seed: the list is empty"): expand(load_grid(path), overrides={"seed": []})


def test_a_model_folder_without_weights_is_found_before_the_start(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = grid(tmp_path / "g.yaml", f"fixed: {{model: {tmp_path / 'model'}}}\naxes: {{seed: [0, 1]}}")
    with pytest.raises(ValueError, match="2 of 2 combinations are bad(.|\n)*no weights in folder"): expand(load_grid(path))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert len(expand(load_grid(path)).runs) == 2


def test_every_combination_is_checked_before_one_runs(tmp_path):
    path = stub(tmp_path, seeds="[0, 1, -1]")
    code, output = finish(path, tmp_path / "out")
    assert code and "2 of 6 combinations are bad" in output and "seed: -1" in output and not (tmp_path / "out").exists()


def test_dry_run_counts_and_writes_nothing(tmp_path):
    path = grid(tmp_path / "g.yaml", f"fixed: {TINY}\naxes: {{regularizer: [none, istar], zeta: [0.2, 0.4]}}")
    result = invoke("sweep", path, "--dry-run", "--out", tmp_path / "out", "--set", "seed=[0,1]")
    assert result.exit_code == 0 and "6 runs: 0 done, 6 to do" in result.output and "2 combinations are equal to others" in result.output
    assert result.output.count("missing toy-cola") == 6 and not (tmp_path / "out").exists()
    assert invoke("sweep", path, "--dry-run", "--set", "seed").exit_code == 2
    assert invoke("sweep", path, "--dry-run", "--only", "h").exit_code == 2
    assert "there are" in invoke("sweep", "nothing").output


@pytest.mark.parametrize("path", sorted((ROOT / "nbs" / "grids").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_grids_are_valid_and_count_what_they_say(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    plan = expand(load_grid(path.stem), overrides={"data_dir": str(tmp_path)} if "data_dir" in text else {})
    said = re.search(r"(\d[\d ]*) runs", "".join(line for line in text.splitlines() if line.startswith("#")))
    assert int(said[1].replace(" ", "")) == len(plan.runs) == plan.combinations and not plan.notes
    assert grid_path(path.stem).samefile(path)


def test_grids_share_their_cells_and_only_padding_is_without_groups(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = {name: expand(load_grid(f"small-{name}"), overrides={"data_dir": str(tmp_path)}).runs for name in ("ablations", "search", "istar", "guided", "paucity")}
    shared = {r.key for r in plans["ablations"]} & {r.key for r in plans["istar"]}
    assert sorted((r.config["task"], r.config["seed"]) for r in plans["istar"] if r.key in shared) == [(t, s) for t in ("cola", "mrpc") for s in range(3)]
    for name, runs in plans.items():
        whole = [r for r in runs if r.config["length_groups"] == 1 and r.config["task"] != "cola"]
        assert {r.block for r in whole} == ({"padding", "ungrouped"} if name == "ablations" else set()) and all(r.config["length_groups"] == 1 for r in runs if r.config["task"] == "cola")
    of = lambda block: [r.config for r in plans["ablations"] if r.block == block and r.config["task"] == "mrpc"]
    padded = of("padding")
    for regularizer in ("none", "istar"):  # each has its partners of the same seed, apart from the padding and the segment ids
        partners = [c for c in of("ungrouped") if c["regularizer"] == regularizer]
        assert sorted(c["seed"] for c in partners) == [0, 1, 2] and len(padded) == 6
        but = {"padding", "segment_ids", "seed"} | ({"regularizer", "lam", "zeta"} if regularizer == "none" else set())
        for c in padded: assert all(c[k] == partners[0][k] for k in c if k not in but)


# Who does what, and what a death leaves


def test_runs_are_done_once_found_again_and_duplicates_are_one(tmp_path):
    path = stub(tmp_path, extra="include: [{task: a, seed: 0}]\n")
    code, output = finish(path, tmp_path / "out", jobs=2)
    assert code == 0, output
    plan = expand(load_grid(path))
    assert plan.duplicates == 1 and set(records(tmp_path / "out")) == {r.key for r in plan.runs}
    assert logged(tmp_path, "start") == sorted(r.key for r in plan.runs)
    for run in plan.runs:
        assert sorted(p.name for p in (tmp_path / "out" / run.key).iterdir()) == ["notebook.ipynb", "record.json"]
        notebook = json.loads((tmp_path / "out" / run.key / "notebook.ipynb").read_text())
        printed = "".join(o["text"] if isinstance(o["text"], str) else "".join(o["text"]) for o in notebook["cells"][-1]["outputs"])
        assert "[]" in printed and printed.split()[-1] == "6"  # nothing left over from the run before: no name, and In holds "" and the five cells
    assert not any((tmp_path / "out" / ".sweep" / "part").iterdir())
    assert finish(path, tmp_path / "out")[0] == 0 and len(logged(tmp_path, "start")) == 4


def test_ten_kills_lose_nothing_and_repeat_nothing(tmp_path):
    rng, out = random.Random(0), tmp_path / "out"
    path = stub(tmp_path, wait=0.2, tasks="[a, b, c]", seeds="0..5")
    kills = []
    for _ in range(10):
        process = start(path, out, jobs=2, retry_failed=True)
        time.sleep(rng.uniform(0.5, 3.5))
        kernels = psutil.Process(process.pid).children() if process.poll() is None else []
        if kernels and rng.random() < 0.4:
            victim = rng.choice(kernels)
            kills.append("kernel")
            victim.kill()
            time.sleep(rng.uniform(0, 2))
        kills.append("sweep" if process.poll() is None else "too late")
        process.kill()  # SIGKILL; the next sweep starts at once, while kernels may still be alive
        process.communicate()
    before = records(out)
    code, output = finish(path, out, jobs=2, retry_failed=True)
    assert code == 0, output
    assert finish(path, tmp_path / "whole", jobs=2)[0] == 0
    assert records(out) == records(tmp_path / "whole") and len(records(out)) == 18
    assert all(records(out)[k] == v for k, v in before.items())
    made = [k for k in logged(tmp_path, "record")]
    assert max(made.count(k) for k in set(made)) <= 2 and kills.count("sweep") >= 3  # once here, once in the uninterrupted folder


def test_two_sweeps_share_a_folder(tmp_path):
    path = stub(tmp_path, wait=0.3, seeds="0..3", extra="include: [{task: bad, fail: always}]\n")
    bad = expand(load_grid(path)).runs[-1].key
    folder = Folder(tmp_path / "out")
    with folder.lock(bad):  # until both have begun
        one, two = start(path, tmp_path / "out", jobs=1), start(path, tmp_path / "out", jobs=1)
        wait_for(lambda: sum(folder.is_held(p.stem, "sweep") for p in (folder.home / "sweeps").glob("*.json")) == 2)
    assert (one.wait(60), two.wait(60)) == (1, 1)
    made = logged(tmp_path, "start")
    assert made.count(bad) == 2 and json.loads((folder.out / bad / "failed.json").read_text())["attempts"] == 2  # two attempts, not two each
    made = [k for k in made if k != bad]
    assert len(made) == len(set(made)) == len(records(tmp_path / "out")) == 8 and not list((folder.home / "sweeps").iterdir())
    assert all("done: " in p.stdout.read() for p in (one, two))  # both had a part of it


def test_a_kernel_that_outlives_its_sweep_keeps_its_lock(tmp_path):
    path = stub(tmp_path, wait=30, tasks="[a]", seeds="[0, 1]")
    run, folder = expand(load_grid(path)).runs[0], Folder(tmp_path / "out")
    process = start(path, folder.out, jobs=1)
    wait_for(lambda: folder.is_held(run.key, "busy"))
    kernel = psutil.Process(process.pid).children()[0]
    kernel.suspend()  # it cannot notice that its parent is gone
    process.kill()
    process.communicate()
    assert folder.is_held(run.key, "busy") and not folder.is_held(run.key)
    mine = Kernel()
    assert run_one(run, folder, mine).status == "elsewhere"
    mine.close()
    kernel.resume()
    kernel.wait(20)  # now it does
    assert not folder.is_held(run.key, "busy")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_workers(tmp_path, number):
    path = stub(tmp_path, wait=30)
    before = signal.signal(number, signal.SIG_DFL)  # a test run in the background of a script has SIGINT ignored, and hands that on
    try: process = start(path, tmp_path / "out", jobs=2)
    finally: signal.signal(number, before)
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2 and (tmp_path / "log").exists())
    kernels = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(30) == 130
    assert not any(k.is_running() and k.status() != "zombie" for k in kernels) and not records(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/failed.json"))


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    path = stub(tmp_path, wait=1, tasks="[a]", seeds="[0]")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try: process = start(path, tmp_path / "out", jobs=1)
    finally: signal.signal(signal.SIGHUP, before)
    wait_for(lambda: (tmp_path / "log").exists())
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0 and len(records(tmp_path / "out")) == 1


class Still:
    "A kernel that computes nothing; `meanwhile` happens when it is asked to begin."
    manager = None

    def __init__(self, meanwhile): self.meanwhile = meanwhile
    def begin(self, run, busy, gpu): return self.meanwhile() or True
    def end(self): pass
    def close(self): pass


def test_the_record_of_an_orphan_that_ends_just_now_is_kept(tmp_path):
    path, folder = stub(tmp_path), Folder(tmp_path / "out")
    run = expand(load_grid(path)).runs[0]
    text = json.dumps({"key": run.key, "status": "done", "config": run.config})
    assert run_one(run, folder, Still(lambda: (folder.part(run.key) / "record.json").write_text(text) and None)).status == "found"
    assert folder.record(run) is not None and not folder.part(run.key).exists()


# Records


def test_records_that_cannot_be_read_are_none(tmp_path):
    path, folder = stub(tmp_path), Folder(tmp_path / "out")
    run = expand(load_grid(path)).runs[0]
    for name in ("record.json", "failed.json"): (folder.out / run.key / name).mkdir(parents=True)
    assert folder.record(run) is None and folder.failure(run) is None and run.key not in status(folder.out)["done"]


def test_status_knows_each_choice_and_checks_as_the_sweep_does(tmp_path):
    path, out = stub(tmp_path), tmp_path / "out"
    plan, more = expand(load_grid(path)), expand(load_grid(path), overrides={"seed": [7]})
    assert sweep(dataclasses.replace(plan, runs=plan.runs[:1]), out).code == 0
    folder = Folder(out)
    from isoreg.sweep import _State
    for p in (plan, more): _State(p, folder, {}, [], 5)
    s = status(out)
    assert len(s["missing"]) == 3 + 2 and len(s["grids"]) == 3 and s["done"] == [plan.runs[0].key]
    assert s["left"] == pytest.approx(5 * 0.05 / 5)  # no sweep lives, so the largest number of workers
    with folder.lock("me", "sweep"):
        (folder.home / "sweeps" / "me.json").write_text('{"jobs": 2}')
        (folder.home / "sweeps" / "dead.json").write_text('{"jobs": 90}')
        assert status(out)["left"] == pytest.approx(5 * 0.05 / 2)
    record = records(out)[plan.runs[0].key]
    for wrong in (record | {"config": record["config"] | {"wait": 9.0}}, {k: v for k, v in record.items() if k != "status"}):
        (out / record["key"] / "record.json").write_text(json.dumps(wrong))
        assert status(out)["done"] == [] and folder.record(plan.runs[0]) is None


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    import errno
    path, out = stub(tmp_path), tmp_path / "out"
    plan = expand(load_grid(path))
    assert sweep(dataclasses.replace(plan, runs=plan.runs[:1]), out).code == 0

    def refuse(*a, **k): raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("isoreg.sweep.FileLock.acquire", refuse)
    monkeypatch.setattr("isoreg.sweep.tempfile.TemporaryFile", refuse)
    (Folder(out).home / "locks" / "other.claim").touch()
    assert status(out)["running"] == [] and len(status(out)["done"]) == 1
    with pytest.raises(ValueError, match="out: cannot write to .*give a folder that can be written"): sweep(plan, out)


def test_runs_without_a_number_are_told(tmp_path):
    path, out = stub(tmp_path, tasks="[a]"), tmp_path / "out"
    plan = expand(load_grid(path))
    assert sweep(plan, out).code == 0
    record = out / plan.runs[0].key / "record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"value": None}))
    report = sweep(plan, out)
    assert report.code == 1 and report.empty == [plan.runs[0].key] and report.found == 2 and report.made == 0
    assert status(out)["empty"] == report.empty


def test_truncated_and_foreign_records_are_set_aside(tmp_path):
    path, out = stub(tmp_path), tmp_path / "out"
    assert finish(path, out, jobs=1)[0] == 0
    good = records(out)
    a, b, c, _ = sorted(good)
    (out / a / "record.json").write_text(json.dumps(good[a])[:40])
    (out / b / "record.json").write_text(json.dumps(good[c]))  # whole, but another's
    (out / c / "record.json").write_text(json.dumps(good[c] | {"config": good[c]["config"] | {"wait": 7.0}}))  # says its key, and other parameters
    code, output = finish(path, out, jobs=1)
    assert code == 0 and records(out) == good and output.count("not a record of this run") == 3
    assert json.loads((out / b / "record.aside-1.json").read_text())["key"] == c
    assert sorted(logged(tmp_path, "start").count(k) for k in good) == [1, 2, 2, 2]


def test_what_a_killed_attempt_said_does_not_hide_the_next_one(tmp_path):
    folder, key = Folder(tmp_path), "mine"
    says = {"part": folder.part(key), "own": folder.out / key}  # of a sweep, of isoreg run
    for place in says.values(): place.mkdir(parents=True)
    for last in ("own", "part"):
        for stamp, name in enumerate(sorted(says, key=lambda n: n == last)):
            (says[name] / "progress.json").write_text(json.dumps({"stage": name}))
            os.utime(says[name] / "progress.json", (stamp + 1, stamp + 1))
        with folder.lock(key, "busy"):
            assert status(tmp_path)["running"] == [{"key": key, "stage": last}]
    (says["part"] / "progress.json").write_text("{")  # killed while it wrote
    with folder.lock(key, "busy"): assert status(tmp_path)["running"] == [{"key": key, "stage": "own"}]


def test_a_surface_of_other_scores_is_not_done(tmp_path, monkeypatch):
    "The key of a surface is of the path of its Fisher scores; what is in the file is told by the digest in the record."
    from isoreg.config import scores_source
    from isoreg.config import LandscapeConfig
    from isoreg.sweep import _State
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").mkdir()
    write = lambda value: (tmp_path / "f" / "record.json").write_text(json.dumps({"tensor_scores": {"a": value}}))
    write(1.0)
    config = LandscapeConfig(subset="top", fisher="f")
    path = grid(tmp_path / "g.yaml", "notebook: landscape\nfixed: {subset: top, fisher: f}\naxes: {direction_seed: [0, 1]}\n")
    plan, folder = expand(load_grid(path)), Folder(tmp_path / "out")
    run = plan.runs[0]
    assert run.key == config.key
    old = {"key": run.key, "status": "done", "config": run.config}  # younger records say what the file held
    record, file = old | {"fisher_sha256": scores_source("f")["sha256"]}, folder.out / run.key / "record.json"
    (tmp_path / "all.jsonl").write_text(json.dumps(record) + "\n")
    file.parent.mkdir(parents=True)
    stands = lambda: (folder.record(run) is not None, run.key in status(folder.out)["done"], restore(tmp_path / "all.jsonl", plan, tmp_path / "new", dry_run=True) == {run.key})
    for planned in (False, True):
        if planned: _State(plan, folder, {}, [], 1)
        file.write_text(json.dumps(record))
        write(1.0)
        assert stands() == (True, True, True) and set_aside(folder, run) is None
        write(2.0)
        assert stands() == (False, False, False)
        assert status(folder.out)["missing"] == ([r.key for r in plan.runs] if planned else None)
        file.write_text(json.dumps(old))
        assert stands()[:2] == (True, True)
        file.write_text(json.dumps(old | {"fisher_sha256": None}))
        assert stands()[:2] == (True, True)
    file.write_text(json.dumps(record | {"config": {k: v for k, v in run.config.items() if k != "hessian"}}))  # older settings, filled in by the class
    assert folder.record(run) is None and "0 done, 2 to do" in invoke("sweep", path, "--dry-run", "--out", folder.out).output
    write(1.0)
    assert folder.record(run) is not None and "1 done, 1 to do" in invoke("sweep", path, "--dry-run", "--out", folder.out).output
    write(2.0)
    assert set_aside(folder, run).name == "record.aside-1.json"
    file.write_text(json.dumps(record))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the file is not found from here: the record stands
    assert stands() == (True, True, True)


def test_publish_can_be_cut_anywhere(tmp_path):
    path, folder = stub(tmp_path), Folder(tmp_path / "out")
    run = expand(load_grid(path)).runs[0]
    part = folder.part(run.key)
    (part / "full").mkdir(parents=True)
    for name in ("notebook.ipynb", "full/x", "progress.json", "record.jsonab.tmp"): (part / name).write_text(name)
    (part / "record.json").write_text(json.dumps({"key": run.key, "status": "done", "config": run.config}))
    (folder.out / run.key / "full").mkdir(parents=True)  # left by a call that was cut before
    (folder.out / run.key / "full" / "old").write_text("old")
    (folder.out / run.key / "notebook.ipynb").write_text("old")
    kernel = Kernel()
    assert run_one(run, folder, kernel).status == "found" and kernel.manager is None  # moved, not computed
    assert sorted(p.relative_to(folder.out / run.key).as_posix() for p in (folder.out / run.key).rglob("*")) == ["full", "full/x", "notebook.ipynb", "record.json"]
    assert not part.exists() and (folder.out / run.key / "notebook.ipynb").read_text() == "notebook.ipynb"
    assert set_aside(folder, run) is None and run_one(run, folder, kernel).status == "found"


# Failures


def test_a_failure_is_told_in_the_same_words_by_both_commands():
    from nbclient.exceptions import DeadKernelError
    from papermill import PapermillExecutionError
    from isoreg.sweep import _failure_words
    assert _failure_words(PapermillExecutionError(1, 1, "", "ValueError", " no \n", ["\x1b[31mTraceback\x1b[0m", "ValueError: no"])) == ("ValueError: no", "Traceback\nValueError: no")
    died = "KernelDied: the kernel died: killed, or out of memory"
    assert _failure_words(DeadKernelError("Kernel died")) == (died, "") and _failure_words(DeadKernelError("Kernel died"), lambda: "last words") == (died, "last words")
    try: raise OSError("no room")
    except OSError as error: message, trace = _failure_words(error)
    assert message == "OSError: no room" and trace.startswith("Traceback") and "raise OSError" in trace


def test_failed_run_is_tried_twice_reported_and_taken_up_on_demand(tmp_path):
    path, out = stub(tmp_path, extra="include:\n  - {task: bad, fail: always}\n  - {task: shaky, fail: once}\n  - {task: dead, fail: die}\n"), tmp_path / "out"
    code, output = finish(path, out, jobs=2)
    runs = {r.config["task"]: r for r in expand(load_grid(path)).runs}
    assert code == 1 and len(records(out)) == 5 and logged(tmp_path, "start").count(runs["bad"].key) == logged(tmp_path, "start").count(runs["dead"].key) == 2
    failure = json.loads((out / runs["bad"].key / "failed.json").read_text())
    assert failure["error"] == "ValueError: this run cannot work" and failure["attempts"] == 2
    assert "def work" in failure["traceback"] or "work(" in failure["traceback"]
    assert not any((out / ".sweep" / "part").iterdir())
    assert Path(failure["notebook"]) == out / runs["bad"].key / "notebook.ipynb" and "this run cannot work" in Path(failure["notebook"]).read_text()
    assert "kernel died" in json.loads((out / runs["dead"].key / "failed.json").read_text())["error"]
    s = status(out)
    assert set(s["failed"]) == {runs["bad"].key, runs["dead"].key} and len(s["done"]) == 5 and s["missing"] == [] and s["running"] == []
    report = sweep(expand(load_grid(path)), out)  # a plain one reports and does not try
    assert report.code == 1 and {o.run.key for o in report.failed} == set(s["failed"]) and "this run cannot work" in report.failed[0].traceback
    assert logged(tmp_path, "start").count(runs["bad"].key) == 2
    assert finish(path, out, jobs=1, retry_failed=True)[0] == 1 and logged(tmp_path, "start").count(runs["bad"].key) == 4


def test_a_failure_that_was_mended_is_forgotten(tmp_path):
    path, out = stub(tmp_path, tasks="[a]", seeds="[0, 1]", extra="include: [{task: shaky, fail: once}]\n"), tmp_path / "out"
    run = expand(load_grid(path)).runs[-1]
    (out / run.key).mkdir(parents=True)
    (out / run.key / "failed.json").write_text(json.dumps({"key": run.key, "error": "x"}))
    assert finish(path, out, jobs=1)[0] == 1 and len(records(out)) == 2
    assert finish(path, out, jobs=1, retry_failed=True)[0] == 0 and not (out / run.key / "failed.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device without room")
def test_full_disk_under_the_notebook_stops_the_sweep(tmp_path):
    path, out = stub(tmp_path), tmp_path / "out"
    run = expand(load_grid(path)).runs[1]
    part = Folder(out).part(run.key)
    part.mkdir(parents=True)
    (part / "notebook.ipynb").symlink_to("/dev/full")  # what papermill writes meets a device without room
    code, output = finish(path, out, jobs=1)
    assert code == 1 and "the disk is full" in output and "No space left" in output and "same command again" in output
    assert len(records(out)) == 1 and not list(out.glob("*/failed.json")) and logged(tmp_path, "start").count(run.key) == 0
    (part / "notebook.ipynb").unlink()
    assert finish(path, out, jobs=1)[0] == 0 and len(records(out)) == 4


def test_full_disk_in_the_kernel_and_before_the_start(tmp_path, monkeypatch):
    path = stub(tmp_path, tasks="[a]", seeds="[0, 1]", extra="include: [{task: b, fail: full}]\n")
    code, output = finish(path, tmp_path / "out", jobs=1)
    assert code == 1 and "stopped: the disk is full" in output and len(records(tmp_path / "out")) == 2 and not list((tmp_path / "out").glob("*/failed.json"))
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("isoreg.sweep.shutil.disk_usage", lambda p: usage)
    result = invoke("sweep", "toy", "--out", tmp_path / "other")
    assert result.exit_code == 1 and "the disk is full: 1 MiB are free" in result.output
    assert is_disk_full(RuntimeError("x")) is False


# What is planned for a machine


def test_workers_and_threads():
    assert plan_jobs(16) == (16, 1) and plan_jobs(16, jobs=3) == (3, 5) and plan_jobs(2, jobs=8) == (8, 1)
    assert plan_jobs(8, ram_mib=5000) == (2, 4) and plan_jobs(8, ram_mib=100) == (1, 8)
    assert plan_jobs(32, [80_000, 80_000], 7_000) == (18, 1)
    assert plan_jobs(32, [10_000], 30_000) == (1, 32)
    with pytest.raises(ValueError, match="jobs"): plan_jobs(4, jobs=0)


def test_gpu_measures_first_and_packs_then():
    gpus = Gpus({"0": 10_000, "1": 4_000})
    assert gpus.place(0, None) == "0" and gpus.place(1, None) == "1" and gpus.place(2, 100) is None  # both are measuring
    gpus.leave(0)
    need = gpu_need(2_000)
    assert [gpus.place(w, 2_000) for w in (2, 3)] == ["0", "0"] and need == 2_800
    assert gpus.place(4, 2_000) == "0"  # 3 x 2800 + the context of worker 0, which idles there
    assert gpus.place(5, 2_000) is None
    gpus.leave(1)
    assert gpus.place(5, 2_000) == "1" and gpus.place(0, 50_000) is None  # larger than any GPU: waits for an empty one
    for w in (2, 3, 4): gpus.leave(w)
    assert gpus.place(0, 50_000) == "0"


def test_board_prefers_the_warm_task_and_retries_alone_when_memory_ran_out():
    make = lambda task, seed: Run(f"{task}{seed}", "finetune", {"task": task, "seed": seed})
    runs = [make(t, s) for s in (0, 1) for t in ("a", "b")]
    board = _Board(runs, Gpus({"0": 10_000}), {r.size: 1_000 for r in runs})
    job, gpu = board.take(0, None)
    assert (job.run.key, gpu) == ("a0", "0") and board.take(1, runs[1].warm)[0].run.key == "b0"
    from isoreg.sweep import Outcome
    board.finish(0, job, Outcome(job.run, "failed", "OutOfMemoryError: CUDA out of memory"))
    third = board.take(2, runs[0].warm)[0]
    assert third.run.key == "a1"  # the retry needs the GPU for itself
    board.finish(1, board.running[1][0], Outcome(runs[1], "done", peak_mib=1_500.0))
    board.finish(2, third, Outcome(third.run, "elsewhere"))
    assert board.peaks[runs[1].size] == 1_500 and board.take(0, None)[0].run.key == "a0"


def test_a_run_that_does_not_say_its_peak_counts_as_measured():
    from isoreg.sweep import ASSUMED_MIB, Outcome
    runs = [Run(f"g{seed}", "geometry", {"model": "m", "seed": seed}) for seed in range(4)]
    board = _Board(runs, Gpus({"0": 80_000}))
    job, _ = board.take(0, None)
    board.finish(0, job, Outcome(job.run, "done"))
    assert board.peaks == {job.run.size: ASSUMED_MIB} and [board.take(w, None)[1] for w in range(3)] == ["0"] * 3  # together
    board.finish(1, board.running[1][0], Outcome(runs[2], "done", peak_mib=900.0))
    assert board.peaks[job.run.size] == ASSUMED_MIB


def test_measurements_say_their_peak(monkeypatch):
    from isoreg import measure
    from isoreg.sweep import _peak
    called = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: called.append(1))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 512 * 2**20)
    monkeypatch.setattr(measure, "hardware", lambda: {"gpu": "some"})
    record = measure.record_of(GeometryConfig(), [], measure._begin())
    assert called and record["peak_memory_mib"] == 512 == _peak(record) and record["key"] == GeometryConfig().key


def test_gpus_are_found_without_touching_them(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, 79000'; echo '1, GPU-bb, 1000'; echo '2, GPU-cc, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == {"0": 79_000, "1": 1_000, "2": 0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_gpus() == {"1": 1_000}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,1")
    assert find_gpus() == {"GPU-aa": 79_000, "1": 1_000}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,MIG-5c,7")
    assert find_gpus() == {"GPU-b": 1_000, "MIG-5c": 0}
    gpus = Gpus(find_gpus())
    assert gpus.place(0, 5_000) in ("GPU-b", "MIG-5c") and gpus.place(1, 5_000) and gpus.place(2, 5_000) is None  # a part of unknown size takes one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == {}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert find_gpus() == {}


def test_share_of_a_gpu_and_time_left():
    assert gpu_share(None, 80_000) == gpu_share(7_000, None) == 1.0
    assert gpu_share(2_000, 80_000) == 0.04 and gpu_share(90_000, 80_000) == 1.0  # 2800 of 80000 are 3.5 %
    a, b, c = ("finetune", "a", "m", 8), ("finetune", "a", "m", 16), ("finetune", "b", "m", 8)
    assert time_left([], {}, 2) == 0 and time_left([a], {}, 2) is None
    assert time_left([a, a, b, c], {a: [10.0, 12.0, 50.0]}, 2) == (12 + 12 + 12 + 12) / 2
    assert time_left([b, c], {a: [10.0], b: [30.0]}, 1) == 30 + 20


def test_node_that_does_not_see_the_folder_sends_its_files(tmp_path):
    path, folder = stub(tmp_path, tasks="[a]", seeds="[0]", extra="include: [{task: bad, fail: always}]\n".replace("[0]", "[0]")), Folder(tmp_path / "out")
    good, bad = expand(load_grid(path)).runs
    outcome, files = _ray_run(good, str(tmp_path / "elsewhere"), "token", str(tmp_path), 1, 50, 2, False)
    assert outcome.status == "done" and set(files) == {"record.json", "notebook.ipynb"} and not (tmp_path / "elsewhere").exists()
    _receive(folder, good, files)
    assert folder.record(good)["key"] == good.key
    outcome, files = _ray_run(bad, str(tmp_path / "elsewhere"), "token", str(tmp_path), 1, 50, 2, False)
    assert outcome.status == "failed" and set(files) == {"failed.json", "notebook.ipynb"}
    _receive(folder, bad, files)
    assert folder.failure(bad)["error"] == "ValueError: this run cannot work" and folder.record(bad) is None
    from isoreg import sweep as module
    module._ray_kernel.close()


# The real thing


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "A 2 x 2 grid of real runs through the command, one worker: three of the four are warm."
    folder = tmp_path_factory.mktemp("toy")
    path = grid(folder / "two.yaml", f"fixed: {TINY}\naxes: {{regularizer: [none, istar], seed: [0, 1]}}")
    result = subprocess.run([sys.executable, "-m", "isoreg.cli", "sweep", str(path), "--out", str(folder / "out"), "--jobs", "1"], capture_output=True, text=True)
    return path, folder / "out", result


TIMES = {"train_seconds", "device_seconds", "total_seconds", "started", "peak_memory_mib"}


def same(one, two):
    for name in set(one) - TIMES: assert one[name] == two[name], name


def test_toy_grid_from_end_to_end(toy):
    path, out, result = toy
    assert result.returncode == 0, result.stderr
    plan = expand(load_grid(path))
    assert set(records(out)) == {r.key for r in plan.runs} and "4 of 4 runs are done (4 by this sweep" in result.stdout
    assert all(json.loads((out / r.key / "notebook.ipynb").read_text())["metadata"]["papermill"]["exception"] is None for r in plan.runs)
    again = invoke("sweep", path, "--out", out)
    assert again.exit_code == 0 and "4 done, 0 to do" in again.output
    told = invoke("status", out, "--json")
    assert json.loads(told.stdout)["grids"]["two"]["planned"] == 4 and "4" in invoke("status", out).output
    assert invoke("status", out / "nothing").exit_code == 2


def test_warm_runs_equal_cold_ones_bit_for_bit(toy, tmp_path):
    path, out, _ = toy
    warm = records(out)
    plan = expand(load_grid(path))
    run = plan.runs[-1]  # the last of the warm kernel; now alone, by the other command
    config = {k: v for k, v in (("regularizer", "istar"), ("lam", -0.1), ("seed", 1), ("max-train", 32), ("max-eval", 20), ("epochs", 1))}
    result = subprocess.run([sys.executable, "-m", "isoreg.cli", "run", "--out", str(tmp_path), *(str(x) for k, v in config.items() for x in (f"--{k}", v))], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    same(records(tmp_path)[run.key], warm[run.key])
    report = sweep(dataclasses.replace(plan, runs=(run,)), tmp_path)  # and a sweep finds what isoreg run did
    assert report.code == 0 and report.found == 1


def test_ray_gives_the_same_records(toy, tmp_path):
    pytest.importorskip("ray")
    path, out, _ = toy
    report = sweep_on_ray(expand(load_grid(path)), tmp_path, "local", jobs=2)
    assert report.code == 0 and len(report.done) == 4, [o.error for o in report.failed]
    mine, theirs = records(tmp_path), records(out)
    assert set(mine) == set(theirs)
    for key in mine: same(mine[key], theirs[key])
    assert sweep_on_ray(expand(load_grid(path)), tmp_path, "local").found == 4


def test_closing_message_groups_equal_failures(tmp_path, capsys):
    from isoreg.cli import _show_report
    from isoreg.sweep import Outcome, Report
    runs = [Run(f"k{i}", "finetune", {}) for i in range(3)]
    _show_report(Report(5, 1, [Outcome(runs[0], "found")], [Outcome(r, "failed", "ValueError: x", "Traceback\nValueError: x") for r in runs[1:]], empty=["k0"]), tmp_path)
    said = capsys.readouterr()
    assert said.err.count("Traceback") == 1 and all(f"k{i}/failed.json" in said.err for i in (1, 2)) and "2 runs" in said.err
    assert "(0 by this sweep" in said.out and "without a number" in said.out
    assert invoke("sweep", "toy", "--jobs", 0, "--out", tmp_path / "none").exit_code == 2
    path = grid(tmp_path / "two.yaml", "axes: {seed: [0, 1]}")
    assert "two: " not in invoke("sweep", path, "--dry-run").output and "runs" not in invoke("sweep", path, "--jobs", 0).output.split("Usage")[0]


def test_ray_address_may_be_left_out(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("isoreg.sweep.sweep_on_ray", lambda plan, out, address, *rest: seen.append(address) or (_ for _ in ()).throw(ValueError("ray: seen")))
    for arguments in (["--ray"], ["--ray", "auto"], ["--ray", "ray://head:10001"], ["--ray", "--jobs", "2"]): assert invoke("sweep", *arguments, "toy", "--out", tmp_path).exit_code == 2
    assert invoke("sweep", "--ray", "toy", "--out", tmp_path).exit_code == 2 and seen == [None, "auto", "ray://head:10001", None, None]


def test_isoreg_run_leaves_a_claimed_run_alone(tmp_path):
    config = RunConfig(max_train=32, max_eval=20, epochs=1)
    with Folder(tmp_path).lock(config.key):
        result = invoke("run", "--max-train", 32, "--max-eval", 20, "--epochs", 1, "--out", tmp_path)
    assert result.exit_code == 1 and "another process" in result.output and not (tmp_path / config.key / "record.json").exists()


def test_stored_records_count_as_done(tmp_path):
    "Records go from folders to a file and back, and the sweep finds nothing to do."
    from isoreg.config import RunConfig
    from isoreg.finetune import run
    from isoreg.record import RunRecord, collect
    grid = tmp_path / "g.yaml"
    grid.write_text("fixed: {task: toy-cola, regularizer: none, max_train: 32, max_eval: 20, epochs: 1}\naxes: {seed: [0, 1]}\n")
    plan = expand(load_grid(grid))
    record = run(RunConfig.from_dict(plan.runs[0].config))
    record.save(tmp_path / "first" / record.key)
    collect(tmp_path / "first", tmp_path / "all.jsonl")
    out = tmp_path / "second"
    assert len(restore(tmp_path / "all.jsonl", plan, out, dry_run=True)) == 1 and not out.exists()
    counted = invoke("sweep", grid, "--dry-run", "--records", tmp_path / "all.jsonl", "--out", out)
    assert "2 runs: 1 done, 1 to do" in counted.output and f"done    {plan.runs[0].key}" in counted.output and not out.exists()
    assert len(restore(tmp_path / "all.jsonl", plan, out)) == 1 and not restore(tmp_path / "all.jsonl", plan, out)
    assert [Folder(out).record(r) is not None for r in plan.runs] == [True, False]
    assert RunRecord.load(out / record.key).value == record.value
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="records: .*bad.jsonl"): restore(tmp_path / "bad.jsonl", plan, out)


def test_done_runs_are_done_from_another_directory(tmp_path, monkeypatch):
    "Parameters may name folders relative to where the sweep ran; the records are of these runs wherever they are read."
    from isoreg.sweep import Folder, Run
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    config = RunConfig(task="cola", model="models/m", data_dir="data", regularizer="none")
    run = Run(config.key, "finetune", config.to_dict())
    record = {"key": config.key, "status": "done", "config": config.to_dict(), "metric": "accuracy", "value": 0.5}
    path = tmp_path / "runs" / config.key / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    assert Folder(tmp_path / "runs").record(run) is not None
    path.write_text(json.dumps(record | {"config": record["config"] | {"lr": 0.001}}))
    assert Folder(tmp_path / "runs").record(run) is None


def _search(tmp_path, seed="[100, 101]"):
    (tmp_path / "search.yaml").write_text(
        f"fixed: {{task: toy-cola}}\naxes:\n  seed: {seed}\n  task: [toy-cola, toy-rte]\n  lr: [1e-4, 5e-4]\n".replace("fixed: {task: toy-cola}\n", "")
        + "  method: [{regularizer: none}, {regularizer: istar, lam: [-0.1, 0.1]}, {regularizer: none, dropout: constant, dropout_p: 0.05}]\n")
    return expand(load_grid(tmp_path / "search.yaml"))


def test_selection_takes_the_best_mean_of_each_task_and_method(tmp_path):
    plan = _search(tmp_path)
    score = {r.key: float(v) for r, v in zip(plan.runs, np.random.default_rng(0).random(len(plan.runs)))}
    choices = choose(plan, [{"key": k, "value": v} for k, v in score.items()])
    assert len(choices) == 6 and sorted(c.candidates for c in choices) == [2, 2, 2, 2, 4, 4]
    for c in choices:
        same = [r for r in plan.runs if (r.config["task"], r.config["regularizer"], r.config["dropout"]) == (c.place["task"], *c.method)]
        means = {}
        for r in same: means.setdefault((r.config["lr"], r.config["lam"]), []).append(score[r.key])
        assert c.score == pytest.approx(max(np.mean(v) for v in means.values()))
        assert np.mean(means[c.config["lr"], c.config["lam"]]) == pytest.approx(c.score) and c.seeds == (100, 101)
    (tmp_path / "final.yaml").write_text(final_grid(choices, "0..2"))
    final = expand(load_grid(tmp_path / "final.yaml"))
    assert len(final.runs) == 18 and {r.config["seed"] for r in final.runs} == {0, 1, 2}
    for c in choices:
        assert sum({k: v for k, v in r.config.items() if k != "seed"} == c.config for r in final.runs) == 3


def test_selection_refuses_what_would_flatter(tmp_path):
    with pytest.raises(ValueError, match="seed: 3 is for final runs"): choose(_search(tmp_path, "[3, 100]"), [])
    plan = _search(tmp_path)
    with pytest.raises(ValueError, match="records: 1 of .* finish the search"): choose(plan, [{"key": r.key, "value": 0.5} for r in plan.runs[1:]])
    with pytest.raises(ValueError, match="records: no setting of toy-cola none standard has a score"): choose(plan, [{"key": r.key, "value": None} for r in plan.runs])
    choices = choose(plan, [{"key": r.key, "value": 0.5} for r in plan.runs])
    assert all(c.settings["lr"] == 1e-4 for c in choices)  # of equal ones the first of the grid
    with pytest.raises(ValueError, match="seeds: '0,1'"): final_grid(choices, "0,1")
    with pytest.raises(ValueError, match="seeds: 100 was searched on"): final_grid(choices, "99..100")


def test_select_writes_the_grid_of_the_final_runs(tmp_path):
    plan = _search(tmp_path)
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"key": r.key, "value": r.config["lr"]}) + "\n" for r in plan.runs))
    command = [str(tmp_path / "search.yaml"), str(tmp_path / "all.jsonl"), "--out", str(tmp_path / "final.yaml"), "--seeds", "0..1"]
    result = CliRunner().invoke(app, ["select", *command])
    assert result.exit_code == 0 and "different numbers of settings" in result.output, result.output
    assert {r.config["lr"] for r in expand(load_grid(tmp_path / "final.yaml")).runs} == {5e-4}
    assert CliRunner().invoke(app, ["select", str(tmp_path / "search.yaml"), str(tmp_path / "none.jsonl")]).exit_code == 2
