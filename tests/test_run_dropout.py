"""The parameter `dropout` of a run: every kind trains, says what it applied, and composes with a penalty."""

import hashlib
import json

import numpy as np
import pytest
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from isoreg.corpus import TextBatches
from isoreg.dropout import load_dropout, load_scores, site_scores
from isoreg.experiments.config import RunConfig
from isoreg.experiments.finetune import run
from isoreg.experiments.models import load_tokenizer
from isoreg.experiments.record import RunRecord
from isoreg.experiments.toy import toy_corpus, toy_model_path
from isoreg.files import scores_source
from isoreg.fisher import FisherEstimate, empirical_fisher
from isoreg.schedules import guided_schedule, save_schedule

SMALL = dict(task="toy-cola", max_train=64, max_eval=32, epochs=1)
PLAIN = SMALL | dict(regularizer="none")


def of_body(record):
    "The rates of the encoder's sites."
    return {n: p for n, p in record.dropout["rates"].items() if not n.startswith("classifier")}


def losses(record):
    return [e["loss"] for e in record.loss]


@pytest.fixture(scope="module")
def records():
    return {
        how: run(RunConfig(**PLAIN, dropout=how)) for how in ("standard", "guided", "shuffled", "gaussian", "mixout")
    }


def test_every_kind_runs_and_is_recorded(records, tmp_path):
    for how, record in records.items():
        record.save(tmp_path / how)
        again = RunRecord.load(tmp_path / how)
        assert again.dropout["how"] == how == again.config["dropout"] and again.dropout["notes"]
        rates = of_body(again)
        assert len(rates) == 13  # embeddings and three places in each of four layers
        if how in ("guided", "shuffled"):
            assert sorted(rates.values()) == pytest.approx([0.1 * i / 12 for i in range(13)])
            assert any("Fisher of the checkpoint on 64 training texts of toy-cola" in n for n in again.dropout["notes"])


def test_kinds_differ_and_standard_is_the_baseline(records):
    standard, guided = losses(records["standard"]), losses(records["guided"])
    assert losses(run(RunConfig(**PLAIN, dropout="constant", dropout_p=0.1))) == standard != guided
    assert losses(run(RunConfig(**PLAIN, dropout="reversed"))) != guided


def test_with_istar_from_files(tmp_path):
    istar = SMALL | dict(regularizer="istar", lam=-0.1)
    first = run(RunConfig(**istar, dropout="guided"))
    assert "isoscore" in first.loss[0] and "istar-0.1-guided" in first.key
    schedule = save_schedule(tmp_path / "plan.json", of_body(first))
    second = run(RunConfig(**istar, dropout=str(schedule)))
    digest = hashlib.sha256(schedule.read_bytes()).hexdigest()
    assert second.dropout["schedule_sha256"] == digest[:16] and "schedule_sha256" not in first.dropout
    assert second.dropout["rates"] == first.dropout["rates"] and losses(second) == losses(first)
    (tmp_path / "scores.json").write_text(json.dumps({"bert.x": 1.0}))
    with pytest.raises(ValueError, match="scores: .* tensors have no score"):
        run(RunConfig(**SMALL, dropout="guided", scores=str(tmp_path / "scores.json")))


def test_scores_source_and_the_record(tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(toy_model_path())
    numel = {n: p.numel() for n, p in model.named_parameters()}
    sums = {n: p.detach().square().sum() for n, p in model.named_parameters()}
    named = {"model": "toy-bert", "fingerprint": "f" * 64}
    estimate = FisherEstimate(sums, 3, "tensor", "mlm", numel=numel, **named)
    digest = hashlib.sha256(estimate.save(tmp_path / "fisher").read_bytes()).hexdigest()
    assert scores_source(tmp_path / "fisher") == {"sha256": digest, "path": "fisher.json"} | named
    (tmp_path / "measure").mkdir()
    record, named = tmp_path / "measure" / "record.json", {"model": "a/b", "fingerprint": "0ab"}
    content = {"config": {"model": "a/b"}, "fingerprint": "0ab", "tensor_scores": estimate.scores()}
    record.write_text(json.dumps(content))
    for path in (record, record.parent):
        assert scores_source(path) | {"sha256": ""} == {"sha256": "", "path": "record.json"} | named
    (tmp_path / "plain.json").write_text(json.dumps(load_scores(record)[0]))
    assert set(scores_source(tmp_path / "plain.json")) == {"sha256", "path"}
    config = RunConfig(**PLAIN, dropout="guided", scores=str(tmp_path / "fisher"))
    done = run(config, model_folder=tmp_path / "model").to_dict()["dropout"]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert load_dropout(loaded)["rates"] == done["rates"] and len(set(done["rates"].values())) > 3
    assert done["scores_source"] == scores_source(tmp_path / "fisher")
    assert any("Fisher of toy-bert" in n for n in done["notes"])


def test_a_text_gives_one_schedule_to_all_tasks_and_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr("isoreg.experiments.finetune.CORPUS_TEXTS", 40)
    monkeypatch.setattr("isoreg.experiments.finetune._train", lambda *_: None)
    file, texts = tmp_path / "wiki.txt", toy_corpus(50, seed=9)
    file.write_text("\n".join(texts))
    guided = dict(regularizer="none", dropout="guided")
    run_of = lambda **kw: run(RunConfig(**SMALL | guided | dict(scores=f"corpus:{file}") | kw)).dropout
    settings = [("toy-cola", 0, 64), ("toy-cola", 1, 32), ("toy-rte", 1, 48)]
    first, *others = [run_of(task=t, seed=s, max_length=n) for t, s, n in settings]
    for other in others:
        assert (other["rates"], other["scores_source"]) == (first["rates"], first["scores_source"])
    drawn = [texts[i] for i in sorted(np.random.default_rng(0).permutation(50)[:40])]
    digest = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
    assert first["scores_source"] == {"corpus": "wiki.txt", "texts": 40, "sha256": digest}
    assert any("40 texts of wiki.txt" in n for n in first["notes"])
    model = AutoModelForMaskedLM.from_pretrained(toy_model_path())
    estimate = empirical_fisher(model, TextBatches(drawn, load_tokenizer("toy-bert"), max_length=512))
    rates = guided_schedule(site_scores(model, estimate))
    assert rates.items() <= first["rates"].items() and len(rates) == 13
    one, two = (run_of(task=t, scores=None)["rates"] for t in ("toy-cola", "toy-rte"))
    assert one != two  # of the task's own texts each task has a schedule


@pytest.mark.parametrize("scores", ["corpus:{}/empty.txt", "corpus:nobody/nothing"])
def test_a_text_that_cannot_be_read_is_told_before_training(scores, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("\n\n")
    monkeypatch.setattr("isoreg.experiments.finetune._train", lambda *a: pytest.fail("training has begun"))
    with pytest.raises(ValueError, match="scores: 'corpus:.*cannot be read"):
        run(RunConfig(**SMALL, dropout="guided", scores=scores.format(tmp_path)))
