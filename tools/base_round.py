"""What the base-size round needs beside its grids: its rows, its Fisher scores, and the grid of its final runs.

The plan is nbs/tables/plan.ipynb. All draws are fixed, so every seed and every machine has the same rows.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
import yaml

from isoreg.files import write_atomically
from isoreg.experiments.grid import choose, expand, load_grid

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
SMALLER = {"glue/sst2": 4000, "sst5": 4000}  # training rows of the larger tasks
HELD_OUT = {"wikipedia": 30, "books": 15, "other": 20}  # last texts of each file, for the Fisher information
FINAL = {  # the splits of final runs that are not the official ones
    "sst2": {"train_split": "train_4000_part"},
    "sst5": {"train_split": "train_4000_part", "eval_split": "validation_test"},
}
GATE = {"cola": 0.50, "mrpc": 0.83, "stsb": 0.86, "sst2": 0.85, "sst5": 0.45}  # what the baseline has to reach
SCORES = Path("nbs/results/mpnet_scores.json")
OF_FISHER = ("fingerprint", "samples", "loss", "mean_loss", "corpus", "git_commit", "sites", "tensor_scores")
OF_HEAD = (
    "config",
    "heldout",
    "unigram",
    "curve",
    "steps",
    "tokens_seen",
    "seconds",
    "text",
    "hardware",
    "versions",
    "git_commit",
    "started",
)
FIXED = ("model", "data_dir", "precision", "recipe", "length_groups")  # settings that all runs of P1 share


@app.command()
def data(
    source: Annotated[Path, typer.Argument(help="Folder with glue/, sst5/ and text/ as Parquet.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write, base-data in the grids.")] = Path("base-data"),
):
    """Write the rows of the round.

    fit_part and held_part are 85 and 15 % of the training rows, validation_test is both judged splits of SST-5.
    """
    for task in ("glue/cola", "glue/mrpc", "glue/stsb", "glue/sst2", "sst5"):
        train, judged = (pq.read_table(source / task / f"{split}.parquet") for split in ("train", "validation"))
        name, split = ("train", "validation")
        if task in SMALLER:
            name, train = f"train_{SMALLER[task]}_part", drawn(train, SMALLER[task])[0]
        if task == "sst5":
            split, judged = "validation_test", pa.concat_tables([judged, pq.read_table(source / task / "test.parquet")])
        fit, held = drawn(train, round(0.85 * len(train)))
        (folder / task).mkdir(parents=True, exist_ok=True)
        for part, rows in {name: train, split: judged, "fit_part": fit, "held_part": held}.items():
            pq.write_table(rows, folder / task / f"{part}.parquet")
    texts = []
    for name, n in HELD_OUT.items():
        texts += pq.read_table(source / f"text/{name}.parquet")["text"].to_pylist()[-n:]
    pq.write_table(pa.table({"text": texts}), folder / "fisher_texts.parquet")


def drawn(rows: pa.Table, n: int) -> tuple[pa.Table, pa.Table]:
    "Return n rows of a fixed draw and the rest, both in their order."
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.take(np.sort(order[:n])), rows.take(np.sort(order[n:]))


@app.command()
def scores(
    head: Annotated[Path, typer.Argument(help="record.json of nbs/runs/mlm_head.ipynb.")],
    fisher: Annotated[Path, typer.Argument(help="record.json of nbs/runs/fisher.ipynb, for that head.")],
    out: Annotated[Path, typer.Argument(help="File of scores, as the grids read it.")] = SCORES,
):
    "Write the Fisher score of each tensor, with what is to be known of the head and of the estimate."
    h, f = (json.loads(path.read_text()) for path in (head, fisher))
    kept = {"about": "Mean squared gradient of each tensor's scalars, for the plan of the base-size round"}
    kept["model"] = h["config"]["model"]
    kept |= {k: f[k] for k in OF_FISHER}
    kept["head"] = {k: h[k] for k in OF_HEAD}
    write_atomically(out, json.dumps(kept, indent=1) + "\n")


@app.command()
def finals(
    records: Annotated[list[Path], typer.Argument(help="Records (.jsonl) of base-search.")],
    out: Annotated[Path, typer.Argument(help="Grid of the final runs.")] = Path("nbs/grids/base-istar.yaml"),
):
    "Choose each task's settings on the held-out training rows, and write the grid of P1's final runs."
    found = [json.loads(line) for path in records for line in path.read_text().splitlines()]
    grid = final_grid([r for r in found if r["config"]["seed"] == 100])
    write_atomically(out, yaml.safe_dump(grid, sort_keys=False, allow_unicode=True, width=120))


def final_grid(records: list[dict], overrides: dict | None = None) -> dict:
    """Return the grid of P1's final runs, from the records of its search.

    Block `tuned` has the chosen baseline and the chosen I-STAR of each task. Block `rates` has I-STAR with each
    strength at the learning rate of the chosen baseline, for the secondary outcomes.
    """
    search = expand(load_grid("base-search"), overrides=overrides)
    same = {k: v for k, v in search.runs[0].config.items() if k in FIXED} | {"zeta": 0.2}
    tuned, rates = [], []
    for c in choose(search, records):
        task = {"task": c.config["task"]} | FINAL.get(c.config["task"], {})
        names = (
            ["regularizer", "lr", "batch_size", "lam"]
            if c.method[0] == "istar"
            else ["regularizer", "lr", "batch_size"]
        )
        tuned.append(task | {k: c.config[k] for k in names})
        if c.method[0] == "none":
            rates.append(task | {"regularizer": "istar", "lr": c.config["lr"], "lam": [-1, -0.1, 0.1]})
    block = lambda name, rows: {"name": name, "axes": {"seed": "0..4", "setting": rows}}
    words = "Base-size round, P1: final runs, settings chosen by base-search"
    return {"description": words, "fixed": same, "blocks": [block("tuned", tuned), block("rates", rates)]}


if __name__ == "__main__":
    app()
