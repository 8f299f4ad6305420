"""Tasks, penalties and schedules of one's own: files, plug-ins, modules, in runs, grids, records and tables."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from torch import nn

import isoreg

from isoreg.cli import sweep_command
from isoreg.experiments.config import DROPOUTS, PENALTIES, RunConfig, command, made, method_label, name_of, packages
from isoreg.experiments.data import load_metric, load_task
from isoreg.experiments.finetune import rerun, run
from isoreg.files import read_table
from isoreg.experiments.grid import Run, expand, load_grid
from isoreg.istar import CosReg, IStar
from isoreg.experiments.record import RunRecord, changed_inputs, inputs_sha256
from isoreg.report.records import load
from isoreg.experiments.sweep import Folder, is_record_of
from isoreg.experiments.tasks import TASKS, Task, definition, from_definition, read_task
from isoreg.experiments.toy import toy_model_path, toy_task, toy_tokenizer

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
    for file in folder.glob("polarity.yaml"):
        file.unlink()  # the definition is in the record
    again = RunConfig.from_record(record.config)
    assert again == config and again.key == config.key
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(ValueError, match="files: train: no file .* its folder as data_dir"):
        rerun(record.to_dict())
    assert rerun(record.to_dict(), data_dir=str(moved))["equal"]


def test_the_same_rows_by_another_name_are_the_toy_task(folder):
    data = load_task(read_task(folder / "polarity.yaml"))
    assert data.train["sentence"] == [t for t, _ in rows("train", 48)]
    assert data.train["label"] == [1 - k for _, k in rows("train", 48)]  # right before wrong
    given = load_task(from_definition(definition(read_task(folder / "polarity.yaml")) | {"labels": ["wrong", "right"]}))
    assert given.train["label"] == [k for _, k in rows("train", 48)]
    assert given.train[:]["label"] == toy_task("toy-cola", "train")[:48]["label"]


def test_the_key_changes_with_definition_and_data_and_not_with_the_place(folder, tmp_path_factory):
    config = lambda at=folder: RunConfig(task=str(at / "polarity.yaml"))
    first, there = config().key, tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, there, dirs_exist_ok=True)
    assert config(there).key == first
    (folder / "polarity.yaml").write_text(LEAST + "metric: f1\n")
    second = config().key
    with open(folder / "dev.csv", "a") as f:
        f.write("the cat sleeps .,right\n")
    assert len({first, second, config().key}) == 3


def test_a_file_that_changed_after_the_plan_is_refused(folder):
    config = RunConfig(task=str(folder / "polarity.yaml"), epochs=1)
    with open(folder / "train.csv", "a") as f:
        f.write("the cat sleeps .,right\n")
    with pytest.raises(ValueError, match="files: train: .* not the file that this run was planned with"):
        run(config)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_kind_of_file_has_the_same_rows(kind, tmp_path):
    texts, labels = ["NA", "3", 'he said "no", twice', "é ü\tø" if kind != "tsv" else "é"], [5, 1, 5, 3]
    file = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts, "grade": labels}), file)
    elif kind.startswith("json"):
        file.write_text("".join(json.dumps({"text": t, "grade": k}) + "\n" for t, k in zip(texts, labels)))
    else:
        with open(file, "w", newline="") as f:
            writer = csv.writer(f, delimiter="\t" if kind == "tsv" else ",")
            writer.writerows([("text", "grade"), *zip(texts, labels)])
    task = Task("grades", label="grade", files={"train": str(file), "validation": str(file)})
    data = load_task(task)
    assert data.train["text"] == texts and data.train["label"] == [2, 0, 2, 1]  # of 1, 3, 5
    assert data.task.label_names == ("1", "3", "5") and data.task.num_labels == 3
    names = load_task(Task("g", label_names=["5", "3", "1"], label="grade", files=dict(task.files)))
    assert names.train["label"] == [0, 2, 0, 1]


def test_labels_that_are_numbers_are_never_taken_for_positions(tmp_path):
    "Split by split: a split that lacks a label, or has one that is unknown, must not shift the others."
    files = {}
    for split, labels in (("train", [1, 2, 3]), ("validation", [0, 1, 2])):
        pq.write_table(pa.table({"text": ["a", "b", "c"], "label": labels}), tmp_path / f"{split}.parquet")
        files[split] = str(tmp_path / f"{split}.parquet")
    for names in ((), ("1", "2", "3")):
        with pytest.raises(ValueError, match="0"):
            load_task(Task("own", label_names=names, files=files))
    assert load_task(Task("own", label_names=("0", "1", "2", "3"), files=files)).evaluation["label"] == [0, 1, 2]


@pytest.mark.parametrize(
    "rows",
    [
        'text\tlabel\n"Hello he said\t0\nthe x\t1\nb y" z\t0\nfour\t1\n',
        'id\ttext\tlabel\n"a\tone\tno\nb\ttwo\tyes\nc"\tthree\tno\nd\tfour\tyes\n',  # in a column nobody reads
        'text\tlabel\none\t"no\ntwo\tyes"\nthree\tno\n',  # in the labels
    ],
)
def test_a_mark_that_is_not_closed_joins_no_lines(tmp_path, rows):
    (tmp_path / "t.tsv").write_text(rows)
    assert read_table(tmp_path / "t.tsv").num_rows == rows.count("\n") - 1


def test_labels_in_a_task_file_are_words_also_where_old_yaml_had_others(folder):
    (folder / "polarity.yaml").write_text(LEAST + "labels: [no, yes]\n")
    assert read_task(folder / "polarity.yaml").label_names == ("no", "yes")


@pytest.mark.parametrize("positive", [0.2, 0.8])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews_correlation"])
def test_the_majority_is_the_best_constant_answer_by_the_metric(tmp_path, positive, metric):
    labels = [int(i < 10 * positive) for i in range(10)]
    pq.write_table(pa.table({"text": list("abcdefghij"), "label": labels}), tmp_path / "t.parquet")
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "t.parquet"))
    task = Task("own", label_names=("no", "yes"), metric=metric, metrics=(metric,), files=files)
    score = load_metric(task)
    best = max(score.compute(predictions=[c] * 10, references=labels)[metric] for c in (0, 1))
    assert load_task(task).majority == pytest.approx(best)


def test_a_correlation_makes_a_regression_of_pairs(tmp_path):
    lines = "".join(f'{{"a": "x{i}", "b": "y", "score": {i - 2.5}}}\n' for i in range(6))
    (tmp_path / "s.jsonl").write_text(lines)
    text = "name: likeness\nfiles: {train: s.jsonl, test: s.jsonl}\ntext: [a, b]\nlabel: score\nmetric: spearman\n"
    (tmp_path / "likeness.yaml").write_text(text + "eval_splits: test\n")
    data = load_task(read_task(tmp_path / "likeness.yaml"))
    assert data.task.kind == "regression" and data.task.num_labels == 1
    assert data.evaluation["label"] == [i - 2.5 for i in range(6)] and data.sources["test"] == "s.jsonl"
    assert RunConfig(task=str(tmp_path / "likeness.yaml")).eval_split is None


def test_a_name_on_the_hub_is_a_definition_too():
    task = from_definition({"name": "imdb", "hub": "stanfordnlp/imdb", "text": "text", "eval_splits": ["test"]})
    assert task.hub == ("stanfordnlp/imdb", None) and from_definition(definition(task)) == task
    assert RunConfig(task=task).definition["hub"] == ["stanfordnlp/imdb", None]
    rows = {"train": 25000, "test": 25000}
    assert from_definition(definition(task) | {"official_rows": rows}).official_rows == tuple(rows.items())
    assert from_definition(task and {"name": "m", "hub": ["a/b", "c"]}).hub == ("a/b", "c")


@pytest.mark.parametrize(
    "change, message",
    [
        ("metric: accurac", "metric: 'accurac' is unknown; did you mean 'accuracy'"),
        ("text: [a, b, c]", "text: .*one column, or two"),
        ("labl: x", "labl: unknown field; did you mean 'label'"),
        ("label: sentence", "label: 'sentence' is a column of texts too"),
        ("label: 3", "label: 3 is no text"),
        ("official_rows: 3", "official_rows: 3 is no table of splits; write {train: 100, test: 20}"),
        ("official_rows: {train: .inf}", "official_rows: .*inf.* is no table of splits"),
        ("official_rows: {train: 2.7}", "official_rows: .*2.7.* is no table of splits"),
        ("labels: [one]", "labels: .*two different labels"),
        ("labels: yes", "labels: 'yes' is no tuple"),
        ("files: {train: train.csv}", "files: have no validation, only train; add validation"),
        ("files: {train: t.xls, validation: t.xls}", "files: train: .*unknown kind; known are .csv"),
        ("files: {train: no.csv, validation: dev.csv}", "files: train: no file .*no.csv"),
        ("hub: a/b", "files: stand in place of hub"),
        ("name: rte", "name: 'rte' is a task of isoreg"),
        ("name: toy-mine", "name: 'toy-mine'"),
        ("name: my task", "name: 'my task'"),
        ("kind: qa", "metric: 'accuracy' is unknown"),
        ("!!python/object/apply:os.system [id]", "cannot be read as YAML"),
    ],
)
def test_a_bad_definition_fails_at_once_with_field_value_and_remedy(folder, change, message):
    name = change.partition(":")[0]
    lines = [line for line in (LEAST + "metric: accuracy\n").splitlines() if not line.startswith(f"{name}:")]
    (folder / "polarity.yaml").write_text("\n".join([*lines, change]) + "\n")
    with pytest.raises(ValueError, match=message):
        RunConfig(task=str(folder / "polarity.yaml"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("sentence,label\na,x\nb,x\n", "has the labels .*'x'.*need two or more"),
        ("words,label\na,x\nb,y\n", "no column sentence; it has"),
        ("sentence,label\na,x\nb\n", "cannot be read .*CSV and TSV need a head line"),
        ("sentence,label\na,1\nb,\nc,2\n", "1 of 3 rows have no valid label"),
        ("sentence,label\na,x\nb,nan\nc,y\n", "1 of 3 rows have no valid label"),
        ("sentence;label\na;x\nb;y\n", r"no column label; it has \['sentence;label'\]; columns end with a comma"),
        (
            "a,x\nb,y\n",
            "no column label; it has .*the first line of the file names them; text: and label: of the definition name",
        ),
    ],
)
def test_bad_rows_are_refused_before_a_model_is_loaded(folder, text, message, monkeypatch):
    (folder / "train.csv").write_text(text)
    monkeypatch.setattr("isoreg.experiments.finetune.load_model", lambda *a: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        run(RunConfig(task=str(folder / "polarity.yaml")))


@pytest.mark.parametrize(
    "change, message",
    [
        ("labels: [right, left]", "column label holds 'wrong'; labels are the integers 0 to 1 or the names"),
        (
            "metric: pearson",
            "column label holds '(right|wrong)'; a regression needs numbers, names metric: accuracy",
        ),
    ],
)
def test_a_label_that_the_task_has_not_is_named(folder, change, message):
    (folder / "polarity.yaml").write_text(LEAST + change + "\n")
    with pytest.raises(ValueError, match=message):
        load_task(read_task(folder / "polarity.yaml"))


def test_what_is_odd_about_rows_of_ones_own_is_noted(folder):
    (folder / "polarity.yaml").write_text(LEAST.replace("dev.csv", "train.csv") + "metric: f1\n")
    (folder / "train.csv").write_text((folder / "train.csv").read_text() + " ,right\n")
    notes = run(RunConfig(task=str(folder / "polarity.yaml"), regularizer="none", epochs=1, max_length=8)).data["notes"]
    assert notes[:3] == [
        "f1 is that of the label 'wrong'; labels in the definition set another order",
        "2 of 98 rows have an empty text",
        "49 of 49 evaluation rows have the texts of training rows",
    ]
    lengths = [2] + [len(toy_tokenizer()(t)["input_ids"]) for t, _ in rows("train", 48)]
    assert notes[3] == f"{sum(n >= 8 for n in lengths)} of 49 training rows fill 8 tokens; what is longer is cut"


def test_the_name_of_a_task_file_is_corrected(folder):
    with pytest.raises(ValueError, match="task: no file '.*polarty.yaml'; did you mean 'polarity.yaml'"):
        read_task(folder / "polarty.yaml")


def test_a_run_is_done_anew_when_the_weights_in_its_folder_change(folder):
    model = shutil.copytree(toy_model_path(), folder / "model")
    config = RunConfig(task=str(folder / "polarity.yaml"), model=str(model), regularizer="none", epochs=1)
    record = run(config).to_dict()
    planned = Run(config.key, "finetune", config.to_dict())
    (folder / "out" / config.key).mkdir(parents=True)
    (folder / "out" / config.key / "record.json").write_text(json.dumps(record))
    assert set(record["inputs"]) == {"model", "tokenizer"} and Folder(folder / "out").record(planned) == record
    (model / "pytorch_model.bin").symlink_to("nowhere")  # nobody reads it
    (model / "notes.bin").mkdir()
    assert changed_inputs(record) == []
    weights = load_file(model / "model.safetensors")
    save_file({n: 2 * w for n, w in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    assert config.key == record["key"] and changed_inputs(record) == ["model"]
    assert is_record_of(record, planned) and Folder(folder / "out").record(planned) is None
    assert changed_inputs(record | {"inputs": {}}) == []  # as an older record, which does not tell
    shutil.rmtree(model)
    assert changed_inputs(record) == []  # nor can what is not here


@pytest.mark.parametrize("values", [[1, 2, 3], [1.5, 2.5, 3.5], [True, False, True]])
def test_texts_that_are_numbers_are_read_as_texts(folder, values):
    for name in ("train", "validation"):
        pq.write_table(pa.table({"sentence": values, "label": ["a", "b", "a"]}), folder / f"{name}.parquet")
    (folder / "t.yaml").write_text(
        "name: t\nfiles: {train: train.parquet, validation: validation.parquet}\ntext: sentence\n"
    )
    assert load_task(read_task(folder / "t.yaml")).train["sentence"] == [str(v).lower() for v in values]


def test_a_label_that_is_called_nan_counts_where_it_is_declared(folder):
    (folder / "train.csv").write_text("sentence,label\na,en\nb,nan\n")
    (folder / "dev.csv").write_text("sentence,label\nc,nan\nd,en\n")
    (folder / "polarity.yaml").write_text(LEAST + "labels: [en, nan]\n")
    assert load_task(read_task(folder / "polarity.yaml")).train["label"] == [0, 1]


def test_questions_in_a_folder_are_loaded(folder):
    answers = [{"text": ["b"], "answer_start": [2]}] * 2
    rows = {"id": ["1", "2"], "context": ["a b"] * 2, "question": ["what?"] * 2, "answers": answers}
    (folder / "squad").mkdir()
    for name in ("train", "validation"):
        pq.write_table(pa.table(rows), folder / "squad" / f"{name}.parquet")
    assert len(load_task("squad", folder).train) == 2


@pytest.mark.parametrize(
    "task, names", [("cola", "train validation"), ("mnli", "train validation_matched validation_mismatched")]
)
def test_a_change_of_a_data_folder_is_seen(folder, task, names):
    (folder / "glue" / task).mkdir(parents=True)
    files = [folder / "glue" / task / f"{name}.parquet" for name in names.split()]
    for file in files:
        pq.write_table(pa.table({"sentence": ["a", "b"], "label": [0, 1], "idx": [0, 1]}), file)
    config = RunConfig(task=task, data_dir=str(folder)).to_dict()
    record = {"config": config, "inputs": inputs_sha256(config)}
    assert set(record["inputs"]) == {"data_dir"} and changed_inputs(record) == []
    pq.write_table(pa.table({"sentence": ["a", "c"], "label": [0, 1], "idx": [0, 1]}), files[-1])
    assert changed_inputs(record) == ["data_dir"]


def test_a_sweep_looks_at_models_and_rows_before_it_starts(folder, monkeypatch):
    monkeypatch.setattr("isoreg.experiments.sweep.sweep", lambda *a: pytest.fail("it was started"))
    grid = folder / "g.yaml"
    for fixed, message in (
        ("model: my bert, task: toy-cola", "model: no folder 'my bert' here"),
        ("task: polarity.yaml", "has no column label"),
    ):
        grid.write_text(f"fixed: {{regularizer: none, {fixed}}}\naxes: {{seed: [0, 1]}}\n")
        (folder / "train.csv").write_text("a,x\nb,y\n")
        with pytest.raises(ValueError, match=message):
            sweep_command(str(grid), folder / "out")


def test_run_takes_a_task(folder):
    task = Task(
        "words",
        text_columns=["sentence"],
        files={s: str(folder / f"{n}.csv") for s, n in (("train", "train"), ("validation", "dev"))},
    )
    record = run(RunConfig(regularizer="none", epochs=1), task=task)
    assert record.config["task"] == "words" and record.config["definition"]["text"] == ["sentence"]
    assert run(RunConfig(regularizer="none", **TINY), task=TASKS["toy-rte"]).config["definition"] is None


def test_a_grid_finds_the_task_beside_itself(folder):
    (folder / "g.yaml").write_text(
        "fixed: {regularizer: none}\naxes: {task: [polarity.yaml, toy-cola], seed: [0, 1]}\n"
    )
    plan = expand(load_grid(folder / "g.yaml"))
    assert [r.config["task"] for r in plan.runs] == ["polarity", "polarity", "toy-cola", "toy-cola"]
    assert plan.runs[0].key == RunConfig(task=str(folder / "polarity.yaml"), regularizer="none").key


# ---- penalties and schedules -----------------------------------------------------------------------------------------


class Length(nn.Module):
    "A penalty that knows of nothing of isoreg."

    def __init__(self, lam=0.5, power: float = 2.0, name: str = "plain"):
        super().__init__()
        self.lam, self.power, self.name = lam, power, name

    def forward(self, hidden_states, attention_mask):
        return self.lam * hidden_states[-1].norm(dim=-1).pow(self.power).mean()


def test_a_penalty_by_name_has_its_settings_in_key_record_and_label(monkeypatch):
    monkeypatch.setitem(PENALTIES, "length", Length)
    config = RunConfig(regularizer="length", power=3, **TINY)
    assert config.lam == 0.5 and config.penalty_settings == {"power": 3.0} and made("regularizer", config).power == 3
    assert RunConfig(regularizer="length", **TINY).key != config.key == RunConfig(**config.to_dict()).key
    assert RunConfig(regularizer="length", power=2.0, name="plain").key == RunConfig(regularizer="length").key
    assert method_label(config.to_dict()) == "length λ=0.5, power 3.0" and "penalty_settings" in command(config)
    record = run(config)
    assert load(record).method.tolist() == ["length λ=0.5, power 3.0"]
    monkeypatch.delitem(PENALTIES, "length")
    assert RunConfig.from_record(record.config).key == config.key  # it can be read where the plug-in is not
    with pytest.raises(ValueError, match="regularizer: 'length' is unknown"):
        run(RunConfig.from_record(record.config))


def test_a_table_that_names_a_usual_value_plays_its_part(monkeypatch, capsys, tmp_path):
    from isoreg import cli

    monkeypatch.setitem(PENALTIES, "length", Length)
    monkeypatch.setattr(cli, "_finished", lambda *a: SimpleNamespace(value=0.5))
    monkeypatch.setattr(cli, "_show_record", lambda *a: None)
    table = {"power": 3.0, "name": "plain"}
    cli._run({"regularizer": "length", "penalty_settings": table, "data_dir": "."}, tmp_path, force=False)
    assert capsys.readouterr().err == "note: data_dir . plays no part in this run\n"


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(pwer=2), "pwer: unknown parameter; did you mean power"),
        (dict(power="much"), "power: 'much' is not float; give a number, such as 2.0"),
        (dict(name=1), "name: 1 is not str; give text"),
        (dict(penalty_settings={"other": 1}), "other: is no setting of Length"),
        (dict(regularizer="lengthy"), "regularizer: 'lengthy' is unknown; did you mean length"),
        (dict(regularizer="istar", penalty_settings={"power": 1}), "penalty_settings: istar has none"),
        (dict(dropout="rise"), "dropout: 'rise' is unknown; use standard"),
    ],
)
def test_bad_settings_of_a_plug_in_are_refused_at_once(monkeypatch, values, message):
    monkeypatch.setitem(PENALTIES, "length", Length)
    with pytest.raises(ValueError, match=message):
        RunConfig(**dict(regularizer="length") | values)


def test_a_common_setting_has_to_mean_the_same(monkeypatch):
    monkeypatch.setitem(PENALTIES, "mine", lambda lam, zeta=0.5: Length(lam))
    with pytest.raises(ValueError, match=r"has zeta=0.5, but runs have zeta=0.2; give it that default"):
        RunConfig(regularizer="mine")
    monkeypatch.setitem(PENALTIES, "needs", lambda lam, width: Length(lam))
    with pytest.raises(ValueError, match="width: .*needs it"):
        RunConfig(regularizer="needs")
    monkeypatch.setitem(PENALTIES, "slow", lambda lam, warmup=0.5: Length(lam))
    with pytest.raises(ValueError, match="has a parameter warmup, the name of a setting of all runs"):
        RunConfig(regularizer="slow", warmup=0.2)


def test_built_in_penalties_are_made_in_the_same_way():
    istar = made("regularizer", RunConfig(lam=-0.3, zeta=0.4, layers="mean", convention="text"))
    assert isinstance(istar, IStar) and (istar.lam, istar.zeta, istar.layers, istar.convention) == (
        -0.3,
        0.4,
        "mean",
        "text",
    )
    cosreg = made("regularizer", RunConfig(regularizer="cosreg", cosreg_layer=2))
    assert isinstance(cosreg, CosReg) and (cosreg.lam, cosreg.layer) == (1.0, 2)
    assert made("regularizer", RunConfig(regularizer="none")) is None


def test_run_takes_any_module():
    record = run(RunConfig(**TINY), penalty=Length(0.1, power=1.0))
    assert (record.config["regularizer"], record.config["lam"]) == ("Length", 0.1)
    assert (
        record.config["penalty_settings"] == {"power": 1.0} and load(record).method.iloc[0] == "Length λ=0.1, power 1.0"
    )
    plain = run(RunConfig(regularizer="none", **TINY))
    assert record.loss[-1]["loss"] > plain.loss[-1]["loss"] + 0.1 and record.key != plain.key
    named = RunConfig(lam=-0.2, zeta=0.0, correction="ustat", **TINY)
    given = run(RunConfig(regularizer="none", **TINY), penalty=IStar(-0.2, zeta=0.0, correction="ustat"))
    assert given.key == named.key and given.loss == run(named).loss  # a known class is the run of that name
    with pytest.raises(ValueError, match="penalty: 3 is no torch module"):
        run(RunConfig(), penalty=3)


def test_a_schedule_by_name_sets_the_rates(monkeypatch):
    rising = lambda sites, p_max=0.1, bend=1.0: {s.name: p_max * i / len(sites) for i, s in enumerate(sites)}
    monkeypatch.setitem(DROPOUTS, "rising", rising)
    record = run(RunConfig(regularizer="none", dropout="rising", p_max=0.2, bend=2, **TINY))
    rates = list(record.dropout["rates"].values())
    expected = [0.2 * i / len(rates) for i in range(len(rates))]
    assert record.dropout["how"] == "rising" and rates == pytest.approx(expected)
    assert load(record).method.tolist() == ["rising p 0 to 0.2, bend 2.0"]

    def reads_scores(sites, scores, p_min=0.0):
        return {s.name: 0.05 if scores.get(s.name, 0) > 0 else p_min for s in sites}

    monkeypatch.setitem(DROPOUTS, "informed", reads_scores)
    informed = run(RunConfig(regularizer="none", dropout="informed", **TINY))
    assert max(informed.dropout["rates"].values()) == 0.05 and any("Fisher" in n for n in informed.dropout["notes"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "A folder in which the template is installed."
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "tests" / "plugin", folder / "source")
    pip = "-m pip install -q --no-index --no-deps --no-build-isolation --disable-pip-version-check --target".split()
    subprocess.run([sys.executable, *pip, folder / "site", folder / "source"], check=True, capture_output=True)
    return folder / "site"


def command_line(site, cwd, *arguments):
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "isoreg.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_plug_in_runs_from_the_command_and_a_grid(site, tmp_path):
    tiny = "--epochs 1 --set max_train=48 --set max_eval=40".split()
    command_line(site, tmp_path, "run", "--regularizer", "length", "--set", "target=2", "--dropout", "rising", *tiny)
    (file,) = tmp_path.glob("runs/*/record.json")
    record = RunRecord.load(file)
    assert record.config["penalty_settings"] == {"target": 2.0} and record.versions["isoreg-example"] == "0.1"
    assert "length" in record.loss[0] and record.dropout["how"] == "rising"
    fixed = "fixed: {max_train: 48, max_eval: 40, epochs: 1}\n"
    method = "axes: {method: [{regularizer: length, target: [1, 2], dropout: rising}]}\n"
    (tmp_path / "g.yaml").write_text(fixed + method)
    out = command_line(site, tmp_path, "sweep", "g.yaml", "--jobs", "1")
    assert "2 of 2 runs are done (1 by this sweep" in out  # one of them is the run above
    shown = command_line(site, tmp_path, "report", "runs")
    summary = (tmp_path / "report" / "summary.md").read_text()
    for label in ("length λ=0.1 + rising", "length λ=0.1, target 2.0 + rising"):
        assert label in summary and label in shown


def test_the_package_tells_a_plug_in_that_cannot_be_loaded(site, tmp_path, monkeypatch):
    broken = tmp_path / "broken-0.1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (broken / "entry_points.txt").write_text("[isoreg.penalties]\nbroken = no_such_module:Penalty\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"regularizer: 'broken' of no_such_module:Penalty cannot be loaded"):
        RunConfig(regularizer="broken")


def test_no_package_takes_a_name_of_isoreg(tmp_path, monkeypatch):
    (tmp_path / "usurper.py").write_text("raise SystemExit('loaded')\n")
    package = tmp_path / "usurper-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: usurper\nVersion: 0.1\n")
    names = "".join(f"[isoreg.{g}]\n{n} = usurper:make\n" for g, n in (("penalties", "istar"), ("dropouts", "guided")))
    (package / "entry_points.txt").write_text(names)
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(**TINY)
    assert isinstance(made("regularizer", config), IStar) and packages(config) == {}
    assert name_of(CosReg) == "cosreg" and name_of(Length) == "Length"  # nothing of other packages is loaded
    for registry, name in ((PENALTIES, "istar"), (DROPOUTS, "guided")):
        with pytest.raises(ValueError, match=f"'{name}' is a name of isoreg's own"):
            registry[name] = Length


# ---- names of the package --------------------------------------------------------------------------------------------


def test_names_of_the_package_are_lazy():
    code = (
        "import sys, isoreg; assert 'torch' not in sys.modules\n"
        "import importlib\n"
        "names = 'IStar CosReg PenaltyTrainer isoscore IsoScore empirical_fisher apply_dropout'.split()\n"
        "assert set(names) <= set(dir(isoreg)) and 'torch' not in sys.modules\n"
        "from isoreg import IStar, CosReg, PenaltyTrainer, isoscore, IsoScore, empirical_fisher, apply_dropout\n"
        "import isoreg.isoscore as module\n"
        "from isoreg import isoscore as again\n"
        "import torch; x = torch.randn(50, 4)\n"
        "assert isoscore(x) == module.isoscore(x) == again(x) == isoreg.isoscore.isoscore(x)\n"
        "assert PenaltyTrainer.__module__ == 'isoreg.trainer' and IsoScore.__module__ == 'isoreg.metric'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_type_checkers_see_the_names():
    text = (ROOT / "isoreg" / "__init__.py").read_text()
    block = text.split("if TYPE_CHECKING:")[1].split("\n", 1)[1].split("_HOME")[0]
    namespace = {}
    exec(block.replace("    from .", "from isoreg."), namespace)
    assert {n for n in namespace if n != "__builtins__"} == set(isoreg._HOME)
    assert all(getattr(isoreg, n) is namespace[n] for n in isoreg._HOME if n != "isoscore")


def test_the_first_touch_of_a_name_that_is_a_module_too_gives_both():
    code = (
        "import isoreg, torch; x = torch.randn(50, 8)\n"
        "assert isoreg.isoscore.isoscore_with_error(x)[0] > 0 and isoreg.isoscore(x) > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
