"""Measure how far a small run of each kind moves where threads, precision or versions are others, and put it into the
record of trust: python .ci/arithmetic.py [NAME=PYTHON ...], each an environment to compare with."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "trust.json"


def numbers(python: str, *arguments: str) -> dict:
    "Return what tests/all_kinds.py prints in an environment."
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": arguments[0], "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(ROOT / "tests" / "all_kinds.py"), f"{folder}/runs", *arguments]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions(python: str) -> str:
    "Return the versions of an environment, in words."
    code = (
        "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
    return "Python {}, torch {}, transformers {}".format(*(s.partition("+")[0] for s in said))


def main(environments: dict[str, str]) -> None:
    "Measure each variant against this environment, one thread and fp32, and write the record."
    here = sys.executable
    usual = numbers(here, "1", "fp32")
    variants = {"again": (here, "1", "fp32"), "two threads": (here, "2", "fp32"), "bf16": (here, "1", "bf16")}
    variants |= {name: (python, "1", "fp32") for name, python in environments.items()}
    model = os.environ.get("ISOREG_MODELS") and f"{os.environ['ISOREG_MODELS']}/minilm-l6-mlm"
    found = {}
    for name, (python, *arguments) in variants.items():
        other = numbers(python, *arguments)
        change = {k: abs(other[k]["number"] / usual[k]["number"] - 1) for k in usual}
        same = [k for k in usual if other[k]["digest"] == usual[k]["digest"]]
        found[name] = {"versions": versions(python), "relative_change": change, "same_bits": same}
        print(name, found[name], flush=True)
        write(found)
    if model:
        one, two = (numbers(here, threads, "fp32", model) for threads in "12")
        change = {
            k: abs(two[k]["number"] / one[k]["number"] - 1) for k in ("finetune", "fisher", "landscape", "geometry")
        }
        same = [k for k in change if one[k]["digest"] == two[k]["digest"]]
        found["two threads, MiniLM"] = {"versions": versions(here), "relative_change": change, "same_bits": same}
        print("two threads, MiniLM", found["two threads, MiniLM"], flush=True)
        write(found)


def write(found: dict) -> None:
    "Put what was measured so far into the record."
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kind": "trust"}
    record["arithmetic"] = {"date": datetime.now(UTC).date().isoformat(), "variants": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
