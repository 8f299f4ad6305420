"""The parameter `dropout` of a run: every kind trains, says what it applied, and composes with a penalty."""

import hashlib
import json

import numpy as np
import pytest

from transformers import BertConfig, BertForMaskedLM

from isoreg.schedules import SCHEMES, save_schedule
from isoreg.experiments.config import RunConfig, scores_source
from isoreg.corpus import TextBatches
from isoreg.fisher import empirical_fisher
from isoreg.experiments.finetune import run
from isoreg.experiments.record import RunRecord
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer

SMALL = dict(task="toy-cola", max_train=64, max_eval=32, epochs=1)


@pytest.mark.parametrize("how", ["standard", "guided", "shuffled", "gaussian", "gaussian-released", "mixout"])
def test_every_kind_runs_and_is_recorded(how, tmp_path):
    record = run(RunConfig(**SMALL, regularizer="none", dropout=how))
    record.save(tmp_path)
    again = RunRecord.load(tmp_path)
    assert again.dropout["how"] == how and again.dropout["notes"] and again.config["dropout"] == how
    rates = {n: p for n, p in again.dropout["rates"].items() if not n.startswith("classifier")}
    assert len(rates) == 13  # embeddings and three places in each of four layers
    if how in ("guided", "shuffled"):
        assert sorted(rates.values()) == pytest.approx([0.1 * i / 12 for i in range(13)])
        assert any("Fisher of the checkpoint" in n for n in again.dropout["notes"])


def test_kinds_differ_and_standard_is_the_baseline():
    losses = lambda **kw: [e["loss"] for e in run(RunConfig(**SMALL, regularizer="none", **kw)).loss]
    standard, guided = losses(), losses(dropout="guided")
    assert losses(dropout="constant", dropout_p=0.1) == standard != guided
    assert losses(dropout="guided") == guided != losses(dropout="reversed")


def test_with_istar_from_files(tmp_path):
    from isoreg.fisher import load_scores

    first = run(RunConfig(**SMALL, regularizer="istar", lam=-0.1, dropout="guided"))
    assert "isoscore" in first.loss[0] and first.dropout["how"] == "guided" and "istar-0.1-guided" in first.key
    schedule = save_schedule(
        tmp_path / "plan.json", {n: p for n, p in first.dropout["rates"].items() if not n.startswith("classifier")}
    )
    second = run(RunConfig(**SMALL, regularizer="istar", lam=-0.1, dropout=str(schedule)))
    digest = hashlib.sha256(schedule.read_bytes()).hexdigest()
    assert second.dropout["schedule_sha256"] == digest[:16] and "schedule_sha256" not in first.dropout
    assert second.dropout["rates"] == first.dropout["rates"] and [e["loss"] for e in second.loss] == [
        e["loss"] for e in first.loss
    ]
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"bert." + "x": 1.0}))
    assert load_scores(scores) == {"bert.x": 1.0}
    with pytest.raises(ValueError, match="scores: .* tensors have none"):
        run(RunConfig(**SMALL, dropout="guided", scores=str(scores)))


@pytest.mark.parametrize("kind", ["estimate", "record"])
def test_scores_of_a_model_of_another_width_are_refused(kind, tmp_path):
    config = BertConfig.from_pretrained(toy_model_path(), hidden_size=48, intermediate_size=96)
    estimate = empirical_fisher(BertForMaskedLM(config), TextBatches(toy_corpus(8), toy_tokenizer()))
    if kind == "estimate":
        estimate.save(tmp_path)
    else:
        record = {"tensor_scores": estimate.scores(), "numel": estimate.numel}
        (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="scalars in the estimate, .* in the model; take the scores of the same model"):
        run(RunConfig(**SMALL, regularizer="none", dropout="guided", scores=str(tmp_path)))


@pytest.mark.parametrize("setting", ["scores", "dropout"])
def test_a_file_has_one_name(tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"bert.x": 0.1}))  # a schedule and scores are alike in form
    given = lambda path: RunConfig(**SMALL, **{"dropout": "guided"} | {setting: path})
    assert given("plan.json").key == given("./plan.json").key == given(".//plan.json").key


def test_keys_keep_and_tell_apart():
    plain = RunConfig(**SMALL)
    assert plain.key == RunConfig(**SMALL, dropout="standard").key
    keys = {RunConfig(**SMALL, dropout=h, dropout_p=0.2 if h == "constant" else None).key for h in SCHEMES}
    assert len(keys) == len(SCHEMES) and plain.key in keys
    assert RunConfig(**SMALL, dropout="guided", dropout_p=0.2).key != RunConfig(**SMALL, dropout="guided").key


def test_the_content_of_files_is_in_the_key(tmp_path):
    plan, scores = save_schedule(tmp_path / "plan.json", {"embeddings": 0.1}), tmp_path / "scores.json"
    scores.write_text('{"bert.x": 1.0}')
    of_plan, of_scores = RunConfig(**SMALL, dropout=str(plan)), RunConfig(**SMALL, dropout="guided", scores=str(scores))
    keys, dicts = (of_plan.key, of_scores.key), (of_plan.to_dict(), of_scores.to_dict())
    assert keys == (of_plan.key, of_scores.key) and not any("sha256" in k for d in dicts for k in d)
    save_schedule(plan, {"embeddings": 0.2})
    scores.write_text('{"bert.x": 2.0}')
    assert of_plan.key != keys[0] and of_scores.key != keys[1] and (of_plan.to_dict(), of_scores.to_dict()) == dicts
    save_schedule(plan, {"embeddings": 0.1})
    assert of_plan.key == keys[0]
    plan.unlink()
    with pytest.raises(FileNotFoundError, match="plan.json"):
        of_plan.key
    # no file, no change: the digest as it was before contents entered it
    assert (
        RunConfig(**SMALL, dropout="guided", batches="by-length").key
        == "toy-cola-toy-bert-istar-0.1-guided-seed0-8c52f27328"
    )


def test_scores_source_and_the_record(tmp_path):
    from transformers import AutoModelForMaskedLM

    from isoreg.fisher import FisherEstimate, load_scores

    model = AutoModelForMaskedLM.from_pretrained(toy_model_path())
    numel = {n: p.numel() for n, p in model.named_parameters()}
    estimate = FisherEstimate(
        {n: p.detach().square().sum() for n, p in model.named_parameters()},
        3,
        "tensor",
        "mlm",
        numel=numel,
        model="toy-bert",
        fingerprint="f" * 64,
    )
    file = estimate.save(tmp_path / "fisher")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert scores_source(tmp_path / "fisher") == {
        "sha256": digest,
        "path": "fisher.json",
        "model": "toy-bert",
        "fingerprint": "f" * 64,
    }
    (tmp_path / "measure").mkdir()
    record = tmp_path / "measure" / "record.json"
    record.write_text(
        json.dumps({"config": {"model": "a/b"}, "fingerprint": "0ab", "tensor_scores": estimate.scores()})
    )
    for path in (record, record.parent):
        assert scores_source(path) | {"sha256": ""} == {
            "sha256": "",
            "path": "record.json",
            "model": "a/b",
            "fingerprint": "0ab",
        }
    (tmp_path / "plain.json").write_text(json.dumps(load_scores(record)))
    assert set(scores_source(tmp_path / "plain.json")) == {"sha256", "path"}
    done = run(RunConfig(**SMALL, regularizer="none", dropout="guided", scores=str(tmp_path / "fisher")))
    assert done.dropout["scores_source"] == scores_source(tmp_path / "fisher") and any(
        "Fisher of toy-bert" in n for n in done.dropout["notes"]
    )
    assert done.to_dict()["dropout"]["scores_source"]["model"] == "toy-bert"


def test_a_text_gives_one_schedule_to_all_tasks_and_seeds(tmp_path, monkeypatch):
    from isoreg.dropout import site_scores
    from isoreg.schedules import guided_schedule
    from isoreg.experiments.models import load_tokenizer
    from transformers import AutoModelForMaskedLM

    monkeypatch.setattr("isoreg.experiments.finetune.CORPUS_TEXTS", 40)
    file, texts = tmp_path / "wiki.txt", toy_corpus(50, seed=9)
    file.write_text("\n".join(texts))
    run_of = lambda **kw: run(
        RunConfig(**SMALL | dict(regularizer="none", dropout="guided", scores=f"corpus:{file}") | kw)
    )
    done = [
        run_of(task=t, seed=s, max_length=n)
        for t, s, n in (("toy-cola", 0, 64), ("toy-cola", 1, 32), ("toy-rte", 0, 48), ("toy-rte", 1, 64))
    ]
    for r in done[1:]:
        assert (r.dropout["rates"], r.dropout["scores_source"]) == (
            done[0].dropout["rates"],
            done[0].dropout["scores_source"],
        )
    source = done[0].dropout["scores_source"]
    drawn = [texts[i] for i in sorted(np.random.default_rng(0).permutation(50)[:40])]
    assert source == {
        "corpus": "wiki.txt",
        "texts": 40,
        "sha256": hashlib.sha256(json.dumps(drawn).encode()).hexdigest(),
    }
    assert any("40 texts of wiki.txt" in n for n in done[0].dropout["notes"])
    model = AutoModelForMaskedLM.from_pretrained(toy_model_path())
    rates = guided_schedule(
        site_scores(model, empirical_fisher(model, TextBatches(drawn, load_tokenizer("toy-bert"), max_length=512)))
    )
    assert rates.items() <= done[0].dropout["rates"].items() and len(rates) == 13
    other = {t: run_of(task=t, scores=None).dropout["rates"] for t in ("toy-cola", "toy-rte")}
    assert other["toy-cola"] != other["toy-rte"]  # of the task's own texts each task has a schedule


def test_the_content_of_a_text_is_in_the_key(tmp_path):
    file = tmp_path / "wiki.txt"
    file.write_text("the cat sleeps .\n")
    config = RunConfig(**SMALL, dropout="guided", scores=f"corpus:{file}")
    key = config.key
    assert key == config.key != RunConfig(**SMALL, dropout="guided").key
    file.write_text("the dog sleeps .\n")
    assert config.key != key
    hub = [RunConfig(**SMALL, dropout="guided", scores=f"corpus:a/b:{split}").key for split in ("one", "two")]
    assert hub[0] != hub[1] and RunConfig(**SMALL, dropout="guided", scores="corpus:a/b:one").key == hub[0]


@pytest.mark.parametrize(
    "scores, message",
    [
        ("corpus:nowhere.txt", "no file 'nowhere.txt'"),
        ("corpus:{}/table.xls", "the file .*table.xls' is of unknown kind"),
        ("wikitext", "scores: 'wikitext' cannot be read as JSON"),
    ],
)
def test_what_is_neither_scores_nor_a_text_is_refused_at_once(scores, message, tmp_path):
    (tmp_path / "table.xls").write_text("x")
    with pytest.raises(ValueError, match=message):
        RunConfig(**SMALL, dropout="guided", scores=scores.format(tmp_path))


def test_scores_of_a_model_without_a_masked_head_are_asked_for(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from isoreg.experiments.finetune import _own_fisher

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="scores: .*without a masked-language-model head; give --scores"):
        _own_fisher(str(tmp_path / "gpt2"), None, ["text"], 16, "corpus")


@pytest.mark.parametrize("scores", ["corpus:{}/empty.txt", "corpus:nobody/nothing"])
def test_a_text_that_cannot_be_read_is_told_before_training(scores, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("\n\n")
    monkeypatch.setattr("isoreg.experiments.finetune._train", lambda *a: pytest.fail("training has begun"))
    with pytest.raises(ValueError, match="scores: 'corpus:.*cannot be read"):
        run(RunConfig(**SMALL, dropout="guided", scores=scores.format(tmp_path)))
