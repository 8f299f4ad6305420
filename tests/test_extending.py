"""Tasks, penalties and schedules of one's own: files, import paths, modules, in runs, grids, records and tables."""

import csv
import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from isoreg.cli import sweep_command
from isoreg.experiments.config import RunConfig, make_penalty
from isoreg.experiments.data import load_metric, load_task
from isoreg.experiments.finetune import rerun, run
from isoreg.experiments.grid import expand, load_grid
from isoreg.dropout import NOISES, gaussian_dropout
from isoreg.istar import PENALTY_CLASSES, CosReg, IStar
from isoreg.experiments.record import changed_inputs, inputs_sha256
from isoreg.report import records
from isoreg.report.records import load
from isoreg.schedules import SCHEMES, Scheme
from isoreg.experiments.tasks import TASKS, Task, definition, read_task
from isoreg.experiments.toy import toy_task, toy_tokenizer

ROOT = Path(__file__).parents[1]
TINY = dict(max_train=48, max_eval=40, epochs=1)
LEAST = "name: polarity\nfiles: {train: train.csv, validation: dev.csv}\ntext: [sentence]\nlabel: label\n"


def rows(split, n):
    return [(r["sentence"], r["label"]) for r in toy_task("toy-cola", split).select(range(n))]


@pytest.fixture
def folder(tmp_path):
    "The toy task as CSV, its labels in words, and the least definition of it."
    for name, split, n in (("train", "train", 48), ("dev", "validation", 40)):
        with open(tmp_path / f"{name}.csv", "w", newline="") as f:
            csv.writer(f).writerows([("sentence", "label"), *((t, ("wrong", "right")[k]) for t, k in rows(split, n))])
    (tmp_path / "polarity.yaml").write_text(LEAST + "metric: accuracy\n")
    return tmp_path


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_five_lines_make_a_run_whose_record_stands_alone(folder):
    config = RunConfig(task=str(folder / "polarity.yaml"), regularizer="none", epochs=1)
    record = run(config)
    assert record.metric == "accuracy" and record.data["labels"] == ["right", "wrong"]  # learnt, sorted
    assert record.data["sources"] == {"train": "train.csv", "validation": "dev.csv"}
    assert record.key.startswith("polarity-toy-bert-none-seed0-")
    (folder / "polarity.yaml").unlink()  # the definition is in the record
    again = RunConfig.from_record(record.config)
    assert again == config and again.key == config.key
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(ValueError, match="files: train: no file .* its folder as data_dir"):
        rerun(record.to_dict())
    assert rerun(record.to_dict(), data_dir=str(moved))["equal"]


def test_the_key_changes_with_definition_and_data_and_not_with_the_place(folder, tmp_path_factory):
    config = lambda at=folder: RunConfig(task=str(at / "polarity.yaml"))
    first, there = config().key, tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, there, dirs_exist_ok=True)
    assert config(there).key == first
    (folder / "polarity.yaml").write_text(LEAST + "metric: f1\n")
    second = config().key
    planned = config()
    with open(folder / "train.csv", "a") as f:
        f.write("the cat sleeps .,right\n")
    assert len({first, second, config().key}) == 3
    with pytest.raises(ValueError, match="files: train: .* has changed since this run was planned"):
        run(planned)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews_correlation"])
def test_the_majority_is_the_best_constant_answer_by_the_metric(tmp_path, metric):
    labels = [0, 1] * 2 + [0] * 6
    pq.write_table(pa.table({"text": list("abcdefghij"), "label": labels}), tmp_path / "t.parquet")
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "t.parquet"))
    task = Task("own", labels=("no", "yes"), metric=metric, metrics=(metric,), files=files)
    best = max(load_metric(task).compute(predictions=[c] * 10, references=labels)[metric] for c in (0, 1))
    assert load_task(task).majority == pytest.approx(best)


def test_a_correlation_makes_a_regression_of_pairs(tmp_path):
    lines = "".join(f'{{"a": "x{i}", "b": "y", "score": {i - 2.5}}}\n' for i in range(6))
    (tmp_path / "s.jsonl").write_text(lines)
    text = "name: likeness\nfiles: {train: s.jsonl, test: s.jsonl}\ntext: [a, b]\nlabel: score\nmetric: spearman\n"
    (tmp_path / "likeness.yaml").write_text(text + "eval_splits: test\n")
    data = load_task(read_task(tmp_path / "likeness.yaml"))
    assert data.task.kind == "regression"
    assert data.evaluation["label"] == [i - 2.5 for i in range(6)] and data.sources["test"] == "s.jsonl"


def test_a_name_on_the_hub_is_a_definition_too():
    task = Task("imdb", hub="stanfordnlp/imdb", text="text", eval_splits=["test"], official_rows={"test": 25000})
    assert task.hub == ("stanfordnlp/imdb", None) and Task(**definition(task)) == task
    assert RunConfig(task=task).definition["hub"] == ["stanfordnlp/imdb", None]


REFUSED = [  # a change of the definition, the training rows, the message
    ("files: {train: no.csv, validation: dev.csv}", None, "files: train: no file .*no.csv"),
    ("name: rte", None, "name: 'rte' is a task of isoreg"),
    ("!!python/object/apply:os.system [id]", None, "polarity.yaml: is no readable YAML"),
    ("labels: [right, left]", None, "column label: .*no valid label, such as 'wrong'"),
    ("metric: pearson", None, "polarity: column label: .*such as '(right|wrong)'; a label is a number"),
    ("metric: f1", "sentence,label\na,x\nb,x\n", "labels: .*'x'.* two different labels or more"),
    ("", "words,label\na,x\nb,y\n", "no column sentence; it has"),
]


@pytest.mark.parametrize("change, train, message", REFUSED)
def test_a_bad_task_is_refused_before_a_model_is_loaded(folder, change, train, message, monkeypatch):
    name = change.partition(":")[0] or "none"
    lines = [line for line in (LEAST + "metric: accuracy\n").splitlines() if not line.startswith(f"{name}:")]
    (folder / "polarity.yaml").write_text("\n".join([*lines, change]) + "\n")
    if train:
        (folder / "train.csv").write_text(train)
    monkeypatch.setattr("isoreg.experiments.finetune.load_model", lambda *a: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        run(RunConfig(task=str(folder / "polarity.yaml")))


def test_what_is_odd_about_rows_of_ones_own_is_noted(folder):
    (folder / "polarity.yaml").write_text(LEAST.replace("dev.csv", "train.csv") + "metric: f1\n")
    (folder / "train.csv").write_text((folder / "train.csv").read_text() + " ,right\n")
    notes = run(RunConfig(task=str(folder / "polarity.yaml"), regularizer="none", epochs=1, max_length=8)).data["notes"]
    assert notes[:2] == [
        "f1 is that of the label 'wrong'; labels in the definition set another order",
        "49 of 49 evaluation rows have the texts of training rows",
    ]
    lengths = [2] + [len(toy_tokenizer()(t)["input_ids"]) for t, _ in rows("train", 48)]
    assert notes[2] == f"{sum(n >= 8 for n in lengths)} of 49 training rows fill 8 tokens; what is longer is cut"


def test_a_change_of_a_data_folder_is_seen(folder):
    (folder / "glue/mnli").mkdir(parents=True)
    config = RunConfig(task="mnli", data_dir=str(folder)).to_dict()
    (folder / "glue/mnli/validation_mismatched.parquet").write_text("rows")  # of the further task
    record = {"config": config, "inputs": inputs_sha256(config)}
    (folder / "glue/mnli/validation_mismatched.parquet").write_text("other rows")
    assert changed_inputs(record) == ["data_dir"]


def test_a_sweep_looks_at_models_and_rows_before_it_starts(folder, monkeypatch):
    monkeypatch.setattr("isoreg.cli.sweep", lambda *a: pytest.fail("it was started"))
    (folder / "train.csv").write_text("a,x\nb,y\n")
    for fixed, message in (("model: my bert", "no folder 'my bert'"), ("task: polarity.yaml", "no column sentence")):
        (folder / "g.yaml").write_text(f"fixed: {{regularizer: none, {fixed}}}\naxes: {{seed: [0, 1]}}\n")
        with pytest.raises(ValueError, match=message):
            sweep_command(str(folder / "g.yaml"), folder / "out")


def test_run_takes_a_task():
    found = run(RunConfig(regularizer="none", **TINY), task=TASKS["toy-rte"]).config
    assert (found["task"], found["definition"]) == ("toy-rte", None)


def test_a_grid_finds_the_task_beside_itself(folder):
    (folder / "g.yaml").write_text("fixed: {regularizer: none}\naxes: {task: [polarity.yaml, toy-cola], seed: 0..1}")
    plan = expand(load_grid(folder / "g.yaml"))
    assert [r.config["task"] for r in plan.runs] == ["polarity", "polarity", "toy-cola", "toy-cola"]
    assert plan.runs[0].key == RunConfig(task=str(folder / "polarity.yaml"), regularizer="none").key


# ---- penalties and schedules -----------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    "A module of one's own that Python finds."
    monkeypatch.syspath_prepend(ROOT / "tests" / "plugin")
    return importlib.import_module("isoreg_example")


def test_a_penalty_has_its_import_path_in_config_record_and_label(example):
    config = RunConfig(regularizer="isoreg_example:LengthPenalty", lam=0.1, **TINY)
    assert config.key.startswith("toy-cola-toy-bert-LengthPenalty0.1-seed0-")
    record = run(config)
    assert "length" in record.loss[0] and record.config["regularizer"] == "isoreg_example:LengthPenalty"
    assert load(record).method.tolist() == ["LengthPenalty λ=0.1"]
    with pytest.raises(ValueError, match="zeta: the constructor of isoreg_example:LengthPenalty has no such parameter"):
        RunConfig(regularizer="isoreg_example:LengthPenalty", zeta=0.5)
    given = run(RunConfig(**TINY), penalty=example.LengthPenalty(0.1))
    assert given.key == record.key and given.loss == record.loss


def test_a_class_of_isoreg_that_is_passed_is_the_run_of_its_name():
    named = RunConfig(lam=-0.2, correction="ustat", **TINY)
    given = run(RunConfig(regularizer="none", **TINY), penalty=IStar(-0.2, zeta=0.0, correction="ustat"))
    assert given.key == named.key and given.loss == run(named).loss
    with pytest.raises(ValueError, match="penalty: layer of CosReg is no setting of a run"):
        run(RunConfig(**TINY), penalty=CosReg(layer=2))


def test_a_penalty_without_settings_needs_no_constructor():
    class Norm(nn.Module):
        def forward(self, hidden_states, attention_mask):
            return 0.1 * hidden_states[-1].square().mean()

    assert run(RunConfig(**TINY), penalty=Norm()).config["regularizer"].endswith("Norm")


def test_a_penalty_that_a_record_cannot_describe_is_refused():
    class Mine(IStar):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)

    with pytest.raises(ValueError, match="penalty: the constructor of Mine has .*; name its parameters"):
        run(RunConfig(**TINY), penalty=Mine(-0.2))
    with pytest.raises(ValueError, match="penalty: give one module"):
        run(RunConfig(**TINY), penalty=[IStar(-0.2), CosReg()])
    with pytest.raises(ValueError, match="'math:pi' is neither a class nor a function"):
        RunConfig(regularizer="math:pi")


def test_a_constructor_gets_the_settings_that_it_has_parameters_for(monkeypatch):
    taken = SimpleNamespace(Mine=lambda lam, layers, **more: (lam, layers, more))
    monkeypatch.setitem(sys.modules, "mine", taken)
    assert make_penalty(RunConfig(regularizer="mine:Mine", layers=3)) == (1.0, 3, {})


def test_a_penalty_of_the_library_is_one_line(monkeypatch):
    class Norm(CosReg):
        "A penalty of another name."

    monkeypatch.setitem(PENALTY_CLASSES, "norm", Norm)
    record = run(RunConfig(regularizer="norm", lam=0.1, correction="ustat", **TINY))
    assert load(record).method.tolist() == ["norm λ=0.1"]
    with pytest.raises(ValueError, match="did you mean 'norm'"):
        RunConfig(regularizer="nrm2")


def test_a_column_is_a_line_in_recorded_and_one_in_heads(monkeypatch):
    monkeypatch.setitem(records.RECORDED, "memory", "peak_memory_mib")
    monkeypatch.setitem(records.HEADS["summary"], "MiB", lambda r, digits: f"{r.memory:.0f}")
    runs = [run(RunConfig(regularizer="none", seed=seed, **TINY)) for seed in (0, 1)]
    table = records.summarise(load(runs))
    assert records.readable(table).MiB.tolist() == [f"{(runs[0].peak_memory_mib + runs[1].peak_memory_mib) / 2:.0f}"]
    assert "| MiB" in records.to_markdown(table)


def test_a_scheme_is_one_line_and_its_noise_another(monkeypatch):
    monkeypatch.setitem(SCHEMES, "twice", Scheme("twice the noise", rate=True))
    monkeypatch.setitem(NOISES, "twice", lambda model, p, batch=None: gaussian_dropout(model, 2 * p, batch=batch))
    record = run(RunConfig(regularizer="none", dropout="twice", dropout_p=0.1, **TINY))
    rates = {p for name, p in record.dropout["rates"].items() if name != "classifier"}
    assert rates == {0.2} and load(record).method.tolist() == ["twice the noise p=0.1"]


def test_a_schedule_of_ones_own_sets_the_rates(example, tmp_path):
    record = run(RunConfig(regularizer="none", **TINY), schedule=example.rising)
    rates = record.dropout["rates"]
    assert list(rates.values()) == pytest.approx([0.1 * i / (len(rates) - 1) for i in range(len(rates))])
    assert record.dropout["how"] == "isoreg_example:rising" and load(record).method.tolist() == ["schedule rising"]
    (tmp_path / "rising.json").write_text(json.dumps(rates))
    config = RunConfig(regularizer="none", dropout=str(tmp_path / "rising.json"), **TINY)
    assert run(config).loss == record.loss and config.key != record.key
