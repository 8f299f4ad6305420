"""The same configuration, seed, code and machine give the same bits in any process."""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import all_kinds
import numpy as np
from forked import FORKS


def test_two_processes_give_the_same_bits(tmp_path):
    "One of them is forked: the hashes of their strings and their folders differ."
    (tmp_path / "one").mkdir()
    env = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).parent / "all_kinds.py"), str(tmp_path / "one/runs")]
    alone = subprocess.Popen(command, env=env, cwd=tmp_path / "one", stdout=subprocess.PIPE, text=True)
    with ProcessPoolExecutor(1, FORKS) as pool:
        forked = pool.submit(all_kinds.found, str(tmp_path / "two/runs")).result()
    assert json.loads(alone.communicate()[0].splitlines()[-1]) == forked
    assert all(np.isfinite(found["number"]) for found in forked.values())
