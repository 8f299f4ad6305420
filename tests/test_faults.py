"""What goes wrong around a run: kernels that are killed at any point, disks without locks, a hub that answers rubbish,
a device without memory, a cluster that loses what it has."""

import dataclasses
import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import sweep_stub
from filelock import Timeout
from test_sweep import finish, importable, logged, records, start, stub, wait_for

import isoreg.experiments.sweep
from isoreg.experiments.config import RunConfig
from isoreg.experiments.finetune import run
from isoreg.experiments.grid import expand, load_grid
from isoreg.experiments.sweep import Folder, OnRay, sweep

assert importable  # a fixture, used by every test
LONG = pytest.mark.skipif("ISOREG_LONG" not in os.environ, reason="takes minutes; ISOREG_LONG=1 runs it")


# A kernel that is killed

POINTS = ["start", "work", "record", "saving", "end"]


def test_a_kernel_killed_at_any_point_loses_no_record_and_repeats_only_what_was_lost(tmp_path):
    more = "\n".join(f"  - {{task: c, seed: {i}, fail: at-{point}}}" for i, point in enumerate(POINTS))
    path, out = stub(tmp_path, tasks="[a]", seeds="[0]", extra=f"include:\n{more}\n"), tmp_path / "out"
    runs = expand(load_grid(path)).runs
    code, output = finish(path, out, jobs=2)
    assert code == 0, output
    expected = {r.key: 1 if r.config["fail"] in ("", "at-end") else 2 for r in runs}
    assert Counter(logged(tmp_path, "start")) == expected  # the record that was whole was not computed again
    assert set(logged(tmp_path, "record")) == set(records(out)) == set(expected)
    folder = Folder(out)
    assert all(folder.record(r) is not None for r in runs)
    assert not list(out.rglob("*.tmp")) and not list((folder.home / "part").iterdir())


KILLED_IN = """
import importlib.machinery, os
whole = importlib.machinery.SourceFileLoader.exec_module

def exec_module(self, module):
    "Let one function of isoreg kill the process at its first call."
    whole(self, module)
    place, _, name = os.environ.get("KILLED_IN", "").rpartition(".")
    if module.__name__ == place and not os.path.exists(os.environ["KILLED_MARK"]):
        def kill(*args, **kwargs):
            open(os.environ["KILLED_MARK"], "w").close()
            os.kill(os.getpid(), 9)
        setattr(module, name, kill)

importlib.machinery.SourceFileLoader.exec_module = exec_module
"""


@LONG
@pytest.mark.parametrize(
    "point",
    [
        "isoreg.experiments.finetune.load_model",
        "isoreg.trainer._penalised",
        "isoreg.experiments.finetune._fill_record",
        "isoreg.files.fsync",
    ],
)
def test_a_real_run_killed_at_any_point_is_the_run_that_was_not(tmp_path, monkeypatch, point, whole_run):
    if point == "isoreg.files.fsync":  # at saving: the file is there under another name
        point = "isoreg.experiments.record.write_atomically"
    (tmp_path / "sitecustomize.py").write_text(KILLED_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("KILLED_IN", point)
    monkeypatch.setenv("KILLED_MARK", str(tmp_path / "killed"))
    report = sweep(whole_run[0], tmp_path / "out")
    assert report.code == 0 and (tmp_path / "killed").exists()
    assert of_the_model(records(tmp_path / "out")) == of_the_model(whole_run[1])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    "The plan of one small run, and its record without a fault."
    folder = tmp_path_factory.mktemp("whole")
    fixed = "max_train: 64, max_eval: 64, epochs: 1, recipe: toy"
    (folder / "g.yaml").write_text(f"notebook: finetune\nfixed: {{{fixed}}}\naxes: {{seed: [0]}}\n")
    plan = expand(load_grid(folder / "g.yaml"))
    assert sweep(plan, folder / "out").code == 0
    return plan, records(folder / "out")


def of_the_model(found: dict) -> dict:
    "What a record says of the model, without times."
    names = ("value", "predictions", "isoscore", "epochs", "model", "data")
    drop = ("runtime", "per_second", "seconds")
    clean = lambda x: {k: v for k, v in x.items() if not k.endswith(drop)} if isinstance(x, dict) else x
    return {
        key: {n: [clean(e) for e in r[n]] if n == "epochs" else r[n] for n in names} for key, r in sorted(found.items())
    }


# A device without memory, and a process in which another training was before

SMALL = dict(task="toy-cola", max_train=64, max_eval=64, epochs=1)


def test_the_precision_of_an_earlier_training_is_not_that_of_the_next(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    config = RunConfig(**SMALL, regularizer="none", precision="fp32")
    wanted = run(config).to_dict()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as TrainingArguments(bf16=True) of transformers 4 does
    found = run(config).to_dict()
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"  # whoever set it may want it
    assert found["isoscore"] == wanted["isoscore"] and found["predictions"] == wanted["predictions"]
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    half = run(RunConfig(**SMALL, regularizer="none", precision="bf16")).to_dict()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ and half["isoscore"] != wanted["isoscore"]


# A folder whose locks are not those of a disk

NO_FLOCK = """
import fcntl, os, socket

def flock(handle, how):
    "As a network file system that lets everybody have the lock, or has none."
    if os.environ["FLOCK"] != "yes": raise OSError(int(os.environ["FLOCK"]), "no locks here")

fcntl.flock = flock
socket.gethostname = lambda: os.environ["MACHINE"]
"""


@pytest.mark.parametrize("flock", ["yes", "38"])  # granted to all, or ENOSYS
def test_two_machines_without_locks_between_them_never_do_a_run_twice(tmp_path, monkeypatch, flock):
    (tmp_path / "sitecustomize.py").write_text(NO_FLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FLOCK", flock)
    few = flock != "yes"
    path = stub(tmp_path, wait=0.2, tasks="[a]", seeds="0..1" if few else "0..5")
    runs, folder = expand(load_grid(path)).runs, Folder(tmp_path / "out")
    machines = []
    with folder.lock(runs[0].key):  # until both have begun
        for name in ("one", "two"):
            monkeypatch.setenv("MACHINE", name)
            machines.append(start(path, folder.out, jobs=1))
        assert all("to do" in p.stdout.readline() for p in machines)
    assert [p.wait(300) for p in machines] == [0, 0]
    said = [p.stdout.read() for p in machines]
    assert logged(tmp_path, "start") == sorted(r.key for r in runs) and len(records(folder.out)) == len(runs)
    assert few or all("done: " in s for s in said)
    assert not list((folder.home / "locks").glob("*.owner"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_has_claims(tmp_path, monkeypatch, number):
    def refuse(handle, how):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(isoreg.experiments.sweep.fcntl, "flock", refuse)
    with Folder(tmp_path).lock("run"):
        assert Folder(tmp_path).is_held("run")
    assert not Folder(tmp_path).is_held("run")


@pytest.fixture
def no_flock(monkeypatch):
    "A disk of which every process gets every lock."
    monkeypatch.setattr(isoreg.experiments.sweep.fcntl, "flock", lambda handle, how: None)


def owned_by(path, machine, pid=1, began="0", age=0.0):
    "The file of an owner who was last heard of some seconds ago."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{machine} {pid} {began}")
    os.utime(path, (time.time() - age,) * 2)


def test_an_owner_elsewhere_keeps_a_run_until_nothing_is_heard_of_it(tmp_path, no_flock, monkeypatch):
    folder = Folder(tmp_path)
    owner = folder.lock("run").owner
    owned_by(owner, "another", age=isoreg.experiments.sweep.LEASE / 2)
    with pytest.raises(Timeout):
        folder.lock("run").acquire()
    owned_by(owner, "another", age=isoreg.experiments.sweep.LEASE * 2)
    with folder.lock("run"):
        assert owner.read_text() == isoreg.experiments.sweep._name() and folder.is_held("run")
        with pytest.raises(Timeout):
            folder.lock("run").acquire()
    assert not owner.exists() and not folder.is_held("run")


def test_an_owner_here_is_dead_when_its_process_is(tmp_path, no_flock):
    folder, here = Folder(tmp_path), isoreg.experiments.sweep._machine()
    owner, pid = folder.lock("run").owner, os.getpid()
    began = isoreg.experiments.sweep._began(pid)
    if began == "?":
        pytest.skip("nothing here tells when a process began")
    owned_by(owner, here, pid, began)
    with pytest.raises(Timeout):
        folder.lock("run").acquire()
    owned_by(owner, here, pid, "1")  # another process had this number
    with folder.lock("run"):
        pass
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owned_by(owner, here, gone.pid, began)
    with folder.lock("run"):
        pass
    owned_by(owner, f"{here}x", pid, "1")  # of another machine, nothing is known of its processes
    with pytest.raises(Timeout):
        folder.lock("run").acquire()


def test_a_claim_is_touched_while_it_is_held_and_a_lost_one_is_left_to_its_owner(tmp_path, no_flock, monkeypatch):
    monkeypatch.setattr(isoreg.experiments.sweep, "LEASE", 0.3)
    folder = Folder(tmp_path)
    claim = folder.lock("run")
    with claim:
        os.utime(claim.owner, (0, 0))
        wait_for(lambda: claim.owner.stat().st_mtime > 1)
        owned_by(claim.owner, "another", age=1000)  # this process stood still, and another took the run
        time.sleep(0.3)
        assert claim.owner.stat().st_mtime < time.time() - 900
    assert claim.owner.read_text().startswith("another")


def test_of_many_who_find_a_dead_owner_one_has_the_run(tmp_path, no_flock):
    folder, had, begin = Folder(tmp_path), [], threading.Barrier(8)

    def ask():
        claim = folder.lock("run")
        begin.wait()
        try:
            claim.acquire()
        except Timeout:
            return
        had.append(claim)

    for _ in range(20):
        owned_by(folder.lock("run").owner, "another", age=isoreg.experiments.sweep.LEASE * 2)
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(had) == 1
        had.pop().release()


def take_in_turn(folder, end, dead, told):
    "Take a run and let go of it, or die, again and again; tell how often, and how often somebody else had it, too."
    isoreg.experiments.sweep._flock = lambda handle: True  # of everybody
    claims = twice = 0
    while time.time() < end:
        claim = Folder(folder).lock("run")
        try:
            claim.acquire()
        except (Timeout, OSError):
            continue
        claims += 1
        try:
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            twice += 1
        else:
            os.unlink(folder / "inside")
        if claims % 2:
            claim.owner.write_text(dead)  # as one leaves it who is killed
            os.close(claim.handle)
            claim.handle = claim.released.set()
        else:
            claim.release()
    told.put((claims, twice))


@LONG
def test_a_run_whose_owners_die_all_the_time_is_never_taken_twice(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    context = multiprocessing.get_context("fork")
    told, dead = context.Queue(), f"{isoreg.experiments.sweep._machine()} {gone.pid} 1"
    takers = [context.Process(target=take_in_turn, args=(tmp_path, time.time() + 25, dead, told)) for _ in range(6)]
    for taker in takers:
        taker.start()
    claims, twice = map(sum, zip(*(told.get(timeout=60) for _ in takers)))
    assert claims > 500 and twice == 0, (claims, twice)


def test_the_mark_of_one_who_died_removing_an_owner_does_not_stay(tmp_path, no_flock):
    folder = Folder(tmp_path)
    claim = folder.lock("run")
    owned_by(claim.owner, "another", age=isoreg.experiments.sweep.LEASE * 2)
    mark = claim.owner.with_suffix(".removing")
    mark.touch()
    with pytest.raises(Timeout):
        claim.acquire()  # somebody may be at it
    os.utime(mark, (0, 0))
    for _ in range(2):
        try:
            claim.acquire()
            break
        except Timeout:
            pass
    assert claim.handle is not None and not mark.exists()
    claim.release()


# A hub that is slow, or answers rubbish

HUB = """
import http.server, json, os, sys, threading, time, warnings

ANSWERS = {
    "error": (500, b"internal"), "busy": (429, b""), "html": (200, b"<html>please log in</html>"),
    "cut": (200, b'{"model_type": "bert", "hidden_'), "binary": (200, bytes(range(256))),
}

class Hub(http.server.BaseHTTPRequestHandler):
    def answer(self):
        how = next((w for w in self.path.split("/") if w in (*ANSWERS, "slow", "drop")), "cut")
        if how == "slow": time.sleep(30)
        if how in ("slow", "drop"): return
        code, content = ANSWERS[how]
        self.send_response(code)
        for k, v in {"Content-Length": len(content), "ETag": "abc", "X-Repo-Commit": "a" * 40}.items():
            self.send_header(k, str(v))
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(content)

    do_GET = do_HEAD = do_POST = answer
    def log_message(self, *arguments): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": sys.argv[1], "HF_HUB_OFFLINE": "0"}
warnings.simplefilter("ignore")
import isoreg.files
from isoreg.experiments.models import load_tokenizer, read_body, read_config

isoreg.files.HUB_SECONDS = 0.2
for how in sys.argv[2:]:
    for read in (read_config, load_tokenizer, read_body):
        try: print(json.dumps([how, "read", ""]), read(f"{how}/model"))
        except BaseException as error: print(json.dumps([how, type(error).__name__, str(error)]), flush=True)
"""


@pytest.mark.parametrize(
    "kinds",
    [
        "html cut binary drop",
        pytest.param("slow", marks=LONG),
        pytest.param("error busy", marks=LONG),
    ],
)
def test_a_hub_that_answers_rubbish_or_nothing_is_a_bad_model_by_name(tmp_path, kinds):
    command = [sys.executable, "-c", HUB, str(tmp_path), *kinds.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 3 * len(kinds.split()), done.stderr[-2000:]
    for how, kind, said in found:
        assert kind == "ValueError" and said.startswith("model: ") and f"'{how}/model'" in said, (how, kind, said)


# A cluster that loses what it has


def cluster_of(ray, monkeypatch, nodes):
    "A cluster on this machine whose nodes can be taken away, with one core each; the head has none."
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    return cluster, [cluster.add_node(num_cpus=1) for _ in range(nodes)]


def for_nodes(plan):
    "The plan with runs that bring their notebook along: a node knows none that a test has entered here."
    return dataclasses.replace(plan, runs=tuple(sweep_stub.Travelling(**vars(r)) for r in plan.runs))


def kernels_below(node) -> list:
    "The kernels that the workers of a node have started, each with its worker."
    import psutil

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    family = raylet.children(recursive=True)
    return [(p, p.parent()) for p in family if any("ipykernel" in word for word in p.cmdline())]


@LONG
@pytest.mark.parametrize("loss", ["kernel", "worker", "node"])
def test_a_sweep_outlives_what_a_cluster_loses(tmp_path, monkeypatch, loss):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    path, out = stub(tmp_path, wait=5, tasks="[a]", seeds="[0, 1]"), tmp_path / "out"
    plan, took = for_nodes(expand(load_grid(path))), []
    cluster, nodes = cluster_of(ray, monkeypatch, 2)

    def take():
        "Once a run computes, take what it computes on."
        wait_for(lambda: (tmp_path / "log").exists() and any(kernels_below(n) for n in nodes))
        node = next(n for n in nodes if kernels_below(n))
        kernel, worker = kernels_below(node)[0]
        if loss == "node":
            cluster.remove_node(node, allow_graceful=False)
        else:
            (kernel if loss == "kernel" else worker).kill()
        took.append(loss)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        report = sweep(plan, out, OnRay(cluster.address, jobs=2))
    finally:
        ray.shutdown()
        cluster.shutdown()
    thread.join(10)
    assert took == [loss] and report.code == 0 and len(records(out)) == 2
    started = Counter(logged(tmp_path, "start"))
    assert set(started.values()) <= {1, 2} and sum(started.values()) <= 3  # what was lost was done again, nothing else
    assert logged(tmp_path, "record") == sorted(records(out))


@LONG
def test_a_sweep_whose_head_is_gone_ends_and_the_next_one_goes_on(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    path, out = stub(tmp_path, wait=1, tasks="[a]", seeds="0..2"), tmp_path / "out"
    cluster, _ = cluster_of(ray, monkeypatch, 1)
    script = tmp_path / "on_ray.py"
    script.write_text(ON_RAY)
    command = [sys.executable, str(script), str(path), str(out), cluster.address]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: len(records(out)) >= 1 or first.poll() is not None)
        cluster.shutdown()
        said = first.communicate(timeout=300)[0]
    finally:
        first.kill()
    kept = records(out)
    assert first.returncode != 0 and kept, said
    cluster, _ = cluster_of(ray, monkeypatch, 1)  # the head is started again
    try:
        again = subprocess.run([*command[:-1], cluster.address], capture_output=True, text=True, timeout=300)
    finally:
        cluster.shutdown()
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(records(out)) == 3 and all(records(out)[k] == r for k, r in kept.items())
    assert all(Counter(logged(tmp_path, "start"))[k] == 1 for k in kept)


ON_RAY = """
import sys
from pathlib import Path

import sweep_stub
from test_faults import for_nodes
from isoreg.experiments.grid import expand, load_grid
from isoreg.experiments.sweep import OnRay, sweep

grid, out, address = sys.argv[1:]
sweep_stub.enter(Path(grid).parent)
plan = for_nodes(expand(load_grid(grid)))
report = sweep(plan, out, OnRay(address), retry_failed=True, log=lambda line: print(line, flush=True))
sys.exit(report.code)
"""
