"""The runs of a grid: what a kill leaves, who does what."""

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import sweep_stub
from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.experiments.config import RunConfig
from isoreg.experiments.grid import Run, expand, load_grid
from isoreg.experiments.data import MissingSplit
from isoreg.experiments.notebook import KernelDied, error_name, error_words
from isoreg.experiments.sweep import (
    Folder,
    Local,
    OnRay,
    Outcome,
    _on_node,
    _receive,
    find_gpus,
    is_disk_full,
    plan_jobs,
    publish,
    restore,
    set_aside,
    status,
    sweep,
    time_left,
)

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
    return grid(
        folder / f"{name}.yaml",
        f"notebook: stub\nfixed: {{wait: {wait}, log: {folder / 'log'}}}\naxes: {{task: {tasks}, seed: {seeds}}}\n{extra}",  # noqa: E501
    )


def start(path, out, **options):
    return subprocess.Popen(
        [
            sys.executable,
            sweep_stub.__file__,
            str(path),
            str(out),
            *(f"{k}={json.dumps(v)}" for k, v in options.items()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(path, out, **options):
    process = start(path, out, **options)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def records(out):
    return {p.parent.name: json.loads(p.read_text()) for p in Path(out).glob("*/record.json")}


def logged(folder, word):
    return sorted(line.split()[1] for line in (folder / "log").read_text().splitlines() if line.startswith(word))


# Who does what, and what a death leaves


def test_every_combination_is_checked_before_one_runs(tmp_path):
    path = stub(tmp_path, seeds="[0, 1, -1]")
    code, output = finish(path, tmp_path / "out")
    assert code and "2 of 6 combinations are bad" in output and "seed: -1" in output and not (tmp_path / "out").exists()


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
        printed = "".join(
            o["text"] if isinstance(o["text"], str) else "".join(o["text"]) for o in notebook["cells"][-1]["outputs"]
        )
        assert (
            "[]" in printed and printed.split()[-1] == "6"
        )  # nothing left over from the run before: no name, and In holds "" and the five cells
    assert not any((tmp_path / "out" / ".sweep" / "part").iterdir())
    assert finish(path, tmp_path / "out")[0] == 0 and len(logged(tmp_path, "start")) == 4


def test_ten_kills_lose_nothing_and_repeat_nothing(tmp_path):
    "Each kill falls somewhere between the begin of a sweep and the third thing that its runs say, or just after it."
    rng, out = random.Random(0), tmp_path / "out"
    path = stub(tmp_path, wait=0.2, tasks="[a, b, c]", seeds="0..5")
    lines = lambda: len((tmp_path / "log").read_text().splitlines()) if (tmp_path / "log").exists() else 0
    kills = []
    for _ in range(10):
        process, goal = start(path, out, jobs=2, retry_failed=True), lines() + rng.randint(0, 3)
        wait_for(lambda: lines() >= goal or process.poll() is not None)
        time.sleep(rng.uniform(0, 0.5))
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
    assert before and "kernel" in kills
    code, output = finish(path, out, jobs=2, retry_failed=True)
    assert code == 0, output
    assert finish(path, tmp_path / "whole", jobs=2)[0] == 0
    assert records(out) == records(tmp_path / "whole") and len(records(out)) == 18
    assert all(records(out)[k] == v for k, v in before.items())
    made = [k for k in logged(tmp_path, "record")]
    assert (
        max(made.count(k) for k in set(made)) <= 2 and kills.count("sweep") >= 3
    )  # once here, once in the uninterrupted folder


ADOPTER = """
import ctypes, os, signal, subprocess, sys

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what is left alone below belongs to this process
signal.alarm(60)
starter = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
kernel = int(starter.stdout.readline())
starter.wait()
print(os.waitstatus_to_exitcode(os.waitpid(kernel, 0)[1]))
"""
STARTER = """
import os, sys, time
from pathlib import Path
from isoreg.experiments.notebook import execute

def die(kernel):
    print(kernel.pid, flush=True)
    time.sleep(float(sys.argv[3]))
    os.kill(os.getpid(), 9)

execute(Path(sys.argv[1]), sys.argv[2], {}, on_start=die)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process that adopts others is Linux's")
@pytest.mark.parametrize("seconds", [0, 4])  # before and after the kernel has its imports
def test_a_kernel_ends_with_its_parent_whoever_adopts_it(tmp_path, seconds):
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": []}
    python = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    notebook = {"cells": [cell | {"source": "import time; time.sleep(99)"}], "metadata": python}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 5}))
    argv = [sys.executable, "-c", ADOPTER, STARTER, str(tmp_path / "a.ipynb"), str(tmp_path / "b.ipynb"), str(seconds)]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "1\n"


def test_two_sweeps_share_a_folder(tmp_path):
    path = stub(tmp_path, wait=0.3, seeds="0..3", extra="include: [{task: bad, fail: die}]\n")
    bad = expand(load_grid(path)).runs[-1].key
    folder = Folder(tmp_path / "out")
    with folder.lock(bad):  # until both have begun
        one, two = start(path, tmp_path / "out", jobs=1), start(path, tmp_path / "out", jobs=1)
        assert all("to do" in p.stdout.readline() for p in (one, two))
    assert (one.wait(300), two.wait(300)) == (1, 1)
    made = logged(tmp_path, "start")
    assert (
        made.count(bad) == 2 and json.loads((folder.out / bad / "failed.json").read_text())["attempts"] == 2
    )  # two attempts, not two each
    made = [k for k in made if k != bad]
    assert len(made) == len(set(made)) == len(records(tmp_path / "out")) == 8
    said = [p.stdout.read() for p in (one, two)]
    assert (
        all("done: " in s for s in said) and sum("failed in another sweep meanwhile" in s for s in said) == 1
    )  # both had a part of it


def test_a_kernel_that_outlives_its_sweep_keeps_its_lock(tmp_path):
    path = stub(tmp_path, wait=5, tasks="[a]", seeds="[0, 1]")
    (run, other), folder = expand(load_grid(path)).runs, Folder(tmp_path / "out")
    process = start(path, folder.out, jobs=1)
    wait_for(lambda: (tmp_path / "log").exists())
    kernel = psutil.Process(process.pid).children()[0]
    kernel.suspend()  # it cannot notice that its parent is gone
    process.kill()
    process.communicate()
    assert folder.is_held(run.key) and [r["key"] for r in status(folder.out)["running"]] == [run.key]
    process = start(path, folder.out, jobs=2)
    wait_for(lambda: folder.record(other) is not None)
    assert logged(tmp_path, "start") == sorted([run.key, other.key]) and process.poll() is None  # it waits
    kernel.resume()
    kernel.wait(60)  # now it notices
    assert process.wait(300) == 0 and logged(tmp_path, "start").count(run.key) == 2 and len(records(folder.out)) == 2
    assert logged(tmp_path, "record") == sorted([run.key, other.key]) and not folder.is_held(run.key)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_workers(tmp_path, number):
    path = stub(tmp_path, wait=30)
    before = signal.signal(
        number, signal.SIG_DFL
    )  # a test run in the background of a script has SIGINT ignored, and hands that on
    try:
        process = start(path, tmp_path / "out", jobs=2)
    finally:
        signal.signal(number, before)
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2 and (tmp_path / "log").exists())
    kernels = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(300) == 130
    assert not any(k.is_running() and k.status() != "zombie" for k in kernels) and not records(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/failed.json"))


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    path = stub(tmp_path, wait=1, tasks="[a]", seeds="[0]")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        process = start(path, tmp_path / "out", jobs=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: (tmp_path / "log").exists())
    process.send_signal(signal.SIGHUP)
    assert process.wait(300) == 0 and len(records(tmp_path / "out")) == 1


def test_the_record_of_an_orphan_that_ends_just_now_is_kept(tmp_path):
    path, folder = stub(tmp_path, tasks="[a]", seeds="[0]"), Folder(tmp_path / "out")
    plan = expand(load_grid(path))
    (run,) = plan.runs
    with folder.lock(run.key):  # as the kernel of a sweep that was killed
        process = start(path, folder.out, jobs=1)
        assert "1 to do" in process.stdout.readline()
        folder.part(run.key).mkdir(parents=True)
        (folder.part(run.key) / "record.json").write_text(
            json.dumps({"key": run.key, "status": "done", "config": run.config})
        )
    assert process.wait(300) == 0 and f"found: {run.key}" in process.stdout.read()
    assert folder.record(run) is not None and not folder.part(run.key).exists() and not (tmp_path / "log").exists()


# Records


def test_records_that_cannot_be_read_are_none(tmp_path):
    path, folder = stub(tmp_path), Folder(tmp_path / "out")
    run = expand(load_grid(path)).runs[0]
    for name in ("record.json", "failed.json"):
        (folder.out / run.key / name).mkdir(parents=True)
    assert folder.record(run) is None and folder.failure(run.key) is None and run.key not in status(folder.out)["done"]


def told(plan, folder, jobs=1):
    "Tell `isoreg status` of a plan, as a sweep does that is killed at once."
    from isoreg.experiments.sweep import _look, _write_plan

    executor = Local()
    executor.jobs = jobs
    _write_plan(_look(plan, folder, executor, False, print))


def test_status_knows_each_choice_and_checks_as_the_sweep_does(tmp_path):
    path, out = stub(tmp_path), tmp_path / "out"
    plan, more = expand(load_grid(path)), expand(load_grid(path), overrides={"seed": [7]})
    assert sweep(dataclasses.replace(plan, runs=plan.runs[:1]), out).code == 0
    folder = Folder(out)
    for p in (plan, more):
        told(p, folder, jobs=5)
    s = status(out)
    assert len(s["missing"]) == 3 + 2 and len(s["grids"]) == 3 and s["done"] == [plan.runs[0].key]
    mean = records(out)[plan.runs[0].key]["total_seconds"]
    assert s["left"] == pytest.approx(5 * mean / 5)  # nothing runs, so as many as the largest sweep had
    with folder.lock(plan.runs[1].key), folder.lock(plan.runs[2].key):
        s = status(out)
        assert s["left"] == pytest.approx(5 * mean / 2) and len(s["running"]) == 2 and len(s["missing"]) == 3
    record = records(out)[plan.runs[0].key]
    for wrong in (
        record | {"config": record["config"] | {"wait": 9.0}},
        {k: v for k, v in record.items() if k != "status"},
    ):
        (out / record["key"] / "record.json").write_text(json.dumps(wrong))
        assert status(out)["done"] == [] and folder.record(plan.runs[0]) is None


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    path, out = stub(tmp_path), tmp_path / "out"
    plan = expand(load_grid(path))
    assert sweep(dataclasses.replace(plan, runs=plan.runs[:1]), out).code == 0

    def refuse(*a, **k):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("isoreg.experiments.sweep.Claim.acquire", refuse)
    monkeypatch.setattr("isoreg.experiments.sweep.tempfile.TemporaryFile", refuse)
    (Folder(out).home / "locks" / "other.claim").touch()
    assert status(out)["running"] == [] and len(status(out)["done"]) == 1
    with pytest.raises(ValueError, match="out: cannot write to .*give a folder that can be written"):
        sweep(plan, out)


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
    (out / c / "record.json").write_text(
        json.dumps(good[c] | {"config": good[c]["config"] | {"wait": 7.0}})
    )  # says its key, and other parameters
    code, output = finish(path, out, jobs=1)
    assert code == 0 and records(out) == good and output.count("record.json was of other settings or files") == 3
    assert json.loads((out / b / "record.aside-1.json").read_text())["key"] == c
    assert sorted(logged(tmp_path, "start").count(k) for k in good) == [1, 2, 2, 2]


def test_what_a_killed_attempt_said_does_not_hide_the_next_one(tmp_path):
    folder, key = Folder(tmp_path), "mine"
    says = {"part": folder.part(key), "own": folder.out / key}  # of a sweep, of isoreg run
    for place in says.values():
        place.mkdir(parents=True)
    for last in ("own", "part"):
        for stamp, name in enumerate(sorted(says, key=lambda n: n == last)):
            (says[name] / "progress.json").write_text(json.dumps({"stage": name}))
            os.utime(says[name] / "progress.json", (stamp + 1, stamp + 1))
        with folder.lock(key):
            assert status(tmp_path)["running"] == [{"key": key, "stage": last}]
    (says["part"] / "progress.json").write_text("{")  # killed while it wrote
    with folder.lock(key, "node"):
        assert status(tmp_path)["running"] == [{"key": key, "stage": "own"}]


def test_a_surface_of_other_scores_is_not_done(tmp_path, monkeypatch):
    "The key of a surface is of the path of its Fisher scores; what is in the file is told by the digest in the record."
    from isoreg.experiments.config import LandscapeConfig
    from isoreg.experiments.record import inputs_sha256

    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").mkdir()
    write = lambda value: (tmp_path / "f" / "fisher.json").write_text(json.dumps({"tensor_scores": {"a": value}}))
    write(1.0)
    config = LandscapeConfig(subset="top", fisher="f")
    path = grid(
        tmp_path / "g.yaml", "notebook: landscape\nfixed: {subset: top, fisher: f}\naxes: {direction_seed: [0, 1]}\n"
    )
    plan, folder = expand(load_grid(path)), Folder(tmp_path / "out")
    run = plan.runs[0]
    assert run.key == config.key
    old = {"key": run.key, "status": "done", "config": run.config}  # younger records say what the file held
    record, file = old | {"inputs": inputs_sha256(run.config)}, folder.out / run.key / "record.json"
    (tmp_path / "all.jsonl").write_text(json.dumps(record) + "\n")
    file.parent.mkdir(parents=True)
    stands = lambda: (
        folder.record(run) is not None,
        run.key in status(folder.out)["done"],
        restore(tmp_path / "all.jsonl", plan, tmp_path / "new", dry_run=True) == {run.key},
    )
    for planned in (False, True):
        if planned:
            told(plan, folder)
        file.write_text(json.dumps(record))
        write(1.0)
        assert stands() == (True, True, True) and set_aside(folder, run) is None
        write(2.0)
        assert stands() == (False, False, False)
        assert status(folder.out)["missing"] == ([r.key for r in plan.runs] if planned else None)
        file.write_text(json.dumps(old))
        assert stands()[:2] == (True, True)
        file.write_text(json.dumps(old | {"inputs": {}}))
        assert stands()[:2] == (True, True)
    file.write_text(
        json.dumps(record | {"config": {k: v for k, v in run.config.items() if k != "hessian"}})
    )  # older settings, filled in by the class
    assert (
        folder.record(run) is None
        and "0 done, 2 to do" in invoke("sweep", path, "--dry-run", "--out", folder.out).output
    )
    write(1.0)
    assert (
        folder.record(run) is not None
        and "1 done, 1 to do" in invoke("sweep", path, "--dry-run", "--out", folder.out).output
    )
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
    for name in ("notebook.ipynb", "full/x", "progress.json", "record.jsonab.tmp"):
        (part / name).write_text(name)
    (part / "record.json").write_text(json.dumps({"key": run.key, "status": "done", "config": run.config}))
    (folder.out / run.key / "full").mkdir(parents=True)  # left by a call that was cut before
    (folder.out / run.key / "full" / "old").write_text("old")
    (folder.out / run.key / "notebook.ipynb").write_text("old")
    report = sweep(dataclasses.replace(expand(load_grid(path)), runs=(run,)), folder.out)
    assert [o.status for o in report.done] == ["found"] and not (tmp_path / "log").exists()  # moved, not computed
    assert sorted(p.relative_to(folder.out / run.key).as_posix() for p in (folder.out / run.key).rglob("*")) == [
        "full",
        "full/x",
        "notebook.ipynb",
        "record.json",
    ]
    assert not part.exists() and (folder.out / run.key / "notebook.ipynb").read_text() == "notebook.ipynb"
    assert (
        set_aside(folder, run) is None
        and sweep(dataclasses.replace(expand(load_grid(path)), runs=(run,)), folder.out).found == 1
    )


def test_an_error_before_a_run_begins_leaves_no_claim(tmp_path, monkeypatch):
    folder, plan = Folder(tmp_path / "out"), expand(load_grid(stub(tmp_path)))
    part = folder.part(plan.runs[0].key)
    part.mkdir(parents=True)
    (part / "record.json").write_text(
        json.dumps({"key": plan.runs[0].key, "status": "done", "config": plan.runs[0].config})
    )

    def refused(*args):
        raise PermissionError("no")

    monkeypatch.setattr("isoreg.experiments.sweep.publish", refused)
    with pytest.raises(PermissionError):
        sweep(plan, folder.out)
    with folder.lock(plan.runs[0].key):
        pass


# Failures


def test_a_failure_is_told_in_the_same_words_by_both_commands():
    from papermill import PapermillExecutionError

    assert error_words(
        PapermillExecutionError(1, 1, "", "ValueError", " no \n", ["\x1b[31mTraceback\x1b[0m", "ValueError: no"])
    ) == ("ValueError: no", "Traceback\nValueError: no")
    assert error_name(PapermillExecutionError(1, 1, "", "MissingSplit", "", [])) == "ValueError"
    assert [error_name(e) for e in (MissingSplit(), OSError(), KernelDied(-9))] == [
        "ValueError",
        "OSError",
        "KernelDied",
    ]
    assert error_words(KernelDied(-9, "last words")) == (
        "KernelDied: the kernel died with signal 9 (SIGKILL): out of memory, or killed by somebody",
        "last words",
    )
    assert error_words(KernelDied(-11))[0].endswith("signal 11 (SIGSEGV)") and error_words(KernelDied(7))[0].endswith(
        "exit code 7"
    )
    try:
        raise OSError("no room")
    except OSError as error:
        message, trace = error_words(error)
    assert message == "OSError: no room" and trace.startswith("Traceback") and "raise OSError" in trace


def test_failed_run_is_reported_and_taken_up_on_demand(tmp_path):
    "What died is tried twice; what was refused is not."
    path, out = (
        stub(
            tmp_path,
            extra="include:\n  - {task: bad, fail: always}\n  - {task: shaky, fail: once}\n  - {task: dead, fail: die}\n  - {task: killed, fail: kill}\n",  # noqa: E501
        ),
        tmp_path / "out",
    )
    code, output = finish(path, out, jobs=2)
    runs = {r.config["task"]: r for r in expand(load_grid(path)).runs}
    tries = lambda: [logged(tmp_path, "start").count(runs[task].key) for task in ("bad", "shaky", "dead", "killed")]
    assert code == 1 and len(records(out)) == 5 and tries() == [1, 2, 2, 2], output
    failure, dead, killed = (
        json.loads((out / runs[task].key / "failed.json").read_text()) for task in ("bad", "dead", "killed")
    )
    assert failure["error"] == "ValueError: this run cannot work" and failure["attempts"] == 1 and dead["attempts"] == 2
    assert "def work" in failure["traceback"] or "work(" in failure["traceback"]
    assert not any((out / ".sweep" / "part").iterdir())
    assert (
        Path(failure["notebook"]) == out / runs["bad"].key / "notebook.ipynb"
        and "this run cannot work" in Path(failure["notebook"]).read_text()
    )
    assert (
        "kernel died with exit code 9" in dead["error"]
        and "SIGKILL): out of memory, or killed" in killed["error"]
        and "last words" in killed["traceback"]
    )
    s = status(out)
    assert (
        set(s["failed"]) == {runs[task].key for task in ("bad", "dead", "killed")}
        and len(s["done"]) == 5
        and s["missing"] == []
        and s["running"] == []
    )
    report = sweep(expand(load_grid(path)), out)  # a plain one reports and does not try
    assert (
        report.code == 1
        and set(report.failed) == set(s["failed"])
        and "this run cannot work" in report.failed[runs["bad"].key]["traceback"]
    )
    assert tries() == [1, 2, 2, 2]
    assert finish(path, out, jobs=1, retry_failed=True)[0] == 1 and tries() == [2, 2, 4, 4]


def test_a_failure_that_was_mended_is_forgotten(tmp_path):
    path, out = (
        stub(tmp_path, tasks="[a]", seeds="[0, 1]", extra="include: [{task: shaky, fail: once}]\n"),
        tmp_path / "out",
    )
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
    assert (
        len(records(out)) == 1 and not list(out.glob("*/failed.json")) and logged(tmp_path, "start").count(run.key) == 0
    )
    (part / "notebook.ipynb").unlink()
    assert finish(path, out, jobs=1)[0] == 0 and len(records(out)) == 4


def test_full_disk_in_the_kernel_and_before_the_start(tmp_path, monkeypatch):
    path = stub(tmp_path, tasks="[a]", seeds="[0, 1]", extra="include: [{task: b, fail: full}]\n")
    code, output = finish(path, tmp_path / "out", jobs=1)
    assert (
        code == 1
        and "stopped: the disk is full" in output
        and len(records(tmp_path / "out")) == 2
        and not list((tmp_path / "out").glob("*/failed.json"))
    )
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("isoreg.experiments.sweep.shutil.disk_usage", lambda p: usage)
    result = invoke("sweep", "toy", "--out", tmp_path / "other")
    assert result.exit_code == 1 and "the disk is full: 1 MiB are free" in result.output
    assert is_disk_full(RuntimeError("x")) is False


# What is planned for a machine


def test_workers_and_threads():
    assert plan_jobs(16) == (16, 1) and plan_jobs(16, jobs=3) == (3, 5) and plan_jobs(2, jobs=8) == (8, 1)
    assert plan_jobs(8, ram_mib=5000) == (2, 4) and plan_jobs(8, ram_mib=100) == (1, 8)
    assert (
        plan_jobs(32, gpus=2) == (2, 16)
        and plan_jobs(32, gpus=2, jobs=18) == (18, 1)
        and plan_jobs(1, gpus=4) == (1, 1)
    )
    for make in (lambda: plan_jobs(4, jobs=0), lambda: Local(0)):
        with pytest.raises(ValueError, match="jobs: 0"):
            make()


@pytest.mark.parametrize("jobs, gpus", [(2, {"0", "1"}), (3, {"0", "1"}), (None, {"0", "1"})])
def test_each_worker_has_a_gpu_in_turn(tmp_path, monkeypatch, jobs, gpus):
    "All workers are at work when the runs ask; with three workers one GPU has two of them."
    path, out = stub(tmp_path, wait=3, tasks="[a]", seeds="0..2"), tmp_path / "out"
    monkeypatch.setattr("isoreg.experiments.sweep.machine", lambda: (8, ["0", "1"], None))
    said = []
    assert sweep(expand(load_grid(path)), out, Local(jobs), log=said.append).code == 0
    asked = [r["gpu"] for r in records(out).values()]
    assert set(asked) == gpus and f"{jobs or 2} workers" in said[0] and "on 2 GPU" in said[0]


def test_gpus_are_found_without_touching_them(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'; echo '  MIG 1g.18gb Device 0: (UUID: MIG-5c)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-bb)'\n"  # noqa: E501
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == ["0", "1"]
    for given, found in (("1", ["1"]), ("GPU-aa, MIG-5c", ["GPU-aa", "MIG-5c"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert find_gpus() == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert find_gpus() == []


def test_time_left():
    a, b, c = ("finetune", "a", "m"), ("finetune", "a", "n"), ("finetune", "b", "m")
    assert time_left([], {}, 2) == 0 and time_left([a], {}, 2) is None
    assert time_left([a, a, c], {a: [10.0, 12.0, 50.0]}, 2) == (12 + 12 + 12) / 2
    assert time_left([a, b, c], {a: [10.0], c: [30.0]}, 1) == 10 + 20 + 30


def test_node_that_does_not_see_the_folder_sends_its_files(tmp_path):
    path, folder = (
        stub(tmp_path, tasks="[a]", seeds="[0]", extra="include: [{task: bad, fail: always}]\n"),
        Folder(tmp_path / "out"),
    )
    good, bad = expand(load_grid(path)).runs
    outcome = _on_node(good, str(tmp_path / "elsewhere"), "token", str(tmp_path), {})
    assert (
        outcome.status == "done"
        and set(outcome.files) == {"record.json", "notebook.ipynb"}
        and not (tmp_path / "elsewhere").exists()
    )
    _receive(folder, outcome)
    publish(folder, good)
    assert folder.record(good)["key"] == good.key
    outcome = _on_node(bad, str(tmp_path / "elsewhere"), "token", str(tmp_path), {})
    assert (outcome.status, outcome.error, set(outcome.files)) == (
        "failed",
        "ValueError: this run cannot work",
        {"notebook.ipynb"},
    )


def test_a_node_that_sees_the_folder_leaves_a_run_to_the_kernel_that_has_it(tmp_path):
    path, folder = stub(tmp_path, tasks="[a]", seeds="[0]"), Folder(tmp_path / "out")
    (run,) = expand(load_grid(path)).runs
    folder.home.mkdir(parents=True)
    (folder.home / "token").write_text("token")
    ask = lambda: _on_node(run, str(folder.out), "token", str(tmp_path), {})
    with folder.lock(run.key, "node"):
        assert ask().status == "elsewhere"
        process = start(path, folder.out, jobs=1)  # nor does a sweep of this machine take it
        wait_for(lambda: "1 to do" in process.stdout.readline())
        assert process.poll() is None and not (tmp_path / "log").exists()
        process.kill()
        process.communicate()
    outcome = ask()
    assert outcome.status == "done" and outcome.files is None and folder.record(run, part=True) is not None


class Nodes:
    "An executor whose nodes do not see the folder, as those of Ray; the first task is lost."

    jobs = 1

    def __init__(self):
        self.asked = []

    def start(self, folder, runs):
        return "on nodes"

    def submit(self, run, claim):
        from concurrent.futures import Future

        self.asked.append(run.key)
        future = Future()
        if len(self.asked) == 1:
            future.set_exception(RuntimeError("the node is gone"))
        else:
            future.set_result(_on_node(run, "/nowhere", "token", "/nowhere", {}))
        return future

    def stop(self):
        pass


def test_what_nodes_send_is_moved_into_place_and_a_lost_task_is_repeated(tmp_path):
    path, out, nodes = (
        stub(tmp_path, tasks="[a]", seeds="[0]", extra="include: [{task: bad, fail: always}]\n"),
        tmp_path / "out",
        Nodes(),
    )
    good, bad = expand(load_grid(path)).runs
    report = sweep(expand(load_grid(path)), out, nodes)
    assert nodes.asked == [good.key, good.key, bad.key] and set(records(out)) == {good.key}
    assert (
        report.failed[bad.key]["error"] == "ValueError: this run cannot work"
        and Path(report.failed[bad.key]["notebook"]).is_file()
    )
    assert not any((out / ".sweep" / "part").iterdir()) and not Folder(out).is_held(good.key)


# The real thing


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "Two real runs through the command, one worker."
    folder = tmp_path_factory.mktemp("toy")
    path = grid(folder / "two.yaml", f"fixed: {TINY}\naxes: {{regularizer: [none, istar], seed: [1]}}")
    result = subprocess.run(
        [sys.executable, "-m", "isoreg.cli", "sweep", str(path), "--out", str(folder / "out"), "--jobs", "1"],
        capture_output=True,
        text=True,
    )
    return path, folder / "out", result


TIMES = {"train_seconds", "device_seconds", "total_seconds", "started", "peak_memory_mib"}


def same(one, two):
    for name in set(one) - TIMES:
        assert one[name] == two[name], name


def test_toy_grid_from_end_to_end(toy):
    path, out, result = toy
    assert result.returncode == 0, result.stderr
    plan = expand(load_grid(path))
    assert set(records(out)) == {r.key for r in plan.runs} and "2 of 2 runs are done (2 by this sweep" in result.stdout
    assert all(
        json.loads((out / r.key / "notebook.ipynb").read_text())["metadata"]["papermill"]["exception"] is None
        for r in plan.runs
    )
    again = invoke("sweep", path, "--out", out)
    assert again.exit_code == 0 and "2 done, 0 to do" in again.output
    told = invoke("status", out, "--json")
    assert json.loads(told.stdout)["grids"]["two"]["planned"] == 2 and "2 of 2" in invoke("status", out).output
    assert invoke("status", out / "nothing").exit_code == 2


def test_runs_of_a_sweep_equal_those_of_isoreg_run_bit_for_bit(toy, tmp_path):
    path, out, _ = toy
    swept = records(out)
    plan = expand(load_grid(path))
    run = plan.runs[-1]  # now alone, by the other command
    config = {
        k: v
        for k, v in (
            ("regularizer", "istar"),
            ("lam", -0.1),
            ("seed", 1),
            ("max-train", 32),
            ("max-eval", 20),
            ("epochs", 1),
        )
    }
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "isoreg.cli",
            "run",
            "--out",
            str(tmp_path),
            *(str(x) for k, v in config.items() for x in (f"--{k}", v)),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    same(records(tmp_path)[run.key], swept[run.key])
    report = sweep(dataclasses.replace(plan, runs=(run,)), tmp_path)  # and a sweep finds what isoreg run did
    assert report.code == 0 and report.found == 1


def test_ray_gives_the_same_records(toy, tmp_path):
    pytest.importorskip("ray")
    path, out, _ = toy
    plan = expand(load_grid(path))
    report = sweep(plan, tmp_path, OnRay("local", jobs=2))
    assert report.code == 0 and len(report.done) == 2, report.failed
    mine, theirs = records(tmp_path), records(out)
    assert set(mine) == {run.key for run in plan.runs}
    for key in mine:
        same(mine[key], theirs[key])
    assert sweep(plan, tmp_path, OnRay("local")).found == 2


def test_closing_message_groups_equal_failures(tmp_path, capsys):
    from isoreg.cli import _show_report
    from isoreg.experiments.sweep import Report

    failure = {"error": "ValueError: x", "traceback": "Traceback\nValueError: x"}
    _show_report(
        Report(5, 1, [Outcome(Run("k0", "finetune", {}), "found")], {"k1": failure, "k2": failure}, empty=["k0"]),
        tmp_path,
    )
    said = capsys.readouterr()
    assert (
        said.err.count("Traceback") == 1
        and all(f"k{i}/failed.json" in said.err for i in (1, 2))
        and "2 runs" in said.err
    )
    assert "(0 by this sweep" in said.out and "without a number" in said.out
    assert invoke("sweep", "toy", "--jobs", 0, "--out", tmp_path / "none").exit_code == 2
    path = grid(tmp_path / "two.yaml", "axes: {seed: [0, 1]}")
    assert (
        "two: " not in invoke("sweep", path, "--dry-run").output
        and "runs" not in invoke("sweep", path, "--jobs", 0).output.split("Usage")[0]
    )


def test_ray_address_may_be_left_out(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "isoreg.experiments.sweep.OnRay",
        lambda address, jobs: seen.append(address) or (_ for _ in ()).throw(ValueError("ray: seen")),
    )
    for arguments in (["--ray"], ["--ray", "auto"], ["--ray", "ray://head:10001"], ["--ray", "--jobs", "2"]):
        assert invoke("sweep", *arguments, "toy", "--out", tmp_path).exit_code == 2
    assert invoke("sweep", "--ray", "toy", "--out", tmp_path).exit_code == 2 and seen == [
        None,
        "auto",
        "ray://head:10001",
        None,
        None,
    ]


def test_isoreg_run_leaves_a_claimed_run_alone(tmp_path):
    config = RunConfig(max_train=32, max_eval=20, epochs=1)
    with Folder(tmp_path).lock(config.key):
        result = invoke("run", "--max-train", 32, "--max-eval", 20, "--epochs", 1, "--out", tmp_path)
    assert (
        result.exit_code == 1
        and "another process" in result.output
        and not (tmp_path / config.key / "record.json").exists()
    )


def test_stored_records_count_as_done(tmp_path):
    "Records go from folders to a file and back, and the sweep finds nothing to do."
    from isoreg.experiments.config import RunConfig
    from isoreg.experiments.finetune import run
    from isoreg.experiments.record import RunRecord, collect

    grid = tmp_path / "g.yaml"
    grid.write_text(
        "fixed: {task: toy-cola, regularizer: none, max_train: 32, max_eval: 20, epochs: 1}\naxes: {seed: [0, 1]}\n"
    )
    plan = expand(load_grid(grid))
    record = run(RunConfig.from_dict(plan.runs[0].config))
    record.save(tmp_path / "first" / record.key)
    collect(tmp_path / "first", tmp_path / "all.jsonl")
    out = tmp_path / "second"
    assert len(restore(tmp_path / "all.jsonl", plan, out, dry_run=True)) == 1 and not out.exists()
    counted = invoke("sweep", grid, "--dry-run", "--records", tmp_path / "all.jsonl", "--out", out)
    assert (
        "2 runs: 1 done, 1 to do" in counted.output
        and f"done    {plan.runs[0].key}" in counted.output
        and not out.exists()
    )
    assert len(restore(tmp_path / "all.jsonl", plan, out)) == 1 and not restore(tmp_path / "all.jsonl", plan, out)
    assert [Folder(out).record(r) is not None for r in plan.runs] == [True, False]
    assert RunRecord.load(out / record.key).value == record.value
    stored = json.loads((tmp_path / "all.jsonl").read_text())
    later = stored | {"started": stored["started"].replace("20", "21", 1), "warnings": ["a line of its own:\u2028"]}
    lines = (json.dumps(r, ensure_ascii=False) for r in (later, stored))
    (tmp_path / "two.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    restore(tmp_path / "two.jsonl", plan, tmp_path / "third")
    assert RunRecord.load(tmp_path / "third" / record.key).warnings == later["warnings"]  # the later counts
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="records: .*bad.jsonl"):
        restore(tmp_path / "bad.jsonl", plan, out)


def test_done_runs_are_done_from_another_directory(tmp_path, monkeypatch):
    "Parameters may name folders relative to where the sweep ran; the records are of these runs wherever they are read."
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
