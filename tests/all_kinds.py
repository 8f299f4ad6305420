"""One small run of each kind, for comparisons: python all_kinds.py OUT [THREADS [PRECISION [MODEL]]]. Prints a JSON
object: for each kind a digest of all that its record says but times and places, and a number that stands for it."""

import hashlib
import json
import random
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from isoreg.experiments.config import FisherConfig, GeometryConfig, LandscapeConfig, PretrainConfig, RunConfig
from isoreg.experiments.finetune import run
from isoreg.experiments.measure import measure
from isoreg.experiments.pretrain import heldout_loss, pretrain, toy_language_model
from isoreg.experiments.record import plain, weights_sha256

OTHER = "seconds started finished memory hardware versions commit warnings config key runtime".split()


def without_times(x):
    "What a record says, without times and places."
    if isinstance(x, dict):
        return {k: without_times(v) for k, v in x.items() if not any(word in k for word in OTHER)}
    return [without_times(v) for v in x] if isinstance(x, list) else x


def kinds(out: Path, precision: str, model: str) -> dict:
    "Kind: a function that does the run, and one that picks a number from its record."
    half = dict(precision=precision)
    small = dict(max_train=64, max_eval=64, epochs=1, model=model, dropout="guided", **half)
    text = dict(limit=24, model=model, **half)

    def toy():
        model, _, heldout = toy_language_model("gpt2", steps=3, seed=1)
        return {"weights": weights_sha256(model), "loss": heldout_loss(model, heldout)["loss"]}

    return {
        "finetune": (lambda: run(RunConfig(**small)).to_dict(), lambda r: r["isoscore"]["after"]["union"]),
        "pretrain": (
            lambda: pretrain(PretrainConfig(steps=4, limit=200, train_encoder=True, **half), out),
            lambda r: r["heldout"]["after"]["loss"],
        ),
        "mlm_head": (
            lambda: pretrain(PretrainConfig(steps=4, limit=200, **half), out),
            lambda r: r["heldout"]["after"]["loss"],
        ),
        "toy": (toy, lambda r: r["loss"]),
        "fisher": (
            lambda: measure(FisherConfig(shares="33", draws=2, **text), out / "fisher"),
            lambda r: sum(r["tensor_scores"].values()),
        ),
        "landscape": (
            lambda: measure(LandscapeConfig(shape="line", points=3, hessian=False, **text), out / "line"),
            lambda r: r["losses"][0][0],
        ),
        "geometry": (
            lambda: measure(GeometryConfig(points=300, **text), out / "geometry"),
            lambda r: r["layers"][-1]["isoscore"],
        ),
    }


def found(out: str, threads: str = "1", precision: str = "fp32", model: str = "toy-bert") -> dict:
    "Kind: the digest and the number of its run, in this process."
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(threads))
    random.seed()  # what was drawn before a run is none of its business
    torch.rand(random.randint(1, 9))
    digests = {}
    for name, (make, number) in kinds(Path(out), precision, model).items():
        record = make()
        said = json.dumps(plain(without_times(record)), sort_keys=True)
        digests[name] = {"digest": hashlib.sha256(said.encode()).hexdigest(), "number": number(record)}
    return digests


if __name__ == "__main__":
    print(json.dumps(found(*sys.argv[1:])))
