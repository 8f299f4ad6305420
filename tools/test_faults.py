"""What takes minutes: runs that are killed at any point, and clusters that lose a part. `nox -s long` runs it."""

import dataclasses
import os
import threading
from collections import Counter

import pytest
import sweep_stub
from sweep_stub import logged, records, stub, wait_for
from test_sweep import importable

from isoreg.experiments.grid import expand, load_grid
from isoreg.experiments.sweep import OnRay, sweep

assert importable  # a fixture, used by every test

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
POINTS = ["isoreg.trainer.token_mask", "isoreg.experiments.record.write_atomically"]
POINTS += [f"isoreg.experiments.finetune.{name}" for name in ("load_model", "_judged")]


@pytest.mark.parametrize("point", POINTS)
def test_a_real_run_killed_at_any_point_is_the_run_that_was_not(tmp_path, monkeypatch, point, whole_run):
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
    text = "notebook: finetune\nfixed: {max_train: 64, max_eval: 64, epochs: 1, recipe: toy}\naxes: {seed: [0]}\n"
    (folder / "g.yaml").write_text(text)
    plan = expand(load_grid(folder / "g.yaml"))
    assert sweep(plan, folder / "out").code == 0
    return plan, records(folder / "out")


def of_the_model(found: dict) -> dict:
    "What a record says of the model, without times."
    names = ("value", "predictions", "isoscore", "epochs", "model", "data")
    drop = ("runtime", "per_second", "seconds")
    clean = lambda x: {k: v for k, v in x.items() if not k.endswith(drop)} if isinstance(x, dict) else x
    of = lambda r: {n: [clean(e) for e in r[n]] if n == "epochs" else r[n] for n in names}
    return {key: of(r) for key, r in found.items()}


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
