"""The GPU programme: all that waits for a card, in one command, for a machine without a network.

    python tools/gpu.py pack MODEL DATA            # here: fills .gpu/ with folders of at most 40 MB
    python3 tools/gpu.py go OUT --seconds 560      # there, with the tree and these folders: all stages in turn
    python tools/gpu.py take OUT                   # here: what came back goes into nbs/results

The weights travel in float16 and in parts, and are checked. The next card goes on where this one stopped.
`ISOREG_DEVICE=cpu python tools/gpu.py go OUT --dry` tries every stage on a processor, with tiny sizes.
"""

import argparse
import builtins
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import types
import zipfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU, RESULTS, BUILT = ROOT / ".gpu", ROOT / "nbs/results", ROOT / "build/gpu"  # BUILT: what was unpacked
PLAN = "fd39e41a3d7389bd0478c3be8b2160415afb81af"  # commit of the plan: every counted run is of its code
MODEL, PARTS, WORKERS = "models/all-mpnet-base-v2", 6, 14
WHEELS = (
    "datasets evaluate transformers dill multiprocess fastcore pydantic pydantic-core annotated-types "
    "typing-inspection".split()
)
RIVALS = (  # of the benchmark
    "opacus==1.6.0 IsoScore==2.0.1 backpack-for-pytorch==1.7.1 loss-landscapes==3.0.6 nngeometry==0.4 opt-einsum "
    "einops unfoldnd".split()
)
STAGES = {"tests": 90, "benchmark": 240, "shared": 90, "primary": 3600, "head": 150, "rest": 3600}  # seconds at most
OF_PLAN = ("primary", "head", "rest")  # stages that import the code of the plan, which has no packages, not today's
ON_GPU = {"length_groups": 1}  # in place of the grids' 4, which is for processors
TINY = {"max_train": 32, "max_eval": 32, "epochs": 1, "max_length": 16}


def pack(model: Path, data: Path) -> None:
    "Fill .gpu/ with what a machine without a network needs: folder 0 and six parts of the weights."
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from safetensors.torch import load_file, save

    shutil.rmtree(GPU, ignore_errors=True)
    small = GPU / "0"
    (small / "wheels").mkdir(parents=True)
    code = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", PLAN], capture_output=True, text=True, check=True
    ).stdout.strip()
    files = ["isoreg", "nbs/grids", "nbs/results/mpnet_scores.json", "nbs/runs", "tools"]
    subprocess.run(["git", "-C", ROOT, "archive", "-o", small / "code.tar", code, *files], check=True)
    (small / "commit").write_text(code)
    today = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    (small / "today").write_text(today.stdout.strip())
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (17, 27, 28)] + ["--platform=manylinux2014_x86_64"]
    wanted = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    where = ["-c", ROOT / "constraints.txt", "-d", small / "wheels"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted, *where, *WHEELS, *RIVALS], check=True)
    shutil.copytree(ROOT / "base-data", small / "base-data")
    texts = []
    for name, n in {"wikipedia": 1500, "books": 600, "other": 600}.items():
        texts += pq.read_table(data / f"text/{name}.parquet")["text"].to_pylist()[:n]
    mixed = np.random.default_rng(0).permutation(len(texts))  # the last ones, held out, are of all three files
    table = pa.table({"text": [texts[i] for i in mixed]})
    pq.write_table(table, small / "base-data/head_texts.parquet", compression="zstd", compression_level=19)
    shutil.copytree(model, small / "model", ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx", "onnx"))
    halves = {k: v.half() if v.dtype == torch.float32 else v for k, v in load_file(model / "model.safetensors").items()}
    weights = save(halves)
    (small / "sha256").write_text(hashlib.sha256(weights).hexdigest())
    size = -(-len(weights) // PARTS)
    for i in range(PARTS):
        (GPU / str(i + 1)).mkdir()
        (GPU / str(i + 1) / "weights").write_bytes(weights[i * size : (i + 1) * size])
    for folder in sorted(GPU.iterdir()):
        print(folder.name, f"{sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1e6:.1f} MB")


def unpack() -> str:
    "Put the parts together, and return the commit of the code. `SystemExit` for weights that are not the packed ones."
    small, model = GPU / "0", BUILT / MODEL
    if not (model / "model.safetensors").is_file():
        weights = b"".join((GPU / str(i + 1) / "weights").read_bytes() for i in range(PARTS))
        if hashlib.sha256(weights).hexdigest() != (small / "sha256").read_text():
            sys.exit("weights: the parts do not have the sha256 of what was packed; send them again")
        shutil.copytree(small / "model", model, dirs_exist_ok=True)
        (model / "model.safetensors").write_bytes(weights)
    shutil.copytree(small / "base-data", BUILT / "base-data", dirs_exist_ok=True)
    with tarfile.open(small / "code.tar") as code:
        code.extractall(BUILT, filter="data")
    for wheel in (small / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(BUILT / "site")
    return (small / "commit").read_text()


def go(out: Path, seconds: float, dry: bool, only: list[str]) -> None:
    "Do the stages in turn until the time is up; each has a limit of its own, and what it started ends with it."
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    print("code of the counted runs:", unpack(), flush=True)
    for name, limit in STAGES.items():
        if only and name not in only:
            continue
        if not dry and name not in ("tests", "benchmark"):
            share_card("-d")
        left = min(3600 if dry else limit, end - time.monotonic())
        if left < 20:
            print("no time for", name)
            continue
        code = BUILT if name in OF_PLAN else ROOT
        paths = [str(code), str(code / "tools"), *([] if dry else [str(BUILT / "site")])]  # the wheels fit its Python
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, name, str(out), f"--seconds={left - 10}", *["--dry"] * dry]
        start = time.monotonic()
        with open(out / "log.txt", "a") as log:
            print("==", name, file=log, flush=True)
            stage = subprocess.Popen(command, cwd=BUILT, env=env, stdout=log, stderr=log, start_new_session=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                stage.wait(left)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stage.pid, signal.SIGKILL)
        print(f"{name}: {stage.wait()}, {time.monotonic() - start:.0f} s", flush=True)
    if not dry:
        share_card(input="quit\n")
    print("\n".join((out / "log.txt").read_text().splitlines()[-60:]))


def share_card(*arguments: str, **options) -> None:
    "Tell NVIDIA's multi-process service to begin or to end: with it several processes share the card's time better."
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["nvidia-cuda-mps-control", *arguments], check=False, text=True, **options)


def tests(out: Path, end: float, dry: bool) -> None:
    "Run what the tests say of a card."
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/test_gpu.py")]
    sys.exit(subprocess.run(command).returncode)


def benchmark(out: Path, end: float, dry: bool) -> None:
    "Run the cells of the benchmark's notebook, without a kernel, and keep its record."
    shown = types.ModuleType("IPython.display")
    shown.Markdown = shown.display = str
    sys.modules |= {"IPython": types.SimpleNamespace(get_ipython=lambda: None), "IPython.display": shown}
    builtins.get_ipython = lambda: None  # as a kernel has it
    names = {"__name__": "__main__"}
    works = "isoscore,gradient,penalty,run,fisher,landscape"
    given = dict(device="cpu" if dry else "cuda", only=works, out=str(out / "benchmark"))
    given |= {} if dry else dict(scale=2.0, rounds=3, seconds=0.05, stop=end - time.monotonic() - 60)
    for cell in json.loads((ROOT / "nbs/runs/benchmark.ipynb").read_text())["cells"]:
        if cell["cell_type"] != "code" or "find_spec" in "".join(cell["source"]):
            continue
        exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names |= given


def shared(out: Path, end: float, dry: bool) -> None:
    "Time sixteen short runs side by side: all of the baseline, twice, and then all with I-STAR."
    short = dict(task="cola", data_dir="base-data", model=MODEL, epochs=1, max_train=1024, max_eval=256, lr=3e-5)
    short |= dict(precision="fp32") | TINY if dry else dict(precision="bf16")
    found: dict[str, list] = {}
    with ProcessPoolExecutor(2 if dry else 16, multiprocessing.get_context("spawn"), quiet) as pool:
        for name in ("first", "none", "istar"):  # the first ones load what the others use
            penalty = dict(regularizer="istar", lam=-0.1) if name == "istar" else dict(regularizer="none")
            runs = [short | penalty | dict(seed=seed) for seed in range(2 if dry else 16)]
            found[name] = list(pool.map(seconds_of, runs, timeout=max(1.0, end - time.monotonic())))
            (out / "shared_gpu.json").write_text(json.dumps({"seconds": found, "config": short}) + "\n")


def seconds_of(config: dict) -> float:
    "Do a run with the code of today, and return how long it took."
    from isoreg.experiments.config import RunConfig
    from isoreg.experiments.finetune import run

    return run(RunConfig(**config)).total_seconds


def head(out: Path, end: float, dry: bool) -> None:
    "Train the encoder with its language-model head on ten million tokens, and take the Fisher scores it gives."
    from base_round import scores
    from isoreg.config import FisherConfig, PretrainConfig
    from isoreg.measure import measure_fisher
    from isoreg.pretrain import pretrain

    if (RESULTS / "mpnet_scores_gpu.json").exists():
        return
    text, tiny = "base-data/head_texts.parquet", dict(limit=2, steps=1, batch_size=2, max_length=16, precision="fp32")
    whole = dict(steps=640, batch_size=128, precision="bf16")
    config = PretrainConfig(model=MODEL, new_head=True, train_encoder=True, corpus=text, packed=True, lr=2e-4,
                            heldout_limit=4 if dry else 200, **(tiny if dry else whole))  # fmt: skip
    record = pretrain(config, "head", evaluations=1 if dry else 4, checkpoint_steps=640)
    trained = Path("head") / record["key"]
    small = dict(max_length=16, limit=1) if dry else dict(max_length=128)
    told = dict(model=str(trained / "model"), corpus="base-data/fisher_texts.parquet", packed=True)
    fisher = FisherConfig(**told, level="tensor", shares="", **small)
    measure_fisher(fisher, trained / "fisher", print)
    scores(trained / "record.json", trained / "fisher/record.json", out / "mpnet_scores_gpu.json")


def primary(out: Path, end: float, dry: bool) -> None:
    "Do the gate and, where every task passes it, the runs of P2's primary outcome. `SystemExit` where one does not."
    from base_round import GATE

    work(planned("base-gate"), out, end, dry)
    reached = {r["config"]["task"]: r["value"] for r in recorded(out) if r["config"]["seed"] == 99}
    failed = [task for task, least in GATE.items() if reached.get(task, 0) < least]
    if failed and not dry:
        sys.exit(f"gate: {', '.join(failed)}: not passed; mend that, or change the plan before any counted run")
    work(planned("base-dropout", ("primary",)), out, end, dry)


def rest(out: Path, end: float, dry: bool) -> None:
    "Do P2's other runs once its primary ones are done, then P1: the search and, once it is whole, its final runs."
    from base_round import final_grid
    from isoreg.grid import expand, load_grid

    primary(out, end, dry)
    work(planned("base-dropout"), out, end, dry)
    if not work(planned("base-search"), out, end, dry) or dry:
        return
    Path("base-istar.yaml").write_text(json.dumps(final_grid(recorded(out), ON_GPU)))
    work(expand(load_grid("base-istar.yaml")).runs, out, end, dry)


def planned(grid: str, only: tuple[str, ...] = ()):
    "Return the runs of a grid, in its order, as they are on a card."
    from isoreg.grid import expand, load_grid

    return expand(load_grid(grid), only, ON_GPU).runs


def recorded(out: Path) -> list[dict]:
    "Return the records of runs on cards, earlier and now, each once."
    files = (RESULTS / "base_gpu.jsonl", out / "base_gpu.jsonl")
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return list({r["key"]: r for r in lines}.values())


def work(runs, out: Path, end: float, dry: bool) -> bool:
    "Do the runs that have no record, several at a time. Return whether all have one; at the end of the time, exit."
    done = {r["key"] for r in recorded(out)}
    todo = [r.config for r in runs if r.key not in done]
    if dry:
        todo = [c | TINY | {"precision": "fp32"} for c in todo[:2]]
    if not todo:
        return True
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(2 if dry else WORKERS, len(todo)), spawn, quiet) as pool:
        futures = [pool.submit(one, config) for config in todo]
        try:
            for future in as_completed(futures, timeout=max(1.0, end - time.monotonic())):
                record = future.result()
                name = "base_gpu.jsonl" if record["status"] == "done" else "failed.jsonl"
                with open(out / name, "a") as file:
                    file.write(json.dumps(record) + "\n")
                print(record["key"], record.get("value", record.get("error")), flush=True)
        except TimeoutError:
            os._exit(3)  # what still runs is ended from outside
    return {r.key for r in runs} <= {r["key"] for r in recorded(out)}


def quiet() -> None:
    "Keep bars and reports of loading out of the log."
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def one(config: dict) -> dict:
    "Do a run and return its record; of a failed one its error."
    from isoreg.config import RunConfig
    from isoreg.finetune import run
    from isoreg.record import with_columns

    config = RunConfig(**config)
    try:
        record = with_columns(run(config).to_dict())
    except Exception as error:
        return {
            "key": config.key,
            "config": config.to_dict(),
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
        }
    return record | {"git_commit": (GPU / "0/commit").read_text()}


def take(out: Path) -> None:
    "Put what came back from a card into nbs/results, the seeds of a setting side by side."
    setting = lambda r: (r["key"].rsplit("-seed", 1)[0], json.dumps(r["config"] | {"seed": 0}), r["config"]["seed"])
    lines = [json.dumps(r) + "\n" for r in sorted(recorded(out), key=setting)]
    (RESULTS / "base_gpu.jsonl").write_text("".join(lines))
    for record in sorted((out / "benchmark").rglob("record.json"), key=os.path.getmtime):
        content = json.loads(record.read_text())
        if not content["works"]:
            continue
        if (GPU / "0/today").exists():  # where no repository came along
            content["git_commit"] = content["git_commit"] or (GPU / "0/today").read_text()
        (RESULTS / "benchmark_gpu.json").write_text(json.dumps(content, indent=1) + "\n")
        if (profile := record.with_name("profile.txt")).exists():
            shutil.copy(profile, RESULTS / "benchmark_gpu.txt")
    for name in ("shared_gpu.json", "mpnet_scores_gpu.json"):
        if (out / name).exists():
            shutil.copy(out / name, RESULTS / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pack", "go", "take", *STAGES])
    parser.add_argument("paths", nargs="+", type=Path, help="pack: MODEL DATA; else: OUT")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], choices=STAGES, help="go: these stages alone")
    given = parser.parse_args()
    paths = [path.resolve() for path in given.paths]
    if given.what == "pack":
        pack(*paths)
    elif given.what == "take":
        take(*paths)
    elif given.what == "go":
        go(*paths, given.seconds, given.dry, given.only)
    else:
        globals()[given.what](*paths, time.monotonic() + given.seconds, given.dry)
