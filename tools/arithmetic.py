"""Measure how far a small run of each kind moves where processor, threads, precision or versions are others, and put it
into the record of trust: python tools/arithmetic.py [NAME=PYTHON ...], each an environment to compare with."""

import json
import os
import subprocess
import sys
import tempfile

from trust import ROOT, enter, recorded, today


def numbers(python: str, *arguments: str, **flags: str) -> dict:
    "Return what tests/all_kinds.py prints in an environment, with these environment variables."
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": arguments[0], "PYTHONWARNINGS": "ignore"} | flags
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


# What a processor without the newer instructions computes: PyTorch, oneDNN and MKL each have their own say.
OLDER = {
    "as without AVX-512": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "as without AVX": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}


def main(environments: dict[str, str]) -> None:
    "Measure each variant against this environment, one thread and fp32, and write the record."
    model = os.environ.get("ISOREG_MODELS") and f"{os.environ['ISOREG_MODELS']}/minilm-l6-mlm"
    for which in filter(None, ("toy-bert", model)):
        label = "" if which == "toy-bert" else ", all-MiniLM-L6-v2, MLM"
        usual = numbers(sys.executable, "1", "fp32", which)
        variants = {name: (python, "1", "fp32", {}) for name, python in environments.items() if not label}
        variants |= {name: (sys.executable, "1", "fp32", flags) for name, flags in OLDER.items()}
        variants |= {"again": (sys.executable, "1", "fp32", {}), "two threads": (sys.executable, "2", "fp32", {})}
        variants["bf16"] = sys.executable, "1", "bf16", {}
        for name, (python, threads, precision, flags) in variants.items():
            other = numbers(python, threads, precision, which, **flags)
            kinds = usual if not label else ("finetune", "fisher", "landscape", "geometry")  # those that read a model
            write(name + label, python, {k: usual[k] for k in kinds}, other)


def write(name: str, python: str, usual: dict, other: dict) -> None:
    "Put a variant into the record, beside those that are there."
    change = {k: abs(other[k]["number"] / usual[k]["number"] - 1) for k in usual}
    same = [k for k in usual if other[k]["digest"] == usual[k]["digest"]]
    found = {"versions": versions(python), "relative_change": change, "same_bits": same, "date": today()}
    enter("arithmetic", {"variants": recorded("arithmetic")["variants"] | {name: found}})
    print(name, found, flush=True)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
