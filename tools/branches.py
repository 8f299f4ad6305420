"""Measure which lines and branches of each module the test suite reaches, in its workers and in the kernels and
commands that it starts, and enter them in the record of trust: python tools/branches.py [WORKERS]."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trust import ROOT, enter, today


def measure(workers: int) -> dict[str, dict]:
    "Return, by file, what coverage says of the whole suite."
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings"
        how = "patch = subprocess, fork, _exit\nparallel = true\nbranch = true"
        settings.write_text(f"[run]\n{how}\ndata_file = {folder}/data\ninclude = {ROOT}/isoreg/*.py\n")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile"]
        for verb, *rest in (["run", *pytest], ["combine", "-q"], ["json", "-q", "-o", f"{folder}/out"]):
            command = [sys.executable, "-m", "coverage", verb, f"--rcfile={settings}", *rest]
            if subprocess.run(command, env=env, cwd=ROOT).returncode:
                sys.exit(f"{verb} did not end well; nothing is written")
        return json.loads(Path(f"{folder}/out").read_text())["files"]


def summary(found: dict) -> dict:
    "Return lines and branches of a module, and how many of them are reached."
    s = found["summary"]
    return {
        "lines": s["num_statements"],
        "lines_reached": s["covered_lines"],
        "branches": s["num_branches"],
        "branches_reached": s["covered_branches"],
    }


if __name__ == "__main__":
    every = {Path(name).stem: summary(f) for name, f in measure(int((sys.argv[1:] or ["2"])[0])).items()}
    modules = {n: c for n, c in sorted(every.items()) if not n.startswith("_")}
    enter("coverage", {"date": today(), "modules": modules})
