"""A run that takes as long as it is told, for tests of what goes on around runs: python sweep_stub.py GRID OUT
[OPTION=VALUE ...]"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from isoreg.files import write_atomically
from pydantic import Field

from isoreg.experiments.config import CONFIGS, Settings
from isoreg.experiments.grid import PATHS, Run, expand, load_grid
from isoreg.experiments.sweep import DiskFull, Local, sweep

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
    task: str = "a"
    seed: int = Field(0, ge=0)
    wait: float = 0.0  # seconds
    fail: str = ""  # always, once, die, kill, full; at-start, at-work, at-record, at-saving, at-end: killed there once
    log: str = ""  # file that is told of each start and each record

    @property
    def key(self):
        return (
            f"{self.task}-{self.seed}-"
            + hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        )


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
    tell(config, "start")
    kill_once(config, "start")
    folder = Path(out) / config.key
    time.sleep(config.wait)
    kill_once(config, "work")
    if config.fail == "always":
        raise ValueError("this run cannot work")
    if config.fail == "full":
        raise OSError(28, "No space left on device")
    if config.fail == "die":
        os._exit(9)
    if config.fail == "kill":
        os.write(2, b"last words")  # past the notebook, as what crashes does
        os.kill(os.getpid(), 9)
    if config.fail == "once" and not (mark := Path(config.log + config.key)).exists():
        mark.touch()
        raise ConnectionError("not at the first time")
    record = {
        "key": config.key,
        "status": "done",
        "config": config.to_dict(),
        "value": hashlib.sha256(config.key.encode()).hexdigest(),
        "total_seconds": config.wait,
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    kill_once(config, "record")
    if config.fail == "at-saving":  # the file is written, its name not yet given
        rename, os.replace = os.replace, lambda *names: kill_once(config, "saving") or rename(*names)
    write_atomically(folder / "record.json", json.dumps(record))
    tell(config, "record")
    kill_once(config, "end")
    return record


def enter(folder):
    "Make the notebook, and enter it among those that sweeps know."
    path = Path(folder) / "stub.ipynb"
    if not path.exists():
        cells = [
            {
                "cell_type": "code",
                "id": f"c{i}",
                "metadata": {"tags": ["parameters"] * (not i)},
                "source": source.strip(),
            }
            | {"outputs": [], "execution_count": None}
            for i, source in enumerate(CELLS.split("#---"))
        ]
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


if __name__ == "__main__":
    grid, out = sys.argv[1:3]
    options = {k: json.loads(v) for k, v in (a.split("=") for a in sys.argv[3:])}
    enter(Path(grid).parent)
    executor = Local(options.pop("jobs", None))
    try:
        report = sweep(expand(load_grid(grid)), out, executor, log=lambda line: print(line, flush=True), **options)
    except DiskFull as error:
        sys.exit(f"full: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if report.stopped:
        print("stopped:", report.stopped)
    sys.exit(report.code)
