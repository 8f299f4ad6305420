"""Notebooks run in processes that are forked from one which has imported what they need: nothing of one page reaches
the next, as in kernels, without the seconds that each kernel spends on its imports."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(  # of ranks.py, too
    [
        "execnb.shell",
        "isoreg.experiments.finetune",
        "isoreg.experiments.pretrain",
        "isoreg.report.figures",
        "isoreg.report.records",
        "matplotlib.pyplot",
        "torch.distributed",
    ]
)


def run(path: Path, **parameters) -> list[dict]:
    "Return the cells of a notebook after a run in its folder; what fails there is raised here."
    with ProcessPoolExecutor(1, FORKS) as pool:
        return json.loads(pool.submit(_run, str(path), parameters).result())


def _run(path: str, parameters: dict) -> str:
    from execnb.nbio import mk_cell, read_nb
    from execnb.shell import CaptureShell

    os.chdir(Path(path).parent)
    shell, notebook = CaptureShell(mpl_format="png", timeout=300), read_nb(path)  # seconds, of a cell
    if parameters:
        place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
        notebook.cells.insert(place + 1, mk_cell("\n".join(f"{k} = {v!r}" for k, v in parameters.items())))
    shell.run_all(notebook, exc_stop=True)
    return json.dumps(notebook.cells)
