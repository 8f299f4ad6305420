"""What a record keeps beside its scores, against the model that was saved with it; the stored records against their schema."""
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jsonschema import Draft202012Validator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.finetune import RunConfig, RunRecord, command, model_card, pack, record_schema, run, sentence_vectors, unpack
from isoreg.tasks import encode, get_task, load_metric, load_task

RESULTS = Path(__file__).parents[1] / "nbs" / "results"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record = run(RunConfig(task="toy-cola", max_train=200, max_eval=120, epochs=1, regularizer="istar", lam=-0.1), model_folder=folder / "model")
    return record, folder / "model"


@pytest.mark.parametrize("task", ["toy-cola", "toy-stsb"])
def test_metric_follows_from_the_kept_predictions(task):
    config = RunConfig(task=task, max_train=96, max_eval=90, epochs=1, regularizer="none")
    record = RunRecord(**json.loads(json.dumps(run(config).to_dict())))
    data = load_task(task, max_train=96, max_eval=90)
    again = load_metric(data.task).compute(predictions=unpack(record.predictions), references=data.evaluation["label"])
    assert {m: again[m] for m in record.metrics} == pytest.approx(record.metrics, abs=1e-12)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=50))
@settings(max_examples=30, deadline=None)
def test_pack_loses_nothing(classes, numbers):
    assert unpack(pack(np.array(classes))).tolist() == classes
    assert unpack(pack(np.array(numbers, dtype="float32"))).tolist() == numbers


def test_saved_model_is_the_one_that_was_measured(done):
    record, folder = done
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    data = load_task("toy-cola", max_train=200, max_eval=120)
    rows = encode(data.evaluation, data.task, tokenizer, 64)
    with torch.no_grad():
        guess = [int(model(**{k: torch.tensor([r[k]]) for k in ("input_ids", "attention_mask")}).logits.argmax()) for r in rows]
    assert guess == unpack(record.predictions).tolist()


def test_model_card_says_what_the_record_says(done):
    record, folder = done
    card = (folder / "README.md").read_text()
    assert card == model_card(record) and f"{record.value:.4f}" in card and f"{record.isoscore['after']['union']:.4f}" in card
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: toy-bert\n") and record.git_commit in card


@pytest.mark.parametrize("values", [
    dict(), dict(regularizer="none", seed=3, segment_ids=False), dict(padding=True, zeta=0.0, layers="mean", lr=1e-4), dict(task="toy-rte", dropout="constant", dropout_p=0.05, recipe="mosbach"),
    dict(regularizer="cosreg", lam=-1.0, cosreg_layer=2, train_fraction=0.5), dict(correction="ustat", layers=3, warmup=0.0, clip=0.0)])
def test_command_makes_the_same_run(values, monkeypatch):
    config, seen = RunConfig(**values), {}
    monkeypatch.setattr("isoreg.cli._run", lambda given, *rest, **more: seen.update(given))
    result = CliRunner().invoke(app, shlex.split(command(config))[1:])
    assert result.exit_code == 0, result.output
    assert RunConfig.from_dict(seen).key == config.key


def test_sentence_vectors_equal_one_text_at_a_time():
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)).train()
    ids, lengths = torch.randint(1, 50, (5, 9)), torch.tensor([9, 4, 7, 1, 5])
    mask = (torch.arange(9) < lengths[:, None]).long()
    got = sentence_vectors(model, [{"input_ids": ids[:3], "attention_mask": mask[:3]}, {"input_ids": ids[3:], "attention_mask": mask[3:]}])
    assert model.training and got["cls"].shape == got["mean"].shape == (3, 5, 16)
    model.eval()
    with torch.no_grad():
        alone = [model(ids[i:i + 1, :n], output_hidden_states=True).hidden_states for i, n in enumerate(lengths)]
    for i, states in enumerate(alone):
        for k, h in enumerate(states):
            torch.testing.assert_close(got["cls"][k, i], h[0, 0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(got["mean"][k, i], h[0].mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got["mean_activation"], torch.cat([s[-1][0] for s in alone]).mean(0), atol=1e-5, rtol=1e-4)


def test_dimension_of_each_hidden_state_is_kept(done):
    record, _ = done
    found = record.geometry["after"]
    assert found["texts"] == 120 and len(found["mean_activation"]) == 96
    assert found["intrinsic_dimension"]["cls"][0] is None, "before the first layer every [CLS] is the same vector"
    assert all(1 < d < 96 for d in found["intrinsic_dimension"]["mean"])


def test_schema_admits_what_runs_write_and_refuses_the_rest(done):
    record, _ = done
    check = Draft202012Validator(record_schema())
    Draft202012Validator.check_schema(record_schema())
    check.validate(record.to_dict())
    for wrong in ({"value": "high"}, {"status": "maybe"}, {"seeds": 3}, {"isoscore": {"before": 1}}):
        assert list(check.iter_errors(record.to_dict() | wrong)), wrong
    for name in ("key", "config", "metric", "value"):
        assert list(check.iter_errors({k: v for k, v in record.to_dict().items() if k != name})), name


def test_stored_records_follow_the_schema():
    check, seen = Draft202012Validator(record_schema()), 0
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "kind" in record: continue  # of a measurement, not of a run
            check.validate(record)
            seen += 1
    assert seen >= 18
