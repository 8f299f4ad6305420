"""Tasks: metrics against formulas and other libraries, split protocols, sources, SQuAD windows."""

import json
import math
import os
import warnings
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from scipy import stats

from isoreg.experiments.config import RunConfig
from isoreg.experiments.data import SCORES, MissingSplit, encode, load_task, normalize_answer, resample, split_rows
from isoreg.experiments.data import load_metric, squad_predictions, squad_scores
from isoreg.experiments.finetune import run
from isoreg.experiments.tasks import METRICS, TASKS, Task
from isoreg.experiments.toy import toy_tokenizer

DATA = os.environ.get("ISOREG_DATA")
real = pytest.mark.skipif(not DATA, reason="ISOREG_DATA is not set: no folder of real tasks")
bits = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
plain = st.text(alphabet="abct he-.,ANÉ1 ", max_size=25)


def compute(task, predictions, references):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_metric(task).compute(predictions=predictions, references=references)


def test_papers_tasks_and_metrics():
    of = lambda paper: {t.name for t in TASKS.values() if paper in t.papers}
    assert of("istar") - of("guided-dropout") == {"sst5", "squad"}
    assert of("guided-dropout") - of("istar") == {"mnli", "mnli-mm", "wnli"}
    assert {*METRICS["classification"], *METRICS["regression"]} == set(SCORES)  # what is computed


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_right_answer_has_the_best_score(task):
    p = r = [0, 1, 1]
    if task.kind == "qa":
        p, r = [{"id": "a", "prediction_text": "x"}], [{"id": "a", "answers": {"text": ["x"], "answer_start": [0]}}]
    assert compute(task, p, r) == pytest.approx(dict.fromkeys(task.metrics, 1.0)) and task.metric in task.metrics


def test_questions_of_ones_own_have_two_texts(tmp_path):
    row = {"context": "a cat runs", "question": "who runs ?", "answers": {"text": ["cat"], "answer_start": [2]}}
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")}
    for split, file in files.items():
        Path(file).write_text(json.dumps(row | {"id": split}))
    data = load_task(Task("mine", kind="qa", metric="f1", files=files))
    assert data.train["question"][0] == data.evaluation["question"][0] == "who runs ?" and data.seen == 1


OWN = {"name": "polarity", "labels": ("negative", "positive"), "metrics": ("accuracy", "f1"), "folder": "polarity"}
TEXTS = ["the cat runs .", "the dog sleeps ."] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kind="classify"), "Input should be 'classification', 'regression' or 'qa'"),
        (dict(metric="acc"), "metric: 'acc' is unknown; .*use 'accuracy' or 'f1'"),
        (dict(metrics=("f1", "pearson")), "metric: 'accuracy' is unknown; use 'f1' or 'pearson'"),
        (dict(text=()), "text: Value should have at least 1 item"),
        (dict(labels=("a", "a", "b")), "labels: .*two different"),
        (dict(folder=None), "files: train is missing; add train: FILE, or a hub"),
        (dict(files={"train": "a.csv"}), "files: validation is missing"),
        (dict(files={"validation": "a.csv"}), "files: train is missing"),
        (dict(files={"train": "a.csv", "validation": "a.xls"}), "files: validation: '.xls' is unknown"),
        (dict(labels=("a", "b", "c")), "metric: f1 needs two labels"),
        (dict(kind="regression", metric="pearson", metrics=("pearson",)), "labels: .*else none"),
    ],
)
def test_a_record_that_cannot_work_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Task(**OWN | change)


WRONG = [dict(text=3), dict(eval_splits=[]), dict(hub=["a", "b", "c"]), dict(official_rows=[3]), dict(labl="x")]
WRONG += [dict(text=["text", "text"]), dict(text="label")]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: f"{change}")
def test_a_field_of_another_kind_is_refused_by_name(change):
    usual = {"name": "mine", "files": {"train": "train.csv", "validation": "dev.csv"}}
    assert Task(**usual).text == ("text",)
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: "):
        Task(**usual | change)


def test_a_record_of_lists_and_single_names_is_one_of_tuples():
    task = Task(**OWN | dict(text="text", metrics=["accuracy", "f1"], hub="a/b", official_rows={"train": 5}))
    assert (task.text, task.metrics, task.hub) == (("text",), ("accuracy", "f1"), ("a/b", None))
    assert Task("mine", labels=[0, 1], folder="mine").labels == ("0", "1")


def test_the_key_of_a_task_of_ones_own_stays():
    pairs = [["train", 5], ["validation", 3]]  # as stored runs have them
    for rows, key in (({}, "1fe10520ed"), (dict(pairs), "cd14171604"), (pairs, "cd14171604")):
        own = {"name": "mine", "hub": "a/b", "labels": ["a", "b"], "official_rows": rows}
        config = RunConfig(task="mine", definition=own)
        assert config.key.endswith(f"-{key}") and RunConfig.from_record(config.to_record()).key == config.key
        assert Task(**config.definition).official_rows == dict(rows)


@given(bits)
@settings(max_examples=60, deadline=None)
def test_binary_metrics_by_the_confusion_matrix(pairs):
    p, r = map(list, zip(*pairs))
    tp, tn = sum(a and b for a, b in pairs), sum(not a and not b for a, b in pairs)
    fp, fn = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    matthews = (tp * tn - fp * fn) / math.sqrt(below) if below else 0.0
    assert math.isclose(compute("cola", p, r)["matthews_correlation"], matthews, abs_tol=1e-12)
    scores = compute("mrpc", p, r)
    assert math.isclose(scores["accuracy"], (tp + tn) / len(pairs))
    assert math.isclose(scores["f1"], 2 * tp / (2 * tp + fp + fn) if tp else 0.0)


@pytest.mark.parametrize("metric", SCORES)
def test_many_rows_drawn_anew_score_about_the_same_and_constant_ones_zero(metric):
    task, r = Task("mine", metric=metric, folder="mine"), np.arange(200_000) % 2
    p = np.where(np.arange(len(r)) % 10 < 2, 0, r)  # wrong in a tenth
    np.testing.assert_allclose(resample(task, p, r, draws=3), SCORES[metric](p, r), atol=0.01)
    assert metric == "accuracy" or not resample(task, 0 * p, 0 * r, draws=3).any()


@given(st.integers(3, 50), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_correlations_against_numpy(n, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=n).astype("float32"), rng.integers(0, 6, n).astype("float32")
    if len(set(y)) < 2:
        return
    scores = compute("stsb", x.tolist(), y.tolist())
    assert math.isclose(scores["pearson"], np.corrcoef(x, y)[0, 1], abs_tol=1e-5)
    assert math.isclose(scores["spearman"], np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1], abs_tol=1e-5)


@pytest.mark.parametrize(
    "p, r",
    [([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [1.0]), ([float("nan"), 1.0], [1.0, 2.0])],
)
def test_undefined_correlation_is_zero(p, r):
    assert compute("stsb", p, r) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.parametrize(
    "said, gold, exact, f1",
    [
        ("the Normans", ["Normans"], 1, 1),
        ("Normans!", ["normans"], 1, 1),
        ("", ["x"], 0, 0),
        ("the", ["a"], 1, 1),
        ("in 1066 AD", ["1066"], 0, 1 / 2),
        ("x x y", ["x z"], 0, 2 / 5),
        ("10th", ["in the 10th century", "10th  "], 1, 1),
    ],
)
def test_squad_by_hand(said, gold, exact, f1):
    e, f = squad_scores(said, gold)
    assert e == exact and math.isclose(f, f1)


@given(plain, plain, plain)
@settings(max_examples=150, deadline=None)
def test_squad_invariants(a, b, c):
    exact, f1 = squad_scores(a, [b])
    assert 0 <= exact <= f1 <= 1
    assert squad_scores(a, [a]) == (1.0, 1.0)
    assert squad_scores(b, [a]) == (exact, f1)  # symmetric in a single pair
    both = squad_scores(a, [b, c])
    assert both == tuple(map(max, (exact, f1), squad_scores(a, [c])))  # the best reference counts
    assert squad_scores(f"The {a}.", [b]) == (exact, f1)  # articles, case and punctuation do not
    assert normalize_answer(normalize_answer(a)) == normalize_answer(a)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_split_rows_partition(n, m, seed):
    for protocol in ("official", "joined"):
        a, b = split_rows(n, m, protocol, seed)
        assert sorted([*a, *b]) == list(range(n + m))
        assert len(b) == (m if protocol == "official" else math.ceil((n + m) / 5))
    assert list(split_rows(n, m, "joined", seed)[0]) == list(split_rows(n, m, "joined", seed)[0])
    with pytest.raises(ValueError, match="protocol: 'jointed' .*'official' or 'joined'"):
        split_rows(n, m, "jointed", seed)


@pytest.mark.parametrize("protocol", ["official", "joined"])
def test_fractions_are_nested_and_leave_evaluation_alone(protocol):
    key = lambda rows: [(r["sentence1"], r["sentence2"]) for r in rows]
    sets = [load_task("toy-stsb", seed=5, train_fraction=f, split_protocol=protocol) for f in (0.1, 0.35, 1.0)]
    small, middle, full = (key(s.train) for s in sets)
    assert middle[: len(small)] == small and set(middle) < set(full)
    assert len(small) == round(0.1 * len(full)) and len(middle) == round(0.35 * len(full))
    assert len({tuple(key(s.evaluation)) for s in sets}) == 1
    assert not set(full) & set(key(sets[0].evaluation))
    assert key(load_task("toy-stsb", seed=6, train_fraction=0.1, split_protocol=protocol).train) != small


def test_max_rows_are_noted_and_evaluation_does_not_depend_on_the_seed():
    a, b = (load_task("toy-cola", seed=s, max_train=30, max_eval=20) for s in (0, 1))
    assert len(a.train) == 30 and len(a.evaluation) == 20 and len(a.notes) == 2
    assert a.evaluation.to_list() == b.evaluation.to_list() and a.train.to_list() != b.train.to_list()


def write(folder, name, rows):
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(Dataset.from_list(rows).data.table, path)


def rte_rows(n, start=0):
    return [
        {"idx": i, "label": i % 2, "sentence2": f"hypothesis {i}", "sentence1": f"premise {i}"}
        for i in range(start, start + n)
    ]


def test_folder_gives_columns_in_order_and_notes(tmp_path):
    write(tmp_path, "glue/rte/train.parquet", rte_rows(8))
    write(tmp_path, "glue/rte/validation_part.parquet", rte_rows(4, 50))
    with pytest.raises(MissingSplit) as error:
        load_task("rte", tmp_path)
    assert isinstance(error.value, ValueError) and isinstance(error.value, FileNotFoundError)
    assert "no file glue/rte/validation.parquet" in str(error.value) and "validation_part" in str(error.value)
    data = load_task("rte", tmp_path, eval_split="validation_part")
    assert data.train.column_names == ["sentence1", "sentence2", "label"] and data.train[3]["sentence1"] == "premise 3"
    assert data.sources == {"train": "glue/rte/train.parquet", "validation_part": "glue/rte/validation_part.parquet"}
    assert any("validation_part is not the official split" in n for n in data.notes)
    assert any("8 rows" in n and "2490" in n for n in data.notes)  # a short file under the official name is noticed
    assert data.majority == 0.5


def test_mnli_keeps_its_splits_in_the_joined_protocol_and_shuffles_the_rows(tmp_path):
    rows = [{"label": i % 3, "premise": f"{i}", "hypothesis": ""} for i in range(8)]
    write(tmp_path, "glue/mnli/train.parquet", rows)
    write(tmp_path, "glue/mnli/validation_matched.parquet", rows[:2])
    data = load_task("mnli", tmp_path, split_protocol="joined", seed=3)
    order = np.random.default_rng(3).permutation(8)
    assert data.train["premise"][:] == [f"{i}" for i in order] and data.evaluation["premise"][:] == ["0", "1"]


def test_fingerprint_sees_rows_and_order_and_nothing_else(tmp_path):
    rows = rte_rows(6)
    other = [{k: r[k] for k in ("sentence1", "sentence2", "label")} | {"idx": 99} for r in rows]
    for name, train in (("a", rows), ("b", other), ("c", rows[::-1])):
        write(tmp_path, f"{name}/glue/rte/train.parquet", train)
        write(tmp_path, f"{name}/glue/rte/validation.parquet", rows[:2])
    a, b, c = (load_task("rte", tmp_path / f).fingerprint for f in "abc")
    assert a == b != c and len(a) == 64


def test_hub_and_folder_give_the_same_columns_and_fingerprint(tmp_path, monkeypatch):
    rows, asked, text = {"train": rte_rows(8), "validation": rte_rows(4, 50)}, [], datasets.Value("string")
    label = datasets.ClassLabel(names=["entailment", "not_entailment"])
    features = dict(sentence1=text, sentence2=text, label=label, idx=datasets.Value("int32"))

    def hub(path, config, split):
        asked.append((path, config, split))
        return Dataset.from_list(rows[split], features=datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", hub)
    for split in rows:
        write(tmp_path, f"glue/rte/{split}.parquet", rows[split])
    a, b = load_task("rte"), load_task("rte", tmp_path)
    assert asked == [("nyu-mll/glue", "rte", split) for split in rows]
    assert a.fingerprint == b.fingerprint and a.train.features == b.train.features
    assert a.sources == dict.fromkeys(rows, "hub:nyu-mll/glue/rte")


def test_labels_in_another_order_than_the_file_names_them_are_refused(tmp_path):
    label = datasets.ClassLabel(names=["yes", "no"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    Dataset.from_dict({"text": list("abcd"), "label": [0, 1] * 2}, features=features).to_parquet(tmp_path / "x.parquet")
    task = Task("own", text=("text",), files=dict.fromkeys(("train", "validation"), f"{tmp_path}/x.parquet"))
    assert load_task(Task(**dict(task) | {"labels": ("yes", "no")})).train["label"][:] == [0, 1] * 2
    other = features | {"label": datasets.ClassLabel(names=["no", "yes"])}
    Dataset.from_dict({"text": list("ab"), "label": [0, 1]}, datasets.Features(other)).to_parquet(
        tmp_path / "y.parquet"
    )
    with pytest.raises(
        ValueError, match="labels: the training rows number .*, the others .*; number them in one order"
    ):
        load_task(Task(**dict(task) | {"files": task.files | {"validation": f"{tmp_path}/y.parquet"}}))
    with pytest.raises(ValueError, match=r"labels: \['no', 'yes'\], and the data have the order \['yes', 'no'\]"):
        load_task(Task(**dict(task) | {"labels": ("no", "yes")}))


def own(tmp_path, **columns):
    write(tmp_path, "polarity/train.parquet", [{"text": t, "label": i % 2} for i, t in enumerate(TEXTS)])
    Dataset.from_dict(columns).to_parquet(tmp_path / "polarity/validation.parquet")
    return load_task(Task(**OWN), tmp_path).evaluation["label"][:]


@pytest.mark.parametrize("labels", [[0, 1], ["negative", "positive"], ["0", "1"], [0.0, 1.0], [False, True]])
def test_labels_are_integers_or_names(tmp_path, labels):
    assert own(tmp_path, text=TEXTS, label=labels * 3) == [0, 1] * 3


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(text=TEXTS, label=["positive", "neg"] * 3), "such as 'neg'; a label is one of .*'negative', 'positive'"),
        (dict(text=TEXTS, label=[0.5, 1] * 3), "3 of 6 rows have no valid label, such as 0.5"),
        (dict(text=TEXTS, label=[None, 1] * 3), "3 of 6 rows have no valid label, such as None"),
        (dict(text=TEXTS, label=[0, -1] * 3), "3 of 6 rows have no valid label, such as -1"),  # as GLUE's test
        (dict(text=[None] + TEXTS[1:], label=[0, 1] * 3), "1 rows of column text are None"),
        (dict(txt=TEXTS, label=[0, 1] * 3), "no column text; it has"),
        (dict(text=[], label=[]), "has no rows"),
        (dict(text=TEXTS, label=[[0, 1]] * 6), "no valid label, such as"),
    ],
)
def test_rows_without_text_or_label_are_refused(tmp_path, columns, message):
    with pytest.raises(ValueError, match=f"of polarity.*{message}"):
        own(tmp_path, **columns)


def of_csv(tmp_path, train, evaluation, names=()):
    "The labels that the cells of a label column become, of training and evaluation rows."
    files = {}
    for split, cells in (("train", train), ("validation", evaluation)):
        files[split] = str(tmp_path / f"{split}.csv")
        Path(files[split]).write_text("text,label\n" + "".join(f"a,{c}\n" for c in cells.split()))
    data = load_task(Task("own", files=files, labels=names))
    return data.task.labels, data.train["label"][:], data.evaluation["label"][:]


@pytest.mark.parametrize(
    "names, train, evaluation, numbers",
    [
        ((), "1 2 3", "1.0 2.0", ([0, 1, 2], [0, 1])),
        ((), "1.0 2.0 3.0", "2 3", ([0, 1, 2], [1, 2])),
        ((), "1.0 other", "1 1.0", ([0, 1], [0, 0])),
        ((), f"1{'0' * 16}2 1{'0' * 16}1 02 1.10 1.1 x", "1.10 x", ([4, 3, 0, 2, 1, 5], [2, 5])),  # texts
        ((), "none favor against", "favor none", ([2, 1, 0], [1, 2])),
        (("1.0", "2.0"), "1 2", "2.0 1.0", ([0, 1], [1, 0])),
        (("2", "1", "0"), "0.0 1.0 2.0", "2 0", ([2, 1, 0], [0, 2])),
        (("true", "false"), "true false", "false true", ([0, 1], [1, 0])),
        (("False", "True"), "True False", "False True", ([1, 0], [0, 1])),
        (("no", "yes"), "0 1", "1.0 0.0", ([0, 1], [1, 0])),
    ],
)
def test_numbers_and_booleans_go_by_their_names_however_they_are_written(tmp_path, names, train, evaluation, numbers):
    known, *found = of_csv(tmp_path, train, evaluation, names)
    assert tuple(found) == numbers and (names or "1.0" not in known or "other" in known)


def test_large_numbers_and_headings_that_repeat(tmp_path):
    split = dict.fromkeys(("train", "validation"), str(tmp_path / "t.jsonl"))
    rows = [{"text": "a", "label": x} for x in (10**16 + 1, 10**16 + 2, 1)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_task(Task("own", files=split)).task.labels == ("1", f"{10**16 + 1}", f"{10**16 + 2}")
    assert load_task(Task("own", metric="pearson", files=split)).train["label"][:] == pytest.approx([1e16, 1e16, 1.0])
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": [0, 1]}\n')
    with pytest.raises(ValueError, match="column label: give one label a row"):
        load_task(Task("own", files=split))
    (tmp_path / "t.csv").write_text("text,text,label\na,b,0\nc,d,1\n")
    with pytest.raises(ValueError, match="has 2 columns text; it has"):
        load_task(Task("own", files=dict.fromkeys(split, str(tmp_path / "t.csv"))))
    (tmp_path / "t.csv").write_text("text,label,label\na,0,0\nc,1,1\n")
    for labels in ((), ("0", "1")):
        with pytest.raises(ValueError, match="has 2 columns label; it has"):
            load_task(Task("own", labels=labels, files=dict.fromkeys(split, str(tmp_path / "t.csv"))))


def test_quoted_numbers_are_labels_in_the_order_of_numbers(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "a", "label": "{k}"}}\n' for k in (10, -2, 9)))
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "t.jsonl"))
    assert load_task(Task("own", files=files)).task.labels == ("-2", "9", "10")


@pytest.mark.parametrize(
    "names, train",
    [(("1", "2"), "1.0 3.0"), (("1", "0"), "true false"), (("1", "2"), "1.5 2")],
)
def test_a_number_or_boolean_without_a_name_is_no_position(tmp_path, names, train):
    with pytest.raises(ValueError, match="train of own: .*no valid label, such as"):
        of_csv(tmp_path, train, "1 1", names)


def test_an_empty_label_is_missing_and_an_empty_text_is_a_text(tmp_path):
    (tmp_path / "t.csv").write_text("text,kind,label\na,1,pos\n,2,neg\nc,3,\n")
    split = dict.fromkeys(("train", "validation"), str(tmp_path / "t.csv"))
    for names in ((), ("neg", "pos")):
        with pytest.raises(ValueError, match="of own: column label: 1 of 3 rows have no valid label"):
            load_task(Task("own", files=split, labels=names))
    assert load_task(Task("own", files=split, label="kind")).train["text"][:] == ["a", "", "c"]
    for labels, metric in (((0.0, 1.0, math.nan), "accuracy"), ((0.5, -1.0, math.inf), "pearson")):
        write(tmp_path, "gap.parquet", [{"text": "a", "label": x} for x in labels])
        with pytest.raises(ValueError, match="1 of 3 rows have no valid label"):
            load_task(Task("own", metric=metric, files=dict.fromkeys(split, str(tmp_path / "gap.parquet"))))


def test_a_task_is_added_in_one_place(tmp_path, monkeypatch):
    own(tmp_path, text=TEXTS, label=[0, 1] * 3)
    with pytest.raises(ValueError, match="give the folder with polarity as data_dir"):
        load_task(Task(**OWN))
    with pytest.raises(MissingSplit, match="polarity/dev.parquet.*train, validation"):
        load_task(Task(**OWN), tmp_path, eval_split="dev")
    monkeypatch.setitem(TASKS, "polarity", Task(**OWN))
    data = load_task("polarity", tmp_path)
    assert data.majority == 0.5 and encode(data.train, "polarity", toy_tokenizer())["labels"][:] == [0, 1] * 3
    assert compute("polarity", [0, 1], [0, 1]) == {"accuracy": 1.0, "f1": 1.0}
    record = run(RunConfig(task="polarity", data_dir=str(tmp_path), regularizer="none", epochs=1))
    assert record.key.startswith("polarity-") and (record.metric, {*record.metrics}) == ("accuracy", {"accuracy", "f1"})


def test_part_files_are_never_asked_of_the_hub():
    with pytest.raises(ValueError, match="train_part of qnli: not on the hub"):
        load_task("qnli", train_split="train_part")


def test_encode_keeps_segments_labels_and_lengths():
    tokenizer, rows = toy_tokenizer(), load_task("toy-stsb", max_eval=50).evaluation
    features = encode(rows, "toy-stsb", tokenizer, max_length=12)
    assert features["labels"][:] == rows["label"][:] and max(features["length"]) <= 12
    for f, r in zip(features, rows):
        assert len(f["input_ids"]) == len(f["token_type_ids"]) == f["length"] and set(f["token_type_ids"]) == {0, 1}
        assert f["input_ids"][1] == tokenizer(r["sentence1"])["input_ids"][1]


def questions(*rows):
    answers = [{"text": said, "answer_start": list(map(context.index, said))} for context, said in rows]
    columns = {"context": [context for context, _ in rows], "answers": answers, "question": ["the dog"] * len(rows)}
    return Dataset.from_dict({"id": [f"q{i}" for i in range(len(rows))]} | columns)


@given(st.integers(0, 10**6), st.integers(12, 40))
@settings(max_examples=25, deadline=None)
def test_squad_round_trip(seed, max_length):
    """Gold logits give the answers back, whatever the windows."""
    rng, vocabulary, rows = np.random.default_rng(seed), ["dog", "cat", "the", "every", "park", "sees", "red"], []
    for _ in range(3):
        words = [str(w) for w in rng.choice(vocabulary, 30)]
        first = int(rng.integers(0, 28))
        rows.append((" ".join(words), [" ".join(words[first : first + 1 + int(rng.integers(0, 3))])]))
    examples, tokenizer = questions(*rows), toy_tokenizer()
    windows = encode(examples, "squad", tokenizer, max_length)
    logits = [np.eye(max_length + 3)[windows[f"{end}_positions"]] for end in ("start", "end")]
    assert max(windows["length"]) <= max_length and len(windows) >= 3
    said = squad_predictions(*logits, windows, examples)
    held = {w["example_id"] for w in windows if w["start_positions"] > 0}
    assert held == {"q0", "q1", "q2"}  # an overlap of an answer's length always holds it whole
    assert [s["prediction_text"] for s in said] == [answers[0] for _, answers in rows]


def test_squad_predictions_obey_limits_and_sizes():
    examples = questions(("dog cat park dog cat park", ["dog"]))
    windows = encode(examples, "squad", toy_tokenizer(), 30)
    n = len(windows[0]["input_ids"])
    start, end = np.zeros((1, n)), np.zeros((1, n))
    start[0, 0] = end[0, 0] = 99  # [CLS] is no answer
    start[0, 4], end[0, 9], end[0, 5] = 5, 5, 3  # six tokens, or two
    assert squad_predictions(start, end, windows, examples)[0]["prediction_text"] == examples[0]["context"]
    assert squad_predictions(start, end, windows, examples, max_answer=3)[0]["prediction_text"] == "dog cat"
    with pytest.raises(ValueError, match="examples: the question 'the dog' has no answer; leave such rows out"):
        encode(questions(("the dog sleeps.", [])), "squad", toy_tokenizer())


@real
@pytest.mark.parametrize(
    "name, sizes, share",
    [
        ("cola", (8551, 1043), 0.704),
        ("mrpc", (3668, 408), 2474 / 3668),
        ("rte", (2490, 277), 1241 / 2490),
        ("wnli", (635, 71), 312 / 635),
        ("sst2", (67349, 872), 0.558),
        ("stsb", (5749, 1500), None),
        ("sst5", (8544, 1101), None),
    ],
)
def test_official_rows(name, sizes, share):
    data = load_task(name, DATA)
    assert (len(data.train), len(data.evaluation)) == sizes and data.notes == []
    if share is not None:
        assert math.isclose(np.mean(data.train["label"][:]), share, abs_tol=6e-4)
    if name == "stsb":
        assert 0 <= min(data.train["label"]) and max(data.train["label"]) == 5
    if name == "sst5":
        assert np.bincount(data.evaluation["label"][:]).tolist() == [139, 289, 229, 279, 165]


@real
def test_squad_answers_come_back():
    from transformers import AutoTokenizer

    folder = os.environ.get("ISOREG_MODELS")
    if not folder:
        pytest.skip("ISOREG_MODELS is not set: no subword tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(Path(folder) / "minilm-l6-h384"))
    rows = load_task("squad", DATA, max_train=1, max_eval=300).evaluation
    windows = encode(rows, "squad", tokenizer, 384)
    logits = [np.eye(384)[windows[f"{end}_positions"]] for end in ("start", "end")]
    said = squad_predictions(*logits, windows, rows, max_answer=100)
    assert compute("squad", said, rows.select_columns(["id", "answers"]).to_list())["exact_match"] > 0.98


def test_a_metric_needs_no_home_that_can_be_written(monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", "/proc/none")
    found = load_metric("toy-cola").compute(predictions=[0, 1], references=[0, 1])
    assert found["matthews_correlation"] == 1
