"""Measure which lines and branches of each module the test suite reaches, in its workers and in the kernels and
commands that it starts, and enter them in the record of trust: python .ci/branches.py [WORKERS]."""

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


def shortened(line: str) -> str:
    "Return a line of code of at most 80 characters, cut between two words where it is longer."
    return line.strip() if len(line.strip()) < 80 else line.strip()[:80].rsplit(" ", 1)[0] + " …"


def summary(path: Path, found: dict) -> dict:
    "Return lines and branches of a module, how many are reached, and the text of those that are not."
    s, lines = found["summary"], path.read_text().splitlines()
    return {
        "lines": s["num_statements"],
        "lines_reached": s["covered_lines"],
        "branches": s["num_branches"],
        "branches_reached": s["covered_branches"],
        "missing": [shortened(lines[n - 1]) for n in found["missing_lines"]],
        "missing_branches": sorted({shortened(lines[n - 1]) for n, _ in found["missing_branches"]}),
    }


if __name__ == "__main__":
    every = {Path(name).stem: summary(ROOT / name, f) for name, f in measure(int((sys.argv[1:] or ["2"])[0])).items()}
    modules = {n: c for n, c in sorted(every.items()) if not n.startswith("_")}
    enter("coverage", {"date": today(), "modules": modules})
