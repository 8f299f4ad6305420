"""Measure the branch coverage of each module by the tests that are about it, and enter it in the record of trust:
python .ci/coverage_by_module.py [MODULE ...]. The whole suite covers more; this is what a module's own tests hold."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "trust.json"
TESTS = {  # where they have another name than the module
    "metric": ["isoscore"],
    "sequences": ["geometry"],
    "states": ["istar"],
    "trainer": ["istar"],
    "data": ["tasks"],
    "record": ["records", "finetune"],
    "models": ["finetune"],
    "card": ["finetune"],
    "notebook": ["finetune", "sweep"],
    "files": ["files", "finetune"],
}


def measure(module: str) -> dict | None:
    "Return lines and branches of a module, how many its tests reach, and the lines that they do not."
    names = TESTS.get(module, [module])
    tests = [str(path) for n in names if (path := ROOT / "tests" / f"test_{n}.py").exists()]
    if not tests:
        return None
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"COVERAGE_FILE": f"{folder}/data", "PYTHONPATH": str(ROOT)}
        only = ["--branch", f"--include={ROOT}/isoreg/{module}.py"]
        pytest = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        subprocess.run([sys.executable, "-m", "coverage", "run", *only, *pytest], env=env, cwd=ROOT)
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", f"{folder}/out"], env=env, cwd=ROOT)
        (found,) = json.loads(Path(f"{folder}/out").read_text())["files"].values()
    s = found["summary"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "lines": s["num_statements"],
        "lines_reached": s["covered_lines"],
        "branches": s["num_branches"],
        "branches_reached": s["covered_branches"],
        "missing": [text_of(module, n) for n in found["missing_lines"]],
    }


def text_of(module: str, line: int) -> str:
    "Return a line of a module, cut to what a table shows."
    return (ROOT / "isoreg" / f"{module}.py").read_text().splitlines()[line - 1].strip()[:80]


if __name__ == "__main__":
    every = sorted(p.stem for p in (ROOT / "isoreg").glob("[!_]*.py"))
    for module in sys.argv[1:] or every:
        if (found := measure(module)) is None:
            continue
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kind": "trust"}
        record.setdefault("coverage", {})[module] = found
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(module, {k: v for k, v in found.items() if k != "missing"}, flush=True)
