"""The runs of a grid: each is done once, and a kill at any moment loses no finished run."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
from command import invoke
from filelock import Timeout
from sweep_stub import finish, logged, records, start, stub, wait_for

from isoreg.experiments.config import RunConfig
from isoreg.experiments import finetune
from isoreg.experiments.grid import expand, load_grid
from isoreg.experiments.sweep import Folder, Local, OnRay, compute_on_node, environment, machine
from isoreg.experiments.sweep import plan_jobs, status, sweep


@pytest.fixture(scope="module", autouse=True)
def importable():
    "Kernels and commands find the stub and the example of a penalty."
    with pytest.MonkeyPatch.context() as patch:
        for folder in (Path(__file__).parent, Path(__file__).parent / "plugin"):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            patch.syspath_prepend(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def first(plan, count=1):
    return only(plan, *plan.runs[:count])


def only(plan, *runs):
    return dataclasses.replace(plan, runs=runs)


def copied(swept, tmp_path):
    return shutil.copytree(swept[0] / "out", tmp_path / "out")


# One sweep with all that can happen to a run

BAD = ("always", "die", "kill")
POINTS = ("start", "end")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    "Folder, plan and log lines of a sweep with duplicates, failures, and kernels killed at several points."
    folder = tmp_path_factory.mktemp("swept")
    fails = [*BAD, "once", *(f"at-{p}" for p in POINTS)]
    more = "".join(f"  - fixed: {{task: t, seed: 0, fail: {f}}}\n" for f in fails)
    path = stub(folder, extra=f"blocks:\n  - {{}}\n  - fixed: {{task: a, seed: 0}}\n{more}")
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder / "tmp"))
        said = []
        report = sweep(expand(load_grid(path)), folder / "out", Local(2), log=said.append)
    return folder, expand(load_grid(path)), report, said


def test_runs_are_done_once_and_duplicates_are_one(swept):
    folder, plan, report, said = swept
    assert plan.duplicates == 1 and report.code == 1 and len(report.done) == 7
    runs = {r.key: r for r in plan.runs}
    assert set(records(folder / "out")) == {k for k, r in runs.items() if r.config["fail"] not in BAD}
    tries = {k: logged(folder, "start").count(k) for k in runs}
    assert tries == {k: 1 if r.config["fail"] in ("", "always") else 2 for k, r in runs.items()}
    for key in records(folder / "out"):
        assert sorted(p.name for p in (folder / "out" / key).iterdir()) == ["notebook.ipynb", "record.json"]
        cells = json.loads((folder / "out" / key / "notebook.ipynb").read_text())["cells"]
        printed = "".join("".join(o["text"]) for o in cells[-1]["outputs"])
        assert "[]" in printed and printed.split()[-1] == "6"  # a fresh kernel: no name of another run, five cells


def test_a_fresh_folder_needs_no_cleaning(swept):
    "No message about leftovers, no file in the shared temporary folder, and beside each lock nothing."
    folder, plan, _, said = swept
    assert said[0].startswith("0 done, 10 to do") and all(line.split(":")[0] in ("done", "failed") for line in said[2:])
    assert not list((folder / "tmp").iterdir())
    assert {p.name for p in (folder / "out/.sweep").glob("*/*")} == {"lock"}


def test_failures_are_reported_and_done_again_on_demand(swept, tmp_path):
    folder, plan, report, _ = swept
    out = copied(swept, tmp_path)
    runs = {r.config["fail"]: r for r in plan.runs}
    failed = {f: json.loads((out / runs[f].key / "failed.json").read_text()) for f in BAD}
    assert failed["always"]["error"] == "ValueError: this run cannot work" and failed["always"]["attempts"] == 1
    trace = failed["always"]["traceback"]
    assert "work(" in trace and "\x1b" not in trace and failed["die"]["attempts"] == 2
    assert "this run cannot work" in (out / runs["always"].key / "notebook.ipynb").read_text()
    assert "kernel died with exit code 9" in failed["die"]["error"] and "last words" in failed["kill"]["traceback"]
    s = status(out)
    assert set(s["failed"]) == {runs[f].key for f in BAD} and len(s["done"]) == 7 and s["missing"] == s["running"] == []
    before = len(logged(folder, "start"))
    again = sweep(plan, out)
    assert again.found == 7 and set(again.failed) == set(s["failed"]) and len(logged(folder, "start")) == before
    sweep(only(plan, runs["always"]), out, retry_failed=True)
    assert len(logged(folder, "start")) == before + 1
    (out / runs["once"].key / "failed.json").write_text(json.dumps({"key": runs["once"].key, "error": "x"}))
    (out / runs["once"].key / "record.json").unlink()
    assert sweep(only(plan, runs["once"]), out, report.executor, retry_failed=True).code == 0  # which has ended before
    assert not (out / runs["once"].key / "failed.json").exists()


def test_status_checks_as_the_sweep_does(swept, tmp_path):
    folder, plan, _, _ = swept
    out, done = copied(swept, tmp_path), [r for r in plan.runs if not r.config["fail"]]
    file = out / done[0].key / "record.json"
    record = json.loads(file.read_text())
    for content in (json.dumps({k: v for k, v in record.items() if k != "status"}), "{", file.read_text()[:40]):
        file.write_text(content)
        assert status(out)["missing"] == [done[0].key] and Folder(out).record(done[0]) is None
    file.write_text(json.dumps(record | {"config": record["config"] | {"wait": 9.0}}))
    assert Folder(out).record(done[0]) is None
    file.unlink()
    with Folder(out).lock(done[0].key):
        s = status(out)
        assert [r["key"] for r in s["running"]] == [done[0].key] and s["missing"] == []
        with pytest.raises(Timeout):
            Folder(out).lock(done[0].key).acquire()
    assert status(out)["running"] == [] and len(status(out)["done"]) == 6
    sweep(first(plan, 2), out)  # another choice of runs takes none of those away
    bad = {r.key for r in plan.runs if r.config["fail"] in BAD}
    assert set(status(out)["failed"]) == bad
    with Folder(out).lock(min(bad)):  # it is tried again
        assert set(status(out)["failed"]) == bad - {min(bad)}


def test_the_time_left_is_that_of_the_rounds_of_what_runs(tmp_path):
    plan, folder = expand(load_grid(stub(tmp_path, seeds="0..3"))), Folder(tmp_path / "out")
    for run, seconds in zip(plan.runs, (10, 30)):
        record = {"key": run.key, "status": "done", "config": run.config, "kind": "stub", "total_seconds": seconds}
        (folder.out / run.key).mkdir(parents=True)
        (folder.out / run.key / "record.json").write_text(json.dumps(record))
    assert status(folder.out)["left"] is None  # nothing runs
    with folder.lock(plan.runs[2].key), folder.lock(plan.runs[3].key):
        (folder.home / "grid-x.json").write_text(json.dumps({run.key: str(run) for run in plan.runs[:7]}))
        assert status(folder.out)["left"] == 3 * 20  # 5 runs, 2 at a time


# A kill at any moment


def test_kills_lose_nothing_and_repeat_nothing(tmp_path):
    "Each kill falls somewhere between the begin of a sweep and the third thing that its runs log, or just after it."
    rng, out, kills, begun = random.Random(0), tmp_path / "out", [], {}
    path = stub(tmp_path, wait=0.2, tasks="[a, b]", seeds="0..3")

    def lines():
        return len((tmp_path / "log").read_text().splitlines()) if (tmp_path / "log").exists() else 0

    for _ in range(6):
        process, goal = start(path, out, jobs=2, retry_failed=True), lines() + rng.randint(0, 3)
        wait_for(lambda: lines() >= goal or process.poll() is not None)
        time.sleep(rng.uniform(0, 0.5))
        kernels = psutil.Process(process.pid).children() if process.poll() is None else []
        if kernels and rng.random() < 0.5:
            rng.choice(kernels).kill()
            time.sleep(rng.uniform(0, 1))
        kills.append(process.poll() is None)
        process.kill()  # the next sweep starts at once, while kernels may still be alive
        process.communicate()
        for k in records(out):  # what is published is never begun again
            begun.setdefault(k, logged(tmp_path, "start").count(k))
    before = records(out)
    code, output = finish(path, out, jobs=2, retry_failed=True)
    assert code == 0 and before and sum(kills) >= 3, output
    assert len(records(out)) == 8 and all(records(out)[k] == v for k, v in before.items())
    assert begun.keys() == before.keys()
    assert all(logged(tmp_path, "start").count(k) == n for k, n in begun.items())
    assert {p.name for p in (out / ".sweep").glob("*/*")} == {"lock"}


class Killed(BaseException):
    pass


CONTENTS = {"nothing": {}, "a failure": {"failed.json": "old"}, "a record": {"record.json": "old", "more": "old"}}


@pytest.mark.parametrize("old", CONTENTS.values(), ids=CONTENTS)
def test_publishing_can_be_killed_at_any_step(tmp_path, monkeypatch, old):
    "Whoever takes the lock next finds the old content or the new, and both are whole."
    run = expand(load_grid(stub(tmp_path))).runs[0]
    seen = set()
    for step in range(8):
        folder, calls = Folder(tmp_path / f"out{step}"), []
        for name, text in old.items():
            (folder.out / run.key).mkdir(parents=True, exist_ok=True)
            (folder.out / run.key / name).write_text(text)

        def dies(action):
            def step_or_die(*arguments, **options):
                calls.append(action)
                if len(calls) > step:
                    raise Killed
                return action(*arguments, **options)

            return step_or_die

        with folder.lock(run.key), monkeypatch.context() as patch:
            part = folder.begin(run)
            (part / run.key).mkdir()
            (part / run.key / "record.json").write_text("new")
            (part / run.key / "notebook.ipynb").write_text("new")
            for place, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree"), (Path, "rename")):
                patch.setattr(place, name, dies(getattr(place, name)))
            try:
                folder.publish(run, part)
            except Killed:
                pass
        with folder.lock(run.key):
            shutil.rmtree(folder.begin(run))
        found = {p.name: p.read_text() for p in (folder.out / run.key).glob("*")}
        new = {"record.json": "new", "notebook.ipynb": "new"}
        assert found in (old, new), step
        seen.add(found == new)
        assert {p.name for p in (folder.home / run.key).iterdir()} == {"lock"}
    assert seen == {True, False}


class Fake:
    "An executor that writes files, and no notebook runs."

    jobs = 1

    def __init__(self, *files):
        self.files, self.asked = list(files), []

    def start(self):
        return "nowhere"

    def compute(self, run, part):
        self.asked.append(run.key)
        (part / run.key).mkdir()
        for name, content in self.files.pop(0).items():
            (part / run.key / name).write_text(content)

    def stop(self):
        pass


def test_a_record_beside_an_empty_notebook_is_not_done(tmp_path):
    "A kill between the record and papermill's last write leaves such a folder."
    plan, folder = first(expand(load_grid(stub(tmp_path)))), Folder(tmp_path / "out")
    (run,) = plan.runs
    record = json.dumps({"key": run.key, "status": "done", "config": run.config, "kind": "stub", "value": 1})
    half = {"record.json": record, "notebook.ipynb": ""}
    assert "without a record" in sweep(plan, folder.out, Fake(half)).failed[run.key]["error"]
    whole = half | {"notebook.ipynb": '{"cells": []}'}
    report = sweep(plan, folder.out, Fake(whole), retry_failed=True)
    assert report.code == 0 and folder.record(run) and report.done == status(folder.out)["done"]
    for damage in ("", '{"cells": ['):
        (folder.out / run.key / "notebook.ipynb").write_text(damage)
        assert folder.record(run) is None and status(folder.out)["done"] == []


def test_a_failure_is_put_beside_the_record_of_earlier_files_and_takes_nothing_away(tmp_path):
    plan, folder = first(expand(load_grid(stub(tmp_path)))), Folder(tmp_path / "out")
    place = folder.out / plan.runs[0].key
    place.mkdir(parents=True)
    for name in ("record.json", "model.safetensors"):
        (place / name).write_text("{}")
    assert sweep(plan, folder.out, Fake({"notebook.ipynb": "{}"})).failed
    assert {p.name for p in place.iterdir()} == {"record.json", "model.safetensors", "failed.json"}
    assert {p.name for p in (folder.home / place.name).iterdir()} == {"lock"}


def test_a_node_sends_the_files_of_a_run(tmp_path):
    extra = "blocks: [{}, {fixed: {task: bad, seed: 0, fail: always}}]\n"
    plan = expand(load_grid(stub(tmp_path, tasks="[a]", seeds="[0]", extra=extra)))
    (good, sent), (bad, kept) = [compute_on_node(run, "/nowhere", {}) for run in plan.runs]
    assert good is None and set(sent) == {"record.json", "notebook.ipynb"} and set(kept) == {"notebook.ipynb"}
    assert bad["error"] == "ValueError: this run cannot work" and bad["attempts"] == 1


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
    time.sleep(3)
    os.kill(os.getpid(), 9)

execute(Path(sys.argv[1]), sys.argv[2], {}, on_start=die)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process that adopts others is Linux's")
def test_a_kernel_ends_with_its_parent_and_leaves_no_file(tmp_path, monkeypatch):
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": []}
    python = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    notebook = {"cells": [cell | {"source": "import time; time.sleep(99)"}], "metadata": python}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 5}))
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    argv = [sys.executable, "-c", ADOPTER, STARTER, str(tmp_path / "a.ipynb"), str(tmp_path / "b.ipynb")]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "1\n"
    assert not list((tmp_path / "t").iterdir())


def test_two_sweeps_share_a_folder(tmp_path):
    path, folder = stub(tmp_path, wait=0.3), Folder(tmp_path / "out")
    with folder.lock(expand(load_grid(path)).runs[0].key):  # until both have begun
        one, two = start(path, folder.out, jobs=1), start(path, folder.out, jobs=1)
        assert all("to do" in p.stdout.readline() for p in (one, two))
    assert (one.wait(300), two.wait(300)) == (0, 0)
    made = logged(tmp_path, "start")
    assert len(made) == len(set(made)) == len(records(folder.out)) == 4
    assert all("done: " in p.stdout.read() for p in (one, two))


@pytest.mark.parametrize("retry_failed", [False, True])
def test_a_run_that_failed_for_another_sweep_meanwhile_is_not_tried_again(tmp_path, retry_failed):
    plan, out, wrong = first(expand(load_grid(stub(tmp_path)))), tmp_path / "out", {"notebook.ipynb": ""}
    if retry_failed:
        sweep(plan, out, Fake(wrong))

    class Late(Fake):
        def start(self):  # after the look at the folder
            sweep(plan, out, other, retry_failed=retry_failed)
            return "late"

    late, other = Late(wrong), Fake(wrong)
    report = sweep(plan, out, late, retry_failed=retry_failed)
    assert len(other.asked) == 1 and not late.asked and "without a record" in report.failed[plan.runs[0].key]["error"]


def test_an_interrupt_ends_the_workers_and_what_they_started(tmp_path):
    path = stub(tmp_path, wait=30, tasks="[parent]")
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # is handed on
    try:
        process = start(path, tmp_path / "out", jobs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for(lambda: (tmp_path / "log").exists() and len(logged(tmp_path, "start")) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert [p.name() for p in family].count("sleep") == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 30)
    assert not records(tmp_path / "out") and not list((tmp_path / "out").glob("*/failed.json"))


# Folders, disks and records


def test_an_error_before_a_run_begins_leaves_no_lock(tmp_path):
    folder, plan = Folder(tmp_path / "out"), expand(load_grid(stub(tmp_path)))
    with pytest.raises(IndexError):
        sweep(plan, folder.out, Fake())
    assert status(folder.out)["running"] == []


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_and_a_full_quota_are_the_same(tmp_path, words):
    class Full(Fake):
        def compute(self, run, part):
            return {"error": f"OSError: [Errno 122] {words}"}

    with pytest.raises(OSError, match=words):
        sweep(expand(load_grid(stub(tmp_path))), tmp_path / "out", Full())
    assert not list((tmp_path / "out").glob("*/failed.json"))


def test_a_run_whose_files_changed_is_not_done(tmp_path, monkeypatch):
    "The key of a surface is of the path of its Fisher scores; the digest in the record is of their content."
    from isoreg.experiments.record import inputs_sha256

    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").mkdir()

    def write(value):
        (tmp_path / "f" / "fisher.json").write_text(json.dumps({"tensor_scores": {"a": value}}))

    write(1.0)
    (tmp_path / "g.yaml").write_text("notebook: landscape\nfixed: {subset: top, fisher: f}\n")
    (run,), folder = expand(load_grid(tmp_path / "g.yaml")).runs, Folder(tmp_path / "out")
    old = {"key": run.key, "status": "done", "config": run.config, "kind": "landscape"}
    record, file = old | {"inputs": inputs_sha256(run.config)}, folder.out / run.key / "record.json"
    file.parent.mkdir(parents=True)
    younger = record | {"config": {k: v for k, v in run.config.items() if k != "hessian"}}  # filled in by the class
    for content, value, done in ((record, 1, True), (record, 2, False), (old, 2, True), (younger, 1, True)):
        file.write_text(json.dumps(content))
        write(float(value))
        assert (folder.record(run) is not None) == (run.key in status(folder.out)["done"]) == done
    file.write_text(json.dumps(record))
    write(2.0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the file is not found from here: the record counts
    assert folder.record(run) is not None


# Machines


def test_workers_and_threads():
    assert plan_jobs(16, jobs=3) == (3, 5) and plan_jobs(2, jobs=8) == (8, 1) and plan_jobs(8, memory=0.1) == (1, 8)
    assert plan_jobs(32, gpus=2, jobs=18) == (18, 1) and plan_jobs(1, gpus=4) == (1, 1)


@pytest.mark.parametrize("given, threads", [("", 4), ("2", 2), ("8", 4), ("2,1", 2)])
def test_the_threads_of_a_user_are_a_limit_for_each_worker(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    assert {environment(4)[name] for name in names} == {str(threads)}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert environment(4)["GLIBC_TUNABLES"] == "glibc.malloc.check=0"


def test_each_worker_has_a_gpu_in_turn(tmp_path, monkeypatch):
    "All workers are at work when the runs ask; with three workers one GPU has two of them."
    path, out, said = stub(tmp_path, wait=3, tasks="[a]", seeds="0..2"), tmp_path / "out", []
    monkeypatch.setattr("isoreg.experiments.sweep.machine", lambda: (8, ["0", "1"], 64))
    assert sweep(expand(load_grid(path)), out, Local(3), log=said.append).code == 0
    assert {r["gpu"] for r in records(out).values()} == {"0", "1"} and "3 workers" in said[1] and "2 GPUs" in said[1]
    assert "2 workers" in Local().start()


@pytest.mark.parametrize(
    "given, found", [(None, ["0", "1"]), ("1,0", ["1", "0"]), ("GPU-aa,MIG-5c", ["GPU-aa", "MIG-5c"])]
)
def test_gpus_have_the_names_that_the_user_gave_them(monkeypatch, given, found):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert machine()[1] == found


# Real runs


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "Two real runs through the command, one of them with a penalty from another package; one worker."
    folder = tmp_path_factory.mktemp("toy")
    path = folder / "two.yaml"
    fixed = "{max_train: 32, max_eval: 20, epochs: 1, seed: 1}"
    methods = "{regularizer: 'isoreg_example:LengthPenalty', lam: 0.2}, {regularizer: istar, lam: -0.1}"
    path.write_text(f"fixed: {fixed}\naxes: {{method: [{methods}]}}")
    command = [sys.executable, "-m", "isoreg.cli", "sweep", str(path), "--out", str(folder / "out"), "--jobs", "1"]
    return path, folder / "out", subprocess.run(command, capture_output=True, text=True)


TIMES = {"train_seconds", "device_seconds", "total_seconds", "started", "peak_memory_mib"}


def same(one, two, but=()):
    one, two = ({k: v for k, v in record.items() if k not in (*TIMES, *but)} for record in (one, two))
    assert one == two


def test_toy_grid_from_end_to_end(toy, tmp_path):
    path, out, result = toy
    assert result.returncode == 0, result.stderr
    plan = expand(load_grid(path))
    assert set(records(out)) == {r.key for r in plan.runs} and "2 of 2 runs are done (2 by this sweep" in result.stdout
    again = invoke("sweep", path, "--out", out)
    assert again.exit_code == 0 and "2 done, 0 to do" in again.output
    assert len(json.loads(invoke("status", out, "--json").stdout)["done"]) == 2
    assert invoke("status", out).exit_code == 0 and invoke("status", out / "nothing").exit_code == 2
    assert invoke("report", out, "--out", tmp_path).exit_code == 0
    assert "LengthPenalty λ=0.2" in (tmp_path / "summary.md").read_text()


def test_runs_of_a_sweep_equal_those_of_the_library_bit_for_bit(toy, tmp_path):
    path, out, _ = toy
    plan = expand(load_grid(path))
    last = plan.runs[-1]
    finetune.run(RunConfig(**last.config)).save(tmp_path / last.key)
    same(records(tmp_path)[last.key], records(out)[last.key], but=["warnings"])  # of the kernel


def test_ray_gives_the_same_record(toy, tmp_path):
    ray = pytest.importorskip("ray")
    path, out, _ = toy
    last = expand(load_grid(path)).runs[-1]
    report = sweep(only(expand(load_grid(path)), last), tmp_path, OnRay("local", jobs=2))
    ray.shutdown()
    assert report.code == 0 and report.done == [last.key], report.failed
    same(records(tmp_path)[last.key], records(out)[last.key])


@pytest.mark.parametrize("given, address", [("", "local"), ("ray://head:10001", "ray://head:10001")])
def test_ray_starts_a_cluster_or_takes_that_of_its_address(monkeypatch, given, address):
    ray = MagicMock()
    ray.is_initialized.return_value, ray.cluster_resources.return_value = False, {"CPU": 3, "GPU": 2}
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")  # so that it is put back
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert "4 tasks at a time" in OnRay(jobs=4).start() and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ray.init.call_args.args == (address,)
    ray.remote.return_value.options.assert_called_with(num_cpus=1, num_gpus=0.5, max_retries=3)


def test_runs_in_a_file_of_records_count_as_done_if_they_are_records_of_the_grid(tmp_path, monkeypatch):
    plan, seen = expand(load_grid("toy")), []
    good = [
        {"key": r.key, "status": "done", "config": r.config, "metric": "m", "value": 0.5, "total_seconds": 50.0}
        for r in plan.runs[2:]
    ]
    failed = {"key": plan.runs[0].key, "status": "failed", "config": plan.runs[0].config}
    other = {**good[0], "key": plan.runs[1].key, "config": {**plan.runs[1].config, "lr": 0.9}}
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, [*good, failed, other])) + "\n\n")
    monkeypatch.setattr("isoreg.cli._sweep", lambda plan, *a: seen.extend(plan.runs) or sys.exit(0))
    given = ["sweep", "toy", "--out", tmp_path, "--records", tmp_path / "r.jsonl"]
    assert f"{len(plan.runs)} runs: {len(good)} done, 2 to do" in invoke(*given).stdout
    assert [run.key for run in seen] == [run.key for run in plan.runs[:2]]
    assert "about 1.7 min" in invoke(*given, "--dry-run").stdout
    new = ["sweep", "toy", "--out", tmp_path / "new", "--dry-run"]
    assert "the whole grid takes about 2.7 core minutes" in invoke(*new).stdout  # as the head of its file says
    (tmp_path / "r.jsonl").write_text("[1]\n")
    result = invoke(*given)
    assert result.exit_code == 2 and "r.jsonl line 1 is no record" in result.stderr


def test_isoreg_run_leaves_a_run_alone_that_another_process_has(tmp_path):
    config = RunConfig(max_train=32, max_eval=20, epochs=1)
    with Folder(tmp_path).lock(config.key):
        result = invoke("run", "--max-train", 32, "--max-eval", 20, "--epochs", 1, "--out", tmp_path)
    assert result.exit_code == 2 and "lock" in result.stderr
    assert not (tmp_path / config.key / "record.json").exists()
