"""The same configuration, seed, code and machine give the same bits, in any process and with any number of workers."""

import dataclasses
import json
import os
import subprocess
import sys
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from isoreg.experiments.config import FisherConfig, RunConfig
from isoreg.corpus import TextBatches
from isoreg.fisher import empirical_fisher
from isoreg.experiments.finetune import run
from isoreg.experiments.measure import load_language_model
from isoreg.experiments.toy import toy_corpus, toy_tokenizer

HERE = Path(__file__).parent
KINDS = ["finetune", "pretrain", "mlm_head", "toy", "fisher", "landscape", "geometry"]


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    "What two processes found that share nothing but the machine."
    processes = []
    for number in "12":
        env = os.environ | {"PYTHONHASHSEED": number, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        out = tmp_path_factory.mktemp(f"kinds{number}")
        command = [sys.executable, str(HERE / "all_kinds.py"), str(out / "runs")]
        processes.append(subprocess.Popen(command, env=env, cwd=out, stdout=subprocess.PIPE, text=True))
    return [json.loads(p.communicate()[0].splitlines()[-1]) for p in processes]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_same_bits(twice, kind):
    one, two = (found[kind] for found in twice)
    assert one == two and np.isfinite(one["number"])


def test_every_kind_is_another_run(twice):
    assert list(twice[0]) == KINDS and len({found["digest"] for found in twice[0].values()}) == len(KINDS)


def batches(**options):
    return TextBatches(toy_corpus(60, seed=1), toy_tokenizer(), batch_size=8, max_length=32, **options)


@pytest.mark.parametrize("loss", ["mlm", "clm"])
def test_masks_and_order_do_not_depend_on_who_reads(loss):
    whole = list(batches(loss=loss, seed=3))
    for corpus in (batches(loss=loss, seed=3), batches(loss=loss, seed=3)):
        torch.rand(5), np.random.rand(3)  # what else is drawn is none of its business
        for one, two in zip(whole, corpus, strict=True):
            assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_sample_is_masked_by_its_number_not_by_its_place():
    corpus = batches(seed=3)
    backwards = {n: corpus.sample(n) for n in reversed(corpus.numbers.tolist())}
    for n in corpus.numbers.tolist():
        for one, two in zip(batches(seed=3).sample(n), backwards[n]):
            assert np.array_equal(one, two)
    other = batches(seed=4)
    assert any(not np.array_equal(other.sample(n)[0], backwards[n][0]) for n in corpus.numbers.tolist())


def test_the_sums_of_two_halves_are_the_sums_of_the_whole():
    drawn = batches(seed=3).draw(0.3, 1)
    assert np.array_equal(drawn.numbers, batches(seed=3).draw(0.3, 1).numbers)
    model, halves = load_language_model(FisherConfig())[0], [copy(drawn), copy(drawn)]
    for k, half in enumerate(halves):
        half.numbers = drawn.numbers[k::2]
    whole, one, two = (empirical_fisher(model, b).sums for b in (drawn, *halves))
    assert all(float(one[n] + two[n]) == pytest.approx(float(s), rel=1e-5) for n, s in whole.items())


@pytest.mark.parametrize("workers", [2])
def test_workers_that_load_data_change_nothing(monkeypatch, workers):
    import isoreg.experiments.finetune

    config = RunConfig(task="toy-cola", max_train=64, max_eval=64, epochs=1)
    alone = run(config).to_dict()
    made = isoreg.experiments.finetune.training_arguments
    with_workers = lambda *a, **k: dataclasses.replace(made(*a, **k), dataloader_num_workers=workers)
    monkeypatch.setattr(isoreg.experiments.finetune, "training_arguments", with_workers)
    helped = run(config).to_dict()
    for name in ("value", "predictions", "isoscore", "epochs", "geometry"):
        drop = lambda x: [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in x]
        one, two = (drop(r[name]) if name == "epochs" else r[name] for r in (alone, helped))
        assert one == two, name
