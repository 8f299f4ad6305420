"""Measure the processor time of the tests, file by file, and of the pages' filter, and enter both in the record of
checks, nbs/results/checks.json: python .ci/times.py [WORKERS]. On a machine that does nothing else."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "checks.json"


def children() -> float:
    "Return the processor seconds of all processes that this one has started and that have ended."
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    "As a plug-in of pytest: note what a test used, in this process and in those that it started."
    own, others = time.process_time(), children()
    yield
    line = [item.path.name, time.process_time() - own, children() - others]
    with open(Path(os.environ["ISOREG_TIMES"]) / str(os.getpid()), "a") as file:
        file.write(json.dumps(line) + "\n")


def timed(*command: str, **environment: str) -> tuple[int, dict]:
    "Run a command at the top of the project; return its exit code and its seconds, of the clock and of processors."
    clock, used = time.perf_counter(), children()
    code = subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode
    return code, {"seconds": round(time.perf_counter() - clock), "processor": round(children() - used)}


def main(workers: str = "2") -> int:
    from isoreg.record import git_commit, hardware

    with tempfile.TemporaryDirectory() as folder:
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "times", "-n", workers, "--dist", "loadfile"]
        path = os.pathsep.join([str(ROOT / ".ci"), os.environ.get("PYTHONPATH", "")])
        code, tests = timed(*pytest_command, "--no-loadscope-reorder", PYTHONPATH=path, ISOREG_TIMES=folder)
        files = defaultdict(lambda: [0, 0.0, 0.0])
        for line in (line for part in Path(folder).iterdir() for line in part.read_text().splitlines()):
            name, *used = json.loads(line)
            files[name] = [a + b for a, b in zip(files[name], (1, *used))]
    shutil.rmtree(ROOT / "_filtered", ignore_errors=True)
    _, pages = timed(str(Path(sys.executable).with_name("isoreg-pages")), "--all")
    tests |= {"workers": int(workers), "files": {n: [round(x, 1) for x in f] for n, f in sorted(files.items())}}
    pages["count"] = len(list((ROOT / "_filtered").iterdir()))
    date = datetime.now(UTC).date().isoformat()
    record = {"date": date, "commit": git_commit(), "hardware": hardware(), "tests": tests, "pages": pages}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
