"""All that a card is wanted for, in one call of 25 minutes: tests, benchmark, a further trained model, real runs.

    python tests/gpu/run_all.py --out gpu-records --data DATA --models MODELS [--wheels FOLDER]

Of the machine it needs Python, torch, transformers, accelerate and torchmetrics; what else isoreg needs is installed
from the wheels. Each step has a time limit and is a process of its own: one that fails or is cut off leaves the others
alone. `--dry` runs all of it on the processor, with tiny sizes. Every step ends in records below `--out`, and
`steps.json` says how each of them ended.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = "minilm-l6-h384"


def steps(out: Path, data: Path | None, models: Path | None, dry: bool) -> list[tuple[str, int, list[str]]]:
    "Return name, limit in seconds and command of each step, in their order."
    device = "cpu" if dry else "cuda"
    run = lambda notebook, **values: [
        *("papermill", str(ROOT / f"nbs/runs/{notebook}.ipynb"), str(out / f"{notebook}.ipynb"), "--cwd", str(ROOT)),
        *(word for name, value in values.items() for word in ("-p", name, str(value))),
    ]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/gpu/test_gpu.py")]
    tiny = dict(scale=0.02, rounds=2, seconds=0.01, only="isoscore,penalty")
    sizes = tiny if dry else dict(scale=1, rounds=5, seconds=0.2)
    found = [
        ("tests", 240, tests),
        ("benchmark", 480, run("benchmark", device=device, out=out / "benchmark", **sizes)),
    ]
    if dry:
        found.append(("head", 240, run("mlm_head", out=out / "head", steps=4, limit=64)))
        sweep = dict(task="[toy-cola]", seed="0..1", max_train=64, max_eval=32, epochs=1)
    else:
        text = ",".join(
            str(p) for p in sorted((data / "text").glob("*.*")) if p.suffix in (".txt", ".parquet", ".jsonl")
        )
        encoder = dict(model=models / MODEL, corpus=text, train_encoder=True, steps=6000, batch_size=128)
        found.append(("head", 420, run("mlm_head", out=out / "head", **encoder)))
        sweep = dict(task="[cola, mrpc, stsb]", seed="0..2", model=str(models / MODEL), data_dir=str(data))
    grid = out / "slice.yaml"
    fixed = "".join(f"  {name}: {value}\n" for name, value in sweep.items() if name not in ("seed", "task"))
    methods = "  method:\n    - {name: base, regularizer: none}\n    - {name: istar, regularizer: istar, lam: -0.1}\n"
    axes = f"axes:\n  task: {sweep['task']}\n  seed: {sweep['seed']}\n{methods}"
    grid.write_text(f"description: a slice of the second round\nfixed:\n{fixed}{axes}")
    found.append(("slice", 360, ["isoreg", "sweep", str(grid), "--out", str(out / "runs"), "--jobs", "1"]))
    return found


def ended(command: list[str], limit: int, log: Path, env: dict) -> dict:
    "Run a command for at most so many seconds; return how it ended. Its output goes to the log."
    start = time.perf_counter()
    with log.open("w") as text:
        try:
            code = subprocess.run(command, stdout=text, stderr=subprocess.STDOUT, timeout=limit, env=env).returncode
        except subprocess.TimeoutExpired:
            code = f"cut off after {limit} s"
        except FileNotFoundError as error:
            code = f"{error.filename} is not installed"
    return {"ended": code, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--data", type=Path, help="folder with glue/ and text/")
    parser.add_argument("--models", type=Path, help=f"folder with {MODEL}/")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--dry", action="store_true", help="on the processor, with tiny sizes")
    parser.add_argument("--only", nargs="*", help="steps by name; without it all")
    given = parser.parse_args()
    if not given.dry and not (given.data and given.models):
        parser.error("--data and --models: needed, but for --dry")
    given.out.mkdir(parents=True, exist_ok=True)
    device = {"ISOREG_DEVICE": "cpu"} if given.dry else {}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = os.environ | device | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if given.wheels:
        install = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(given.wheels), "--no-deps"]
        subprocess.run([*install, *map(str, sorted(given.wheels.glob("*.whl")))], check=True, env=env)
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], env=env
        )
    found = {}
    for name, limit, command in steps(given.out.resolve(), given.data, given.models, given.dry):
        if given.only and name not in given.only:
            continue
        found[name] = ended(command, limit, given.out / f"{name}.log", env)
        print(name, found[name], flush=True)
        (given.out / "steps.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any(step["ended"] != 0 for step in found.values()))


if __name__ == "__main__":
    sys.exit(main())
