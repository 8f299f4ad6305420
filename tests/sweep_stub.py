"""A run that takes a given time, for tests of sweeps: python sweep_stub.py GRID OUT [OPTION=VALUE ...]"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pydantic import Field

import isoreg.experiments.sweep as room
from isoreg.experiments.config import CONFIGS, Settings
from isoreg.experiments.grid import PATHS, Run, expand, load_grid
from isoreg.experiments.sweep import Local, sweep
from isoreg.files import write_atomically

CELLS = """
task = "a"; seed = 0; wait = 0.0; fail = ""; log = ""; out = "runs"
#---
from sweep_stub import StubConfig, work
#---
record = work(StubConfig(task=task, seed=seed, wait=wait, fail=fail, log=log), out)
#---
print(record["value"], list(globals().get("left_over", [])), len(In))
left_over = [1]
"""


class StubConfig(Settings):
    task: str = "a"  # parent: starts a process
    seed: int = Field(0, ge=0)
    wait: float = 0.0  # seconds
    fail: str = ""  # always, once, die, kill; at-start, at-end: killed there once
    log: str = ""  # file with a line for each start and each record

    @property
    def key(self):
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
        return f"{self.task}-{self.seed}-{digest[:8]}"


def tell(config, word):
    if config.log:
        with open(config.log, "a") as f:
            f.write(f"{word} {config.key}\n")


def kill_once(config, where):
    "Die like a process that is killed, at the first time that a run comes to the point that it names."
    mark = Path(f"{config.log}.{config.key}")
    if config.fail == f"at-{where}" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


def work(config, out):
    if config.task == "parent":
        subprocess.Popen(["sleep", "99"])
    tell(config, "start")
    kill_once(config, "start")
    time.sleep(config.wait)
    if config.fail == "always":
        raise ValueError(" this run cannot work\n")
    if config.fail == "die":
        os._exit(9)
    if config.fail == "kill":
        os.write(2, b"last words")  # past the notebook, as a process that crashes does
        os.kill(os.getpid(), 9)
    if config.fail == "once" and not (mark := Path(config.log + config.key)).exists():
        mark.touch()
        raise ConnectionError("not at the first time")
    value, gpu = hashlib.sha256(config.key.encode()).hexdigest(), os.environ.get("CUDA_VISIBLE_DEVICES")
    record = {"key": config.key, "status": "done", "config": config.to_dict(), "kind": "stub", "value": value}
    content = json.dumps(record | {"total_seconds": config.wait, "gpu": gpu})
    write_atomically(Path(out) / config.key / "record.json", content)
    tell(config, "record")
    kill_once(config, "end")
    return record


def enter(folder):
    "Make the notebook, and enter it among those that sweeps know."
    path = Path(folder) / "stub.ipynb"
    if not path.exists():
        empty = {"cell_type": "code", "outputs": [], "execution_count": None}
        sources = [source.strip() for source in CELLS.split("#---")]
        tags = [["parameters"], *([] for _ in sources[1:])]
        cells = [empty | {"id": f"c{i}", "metadata": {"tags": tags[i]}, "source": s} for i, s in enumerate(sources)]
        kernel = {"name": "python3", "display_name": "python3", "language": "python"}
        notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        write_atomically(path, json.dumps(notebook))
    CONFIGS["stub"], PATHS["stub"] = StubConfig, path


class Travelling(Run):
    "A run that enters its notebook in the process that receives it."

    def __reduce__(self):
        return received, (str(Path(self.config["log"]).parent), vars(self))


def received(folder, fields):
    enter(folder)
    return Travelling(**fields)


# What the tests of sweeps share


def stub(folder, name="g", wait=0.05, tasks="[a, b]", seeds="[0, 1]", extra=""):
    "A grid of stub runs; its log is folder/log."
    enter(folder)
    path = folder / f"{name}.yaml"
    fixed = f"fixed: {{wait: {wait}, log: {folder / 'log'}}}"
    path.write_text(f"notebook: stub\n{fixed}\naxes: {{task: {tasks}, seed: {seeds}}}\n{extra}")
    return path


def start(path, out, **options):
    words = [f"{k}={json.dumps(v)}" for k, v in options.items()]
    command = [sys.executable, __file__, str(path), str(out), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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


if __name__ == "__main__":
    room.machine = lambda: (2, [], 8)  # without torch, whose import takes a second
    grid, out = sys.argv[1:3]
    options = {k: json.loads(v) for k, v in (a.split("=") for a in sys.argv[3:])}
    enter(Path(grid).parent)
    executor = Local(options.pop("jobs", None))
    try:
        report = sweep(expand(load_grid(grid)), out, executor, log=lambda line: print(line, flush=True), **options)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(report.code)
