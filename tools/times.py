"""Measure the processor time of the tests, file by file, and of the pages' filter, and enter both in the record of
checks, nbs/results/checks.json: python tools/times.py [WORKERS]. On a machine that does nothing else."""

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
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def children() -> float:
    "Return the processor seconds of all processes that this one has started and that have ended."
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    "Note what a test used, in this process and in those that it started; a hook of pytest."
    own, others = time.process_time(), children()
    yield
    line = [item.path.name, time.process_time() - own, children() - others]
    with open(Path(os.environ["ISOREG_TIMES"]) / str(os.getpid()), "a") as file:
        file.write(json.dumps(line) + "\n")


def timed(*command: str, **environment: str) -> dict:
    "Return the seconds of a command at the top of the project, of the clock and of processors; end where it fails."
    clock, used = time.perf_counter(), children()
    code = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET | environment).returncode
    if code:
        sys.exit(f"{' '.join(command[:3])} did not end well; nothing is written")
    return {"seconds": round(time.perf_counter() - clock), "processor": round(children() - used)}


def main(workers: str = "2"):
    "Measure, and write the record."
    from isoreg.experiments.record import git_commit, hardware

    imports = timed(sys.executable, "-c", "import isoreg.experiments.finetune")
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-p", "times", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        tests = timed(sys.executable, "-m", "pytest", *options, PYTHONPATH=path, ISOREG_TIMES=folder)
        files = defaultdict(lambda: [0, 0.0, 0.0])
        for line in (line for part in Path(folder).iterdir() for line in part.read_text().splitlines()):
            name, *used = json.loads(line)
            files[name] = [a + b for a, b in zip(files[name], (1, *used))]
    shutil.rmtree(ROOT / "_filtered", ignore_errors=True)
    pages = timed(sys.executable, str(ROOT / "site/pages.py"), "--all")
    pages["count"] = len(list((ROOT / "_filtered").iterdir()))
    tests["processor"] = round(sum(own + others for _, own, others in files.values()))
    tests |= {"workers": int(workers), "files": {n: [round(x, 1) for x in f] for n, f in sorted(files.items())}}
    record = {"date": datetime.now(UTC).date().isoformat(), "commit": git_commit(), "hardware": hardware()}
    record |= {"tests": tests, "pages": pages, "imports": imports}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
