"""What a record keeps beside its scores; the stored records against their schema."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from small_transformers import CONFIG
from transformers import BertConfig, BertModel

from isoreg.experiments.config import RunConfig
from isoreg.files import unpack
from isoreg.experiments.finetune import run, sentence_vectors
from isoreg.experiments.record import RunRecord, changed_inputs, collect, inputs_sha256, read_lines, record_schema
from isoreg.report.records import load
from isoreg.experiments.config import FisherConfig, GeometryConfig, LandscapeConfig, PretrainConfig
from isoreg.experiments.measure import measure
from isoreg.experiments.data import load_metric, load_task

RESULTS = Path(__file__).parents[1] / "nbs" / "results"


def lay(folder, **values):
    "Put a record into a folder of runs, and return the folder of runs."
    values = {"key": "toy-cola-x-seed0", "metric": "accuracy", "value": 0.5} | values
    RunRecord(config=RunConfig(regularizer="none").to_dict(), **values).save(folder / values["key"])
    return folder


def test_failed_runs_are_collected_until_they_are_done(tmp_path):
    lines = tmp_path / "all.jsonl"
    kept = {"key": "toy-cola-x-seed0", "config": RunConfig(regularizer="none").to_dict(), "error": "no", "attempts": 2}
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "failed.json").write_text(json.dumps(kept | {"traceback": "...", "host": "a machine"}))
    assert collect(tmp_path / "failed", lines) == [{"status": "failed"} | kept] and load(lines).error[0] == "no"
    (tmp_path / "failed" / "odd").mkdir()
    for odd in (kept | {"config": FisherConfig().to_dict()}, kept | {"key": 5}, []):
        (tmp_path / "failed" / "odd" / "failed.json").write_text(json.dumps(odd))
        with pytest.warns(UserWarning, match="left out: .*failed.json"):
            assert len(collect(tmp_path / "failed", lines)) == 1
    (tmp_path / "failed" / "failed.json").write_text(json.dumps(kept | {"error": "another"}))
    with pytest.warns(UserWarning, match="left out"):
        assert collect(tmp_path / "failed", lines)[0]["error"] == "another"
    collect(lay(tmp_path / "again"), lines)
    collect(tmp_path / "failed", lines)  # a failure does not take the place of the finished run
    assert list(load(lines).value) == [0.5] and list(load(lines).status) == ["done"]


def test_the_later_of_two_records_is_collected_and_of_equal_ones_the_line_of_the_file_stays(tmp_path):
    lines = tmp_path / "all.jsonl"
    at = lambda month, value, **more: lay(tmp_path / month, value=value, started=f"2026-{month[:2]}-01", **more)
    (new,) = collect(at("05", 0.9, resampled={"rows": 5000}), lines)
    assert collect(at("05 again", 0.9, resampled={"rows": 500}), lines) == [new]
    with pytest.warns(UserWarning, match="0.9 and 0.1; the later one counts"):
        assert collect(at("01", 0.1), lines) == [new]
    with pytest.warns(UserWarning, match="0.9 and 0.2; the later one counts"):
        assert collect(at("07", 0.2), lines)[0]["value"] == 0.2


def test_several_processes_collect_into_one_file(tmp_path):
    "None loses what another wrote between its reading and its writing."
    lines, seeds = tmp_path / "all.jsonl", range(4)
    for seed in seeds:
        lay(tmp_path / f"runs-{seed}", key=f"toy-cola-x-seed{seed}")
    code = f"from isoreg.experiments.record import collect; collect({str(tmp_path)!r} + '/runs-%d', {str(lines)!r})"
    started = [subprocess.Popen([sys.executable, "-c", code % seed]) for seed in seeds]
    assert [process.wait() for process in started] == [0] * 4 and len(read_lines(lines)) == 4


@pytest.mark.parametrize("name", ["corpus", "heldout"])
def test_a_text_is_an_input(tmp_path, name):
    config = PretrainConfig(**{name: str(tmp_path / "t.txt")}).to_dict()
    (tmp_path / "t.txt").write_text("first")
    record = {"config": config, "inputs": inputs_sha256(config)}
    (tmp_path / "t.txt").write_text("second")
    assert changed_inputs(record) == [name]


@pytest.mark.parametrize("name", ["special_tokens_map.json", "vocab.txt", "config.json", "model-2.safetensors"])
def test_every_file_that_a_model_is_loaded_from_decides_its_run(tmp_path, name):
    for one in ("config.json", "model-00001-of-00002.safetensors", "README.md"):
        (tmp_path / one).write_text("{}")
    config = RunConfig(regularizer="none").to_dict() | {"model": str(tmp_path)}
    record = {"config": config, "inputs": inputs_sha256(config)}
    (tmp_path / "README.md").write_text("other words")
    assert changed_inputs(record) == []
    (tmp_path / name).write_text("first")  # a file that is new, or has another content
    assert changed_inputs(record) != []
    again = record | {"inputs": inputs_sha256(config)}
    (tmp_path / name).write_text("second")
    assert changed_inputs(again) != []
    (tmp_path / name).unlink()
    assert changed_inputs(again) != []
    assert set(record["inputs"]) == {"model", "tokenizer"}


@pytest.fixture(scope="module")
def done():
    return run(RunConfig(task="toy-cola", max_train=200, max_eval=120, epochs=1, lam=-0.1))


@pytest.mark.parametrize("task", ["toy-cola", "toy-stsb"])
def test_metric_follows_from_the_kept_predictions(task, done):
    sizes = dict(max_train=200, max_eval=120)
    record = done if task == "toy-cola" else run(RunConfig(task=task, epochs=1, regularizer="none", **sizes))
    record = RunRecord(**json.loads(json.dumps(record.to_dict())))
    data = load_task(task, **sizes)
    again = load_metric(data.task).compute(predictions=unpack(record.predictions), references=data.evaluation["label"])
    assert {m: again[m] for m in record.metrics} == pytest.approx(record.metrics, abs=1e-12)


def same(got, wanted):
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_sentence_vectors_equal_one_text_at_a_time():
    model = BertModel(BertConfig(**CONFIG)).train()
    ids, lengths = torch.randint(1, 50, (5, 9)), torch.tensor([9, 4, 7, 1, 5])
    mask = (torch.arange(9) < lengths[:, None]).long()
    batches = [{"input_ids": ids[rows], "attention_mask": mask[rows]} for rows in (slice(3), slice(3, 5))]
    got = sentence_vectors(model, batches)
    assert model.training and got["cls"].shape == got["mean"].shape == (3, 5, 16)
    model.eval()
    with torch.no_grad():
        alone = [model(ids[i : i + 1, :n], output_hidden_states=True).hidden_states for i, n in enumerate(lengths)]
    for i, states in enumerate(alone):
        for k, h in enumerate(states):
            same(got["cls"][k, i], h[0, 0])
            same(got["mean"][k, i], h[0].mean(0))
    same(got["mean_activation"], torch.cat([s[-1][0] for s in alone]).mean(0))


def test_first_token_is_found_behind_padding_on_the_left():
    model = BertModel(BertConfig(**CONFIG))
    ids, lengths = torch.randint(1, 50, (4, 9)), torch.tensor([9, 4, 1, 6])
    right, position = (torch.arange(9) < lengths[:, None]).long(), torch.arange(9).expand(4, 9)
    turn = (position - (9 - lengths[:, None])) % 9  # the same tokens at the end of the row
    first = {"input_ids": ids, "attention_mask": right, "position_ids": position}
    last = {"input_ids": ids.gather(1, turn), "attention_mask": right.gather(1, turn), "position_ids": turn}
    got = [sentence_vectors(model, [batch]) for batch in (first, last)]
    for what in ("cls", "mean", "mean_activation"):
        same(got[1][what], got[0][what])


def test_dimension_of_each_hidden_state_is_kept(done):
    found = done.geometry["after"]
    assert found["texts"] == 120 and len(found["mean_activation"]) == 96
    assert found["intrinsic_dimension"]["cls"][0] is None, "before the first layer every [CLS] is the same vector"
    assert all(1 < d < 96 for d in found["intrinsic_dimension"]["mean"])


def admits_only(schema, record, wrong, needed):
    "The schema takes the record, with none of these changes, and without none of these fields."
    check = Draft202012Validator(schema)
    check.validate(record)
    lacking = [{k: v for k, v in record.items() if k != name} for name in needed]
    for other in [*(record | change for change in wrong), *lacking]:
        assert list(check.iter_errors(other)), other


def test_schema_admits_what_runs_write_and_refuses_the_rest(done):
    wrong = {"value": "high"}, {"status": "maybe"}, {"seeds": 3}, {"isoscore": 1}
    admits_only(record_schema(), done.to_dict(), wrong, ("key", "config", "metric", "value"))


KINDS = ("fisher", "landscape", "geometry")


def test_stored_records_follow_their_schemas():
    checks = {None: Draft202012Validator(record_schema())} | {k: Draft202012Validator(schema_of(k)) for k in KINDS}
    seen = dict.fromkeys(checks, 0)
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            checks[record.get("kind")].validate(record)
            seen[record.get("kind")] += 1
    assert all(seen.values()) and seen[None] >= 57 and sum(seen[k] for k in KINDS) >= 32


def schema_of(kind):
    "The schema of a measurement, which is kept beside the records."
    return json.loads((RESULTS / f"{kind}.schema.json").read_text())


@pytest.mark.parametrize("name", ["record", *KINDS])
def test_each_field_of_a_schema_has_a_comment(name):
    made = schema_of(name)
    Draft202012Validator.check_schema(made)
    assert name != "record" or made == record_schema(), "execute nbs/experiments/20_record.ipynb, which writes the file"
    for where in (made, made["properties"]["config"]):
        assert all(len(p["description"]) > 5 for p in where["properties"].values()), "a field without a comment"


def test_schemas_admit_what_measurements_write_and_refuse_the_rest(tmp_path):
    configs = GeometryConfig(limit=60, pooling="cls"), FisherConfig(limit=60, shares="50", draws=1, level="tensor")
    line = LandscapeConfig(limit=16, shape="line", points=3, hessian=False)
    made = {kind: measure(c, tmp_path / kind) for kind, c in zip(("geometry", "fisher", "landscape"), (*configs, line))}
    for kind, record in made.items():
        assert record == json.loads((tmp_path / kind / "record.json").read_text())
        wrong = [{"status": "maybe"}, {"kind": "other"}, {"samples": "many"}, {"more": 1}]
        wrong.append({"config": record["config"] | {"colour": "red"}})
        admits_only(schema_of(kind), record, wrong, ("key", "config", "samples", "fingerprint"))
