"""The same configuration, seed, code and machine give the same bits, in any process and with any number of workers."""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import all_kinds
import numpy as np
import pytest
from forked import FORKS

import isoreg.experiments.finetune as finetune
from isoreg.experiments.config import RunConfig

HERE = Path(__file__).parent
KINDS = ["finetune", "pretrain", "mlm_head", "toy", "fisher", "landscape", "geometry"]


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    "What two processes found, one of them forked: the hashes of their strings and their folders differ."
    one, two = (tmp_path_factory.mktemp("kinds") for _ in range(2))
    env = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "all_kinds.py"), str(one / "runs")]
    alone = subprocess.Popen(command, env=env, cwd=one, stdout=subprocess.PIPE, text=True)
    with ProcessPoolExecutor(1, FORKS) as pool:
        forked = pool.submit(all_kinds.found, str(two / "runs")).result()
    return json.loads(alone.communicate()[0].splitlines()[-1]), forked


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_same_bits(twice, kind):
    one, two = (found[kind] for found in twice)
    assert one == two and np.isfinite(one["number"])


def test_workers_that_load_data_change_nothing(monkeypatch):
    config = RunConfig(task="toy-cola", max_train=64, max_eval=64, epochs=1)
    alone, made = finetune.run(config).to_dict(), finetune.training_arguments
    with_workers = lambda *a, **k: dataclasses.replace(made(*a, **k), dataloader_num_workers=2)
    monkeypatch.setattr(finetune, "training_arguments", with_workers)
    helped = finetune.run(config).to_dict()
    for name in ("value", "predictions", "isoscore", "epochs", "geometry"):
        drop = lambda x: [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in x]
        one, two = (drop(r[name]) if name == "epochs" else r[name] for r in (alone, helped))
        assert one == two, name
