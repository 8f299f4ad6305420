"""Records to rows, verdicts, tables that equal the stored ones, published numbers with sources, figures."""

import ast
import html
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

matplotlib.use("Agg")
from isoreg.files import pack
from isoreg.report import records as report
from isoreg.report import figures
from isoreg.experiments.config import model_label
from isoreg.report.figures import (
    plot_forest,
    plot_fraction,
    plot_layers,
    plot_mean_activation,
    plot_tradeoff,
    rank_correlation,
)
from isoreg.report.records import (
    clears_majority,
    compare,
    failures,
    gain_share,
    label,
    load,
    over_tasks,
    provenance,
    published,
    readable,
    summarise,
    three_columns,
    to_markdown,
    write_report,
)
from isoreg.report.statistics import ratio_interval, sign_flip, t_interval

NBS = Path(__file__).parents[1] / "nbs"
FIRST = NBS / "results" / "istar_first.jsonl"
NONE, MINUS, PLUS = (
    {"regularizer": "none", "lam": 0.0, "zeta": 0.0},
    {"regularizer": "istar", "lam": -1.0},
    {"regularizer": "istar", "lam": 1.0},
)


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    matplotlib.pyplot.close("all")


def record(method, seed, value, task="rte", settings=(), **more):
    config = (
        {
            "task": task,
            "model": "bert-base-cased",
            "seed": seed,
            "recipe": "quick",
            "lr": 5e-5,
            "epochs": 3,
            "batch_size": 32,
        }
        | method
        | dict(settings)
    )
    return {
        "key": f"{task}-{sorted(config.items())}",
        "config": config,
        "status": "done",
        "metric": "accuracy",
        "value": value,
        "metrics": {"accuracy": value, "f1": 0.5},
        "collapsed": False,
        "data": {"majority": 0.527, "notes": [], "train_rows": 2490, "evaluation_rows": 277},
        "isoscore": {
            "before": {"union": 0.2, "layers": [0.2, 0.1], "embeddings": 0.3},
            "after": {
                "union": 0.1 + 0.01 * seed + 0.1 * (method.get("lam") or 0),
                "layers": [0.3, 0.2],
                "embeddings": 0.3,
            },
        },
        "hardware": {"cpu": "A CPU", "threads": 2, "gpu": None, "precision": "fp32"},
        "git_commit": "0123456789abcdef",
        "started": f"2026-01-01T00:00:{seed:02d}",
    } | more


def failed(method, seed, error="RuntimeError: out of memory", **kw):
    whole = record(method, seed, 0.0, **kw)
    return {"key": whole["key"], "config": whole["config"], "error": error, "traceback": "...", "attempts": 2}


def arms(**values):
    names = {"none": NONE, "minus": MINUS, "plus": PLUS}
    return load([record(names[n], s, v) for n, vs in values.items() for s, v in enumerate(vs)])


# ---- records to rows


def test_importing_needs_neither_transformers_nor_matplotlib():
    code = "import sys, isoreg.report.records as r; r.label({}); "
    code += "print([n for n in ('torch', 'transformers', 'matplotlib', 'datasets') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=NBS.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_distinct_methods_have_distinct_labels():
    from isoreg.experiments.config import RunConfig

    penalties = [
        {"regularizer": "none"},
        *({"regularizer": r, "lam": lam} for r in ("istar", "cosreg") for lam in (-1, -0.25, 1, 5)),
    ]
    ways = [
        {},
        {"zeta": 0.0},
        {"zeta": 0.8},
        {"layers": "mean"},
        {"layers": 3},
        {"correction": "ustat"},
        {"convention": "text"},
        {"padding": True},
    ]
    drops = [
        {},
        {"dropout": "constant", "dropout_p": 0.05},
        {"dropout": "constant", "dropout_p": 0.1},
        {"dropout": "mixout"},
        {"dropout": "gaussian"},
        {"dropout": "gaussian-released"},
        *(
            {"dropout": d} | more
            for d in ("guided", "constant-mean", "reversed", "shuffled", "type-only")
            for more in ({}, {"p_max": 0.2}, {"p_min": 0.05}, {"aggregate": "sum"})
        ),
    ]
    configs = [RunConfig(**p, **w, **d).to_dict() for p in penalties for w in ways for d in drops]
    by_settings = {tuple(str(c[n]) for n in report.METHOD): label(c) for c in configs}
    assert len(by_settings) > 1000 and len(set(by_settings.values())) == len(by_settings)


def test_real_records_and_their_older_settings():
    df = load(FIRST)
    lines = [json.loads(line) for line in FIRST.read_text().splitlines()]
    assert list(df.key) == [r["key"] for r in lines] and list(df.line) == list(range(1, len(lines) + 1))
    assert list(df.value) == [r["value"] for r in lines] and list(df.isoscore_after) == [
        r["isoscore"]["after"]["union"] for r in lines
    ]
    assert (
        set(df.dropout) == {"standard"}
        and set(df.p_max) == {0.1}
        and set(df.data) == {"whole"}
        and df.intrinsic_dimension_after.isna().all()
    )
    assert df.isoscore_layers_after[0] == lines[0]["isoscore"]["after"]["layers"]
    assert sorted(set(df.method)) == ["I-STAR λ=-1", "I-STAR λ=1", "base"] and set(df.protocol) == {"corrected"}


def test_a_folder_with_all_that_can_lie_in_it(tmp_path):
    def put(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    good = record(NONE, 0, 0.6)
    put("a/record.json", json.dumps(good))
    put("copy/record.json", json.dumps(good))
    put("cut/record.json", json.dumps(good)[:300])
    put("fisher/record.json", json.dumps({"kind": "fisher", "config": {"model": "m"}, "status": "done"}))
    put("list/record.json", "[1, 2]")
    put("lost/failed.json", json.dumps(failed(MINUS, 0)))
    put("again/failed.json", json.dumps(failed(PLUS, 0)))
    put("again/record.json", json.dumps(record(PLUS, 0, 0.7)))
    put("nan/record.json", json.dumps(record(NONE, 1, float("nan"))))
    with pytest.warns(UserWarning) as caught:
        df = load(tmp_path)
    text = str(caught[0].message)
    assert (
        len(caught) == 1
        and all(n in text for n in ("cut/record.json", "fisher/record.json", "list/record.json"))
        and "a/record.json" not in text
    )
    assert len(df) == 4 and dict(zip(df.method + df.seed.astype(str), df.status)) == {
        "base0": "done",
        "I-STAR λ=-10": "failed",
        "I-STAR λ=10": "done",
        "base1": "failed",
    }
    assert df.error[df.method == "I-STAR λ=-1"].item().startswith("RuntimeError") and math.isnan(
        df.value[df.seed == 1].item()
    )
    assert (
        list(failures(df).columns) == ["task", "method", "seed", "run", "attempts", "error"] and len(failures(df)) == 2
    )


def test_a_line_cut_in_a_jsonl_file_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(
        json.dumps(record(NONE, 0, 0.6))
        + "\n\n"
        + json.dumps(record(NONE, 1, 0.6))[:99]
        + "\n"
        + json.dumps(record(NONE, 2, 0.6))
    )
    with pytest.warns(UserWarning, match=r"runs\.jsonl line 3 \(no complete JSON\)"):
        df = load(path)
    assert list(df.seed) == [0, 2] and list(df.line) == [1, 4]


def test_two_values_of_one_run_are_told():
    one, two = record(NONE, 0, 0.6), record(NONE, 0, 0.7) | {"started": "2027-01-01"}
    with pytest.warns(UserWarning, match="recorded twice with values 0.6 and 0.7"):
        df = load([one, two])
    assert list(df.value) == [0.7]
    with pytest.warns(UserWarning, match="0.6 and 0.7; the later one counts"):
        assert list(load([{k: v for k, v in r.items() if k != "started"} for r in (one, two)]).value) == [0.7]


@pytest.mark.parametrize("source", ["no/such/folder", []])
def test_nothing_to_load(source):
    with pytest.raises(ValueError, match="source: "):
        load(source)


def test_run_records_and_new_fields_are_taken():
    from isoreg.experiments.config import RunConfig
    from isoreg.experiments.record import RunRecord

    run = RunRecord("k", RunConfig(regularizer="none", dropout="guided").to_dict(), metric="accuracy", value=0.5)
    df = load(
        [
            run,
            record(
                NONE,
                0,
                0.6,
                geometry={
                    "after": {
                        "intrinsic_dimension": {"cls": [None, 5.0, 4.0], "mean": [6.0, 5.0, 4.0]},
                        "mean_activation": [0.1, 0.2],
                    }
                },
                predictions={"kind": "int16"},
            ),
        ]
    )
    assert list(df.method) == ["guided dropout", "base"] and list(df.data) == ["toy", "whole"]
    assert (
        df.intrinsic_dimension_after[1]["mean"] == [6.0, 5.0, 4.0]
        and df.mean_activation_after[1] == [0.1, 0.2]
        and df.predictions[1] == {"kind": "int16"}
    )


def test_scores_are_named_where_they_differ():
    guided = lambda scores, seed: record({"regularizer": "none", "dropout": "guided", "scores": scores}, seed, 0.6)
    assert set(
        load(
            [guided("results/minilm_scores.json", 0), guided("results/minilm_scores.json", 1), record(NONE, 0, 0.6)]
        ).method
    ) == {"guided dropout", "base"}
    assert set(load([guided("out/run-a/full", 0), guided(None, 0)]).method) == {
        "guided dropout scores run-a",
        "guided dropout",
    }


@pytest.mark.parametrize(
    "files, names",
    [
        # path and digest of the scores of each run -> what comes behind "guided dropout"
        ([("a/scores.json", "a1"), ("b/scores.json", "b2")], [" scores a/scores", " scores b/scores"]),
        ([("a/scores.json", ""), ("b/scores.json", "")], [" scores a/scores", " scores b/scores"]),
        ([("a/scores.json", "a1"), ("b/scores.json", "a1"), ("elsewhere/s.json", "a1")], ["", "", ""]),
        ([("s.json", "a1"), ("s.json", "b2")], [" scores s a1000000", " scores s b2000000"]),
        ([("s.json", "a1"), ("s.json", "")], ["", ""]),  # one that failed, whose record holds no digest
        ([("x/full/fisher.json", ""), ("x/fisher.json", "")], [" scores x/full/fisher.json", " scores x/fisher.json"]),
    ],
)
def test_scores_are_told_apart_by_what_they_hold(files, names):
    "One file at two places is one method, two files of one name are two."

    def guided(seed, path, digest):
        source = {"scores_source": {"sha256": digest and digest.ljust(64, "0")}}
        return record({"regularizer": "none", "dropout": "guided", "scores": path}, seed, 0.6, dropout=source)

    found = load([guided(seed, *file) for seed, file in enumerate(files)]).method
    assert list(found) == [f"guided dropout{name}" for name in names]


@pytest.mark.parametrize(
    "files, names",
    [
        # path and digest of the schedule of each run -> its name
        ([("a/rates.json", "a1"), ("b/rates.json", "b2")], ["a/rates", "b/rates"]),
        ([("a/rates.json", ""), ("b/rates.json", "")], ["a/rates", "b/rates"]),
        ([("a/rates.json", "a1"), ("b/rates.json", "a1")], ["rates", "rates"]),
        ([("rates.json", "a1"), ("rates.json", "b2")], ["rates a1000000", "rates b2000000"]),
        ([("p0.1.json", "a1"), ("p0.2.json", "b2")], ["p0.1", "p0.2"]),
    ],
)
def test_schedules_are_told_apart_by_what_they_hold(files, names):
    def scheduled(seed, path, digest):
        done = {"schedule_sha256": digest and digest.ljust(16, "0")}
        return record({"regularizer": "none", "dropout": path}, seed, 0.6, dropout=done)

    found = load([scheduled(seed, *file) for seed, file in enumerate(files)]).method
    assert [name.removeprefix("schedule ") for name in found] == names


@pytest.mark.parametrize(
    "settings, notes, kind",
    [
        ((), [], "whole"),
        ({"train_split": "train_rebuilt"}, [], "rebuilt"),
        ({"eval_split": "validation_part"}, [], "part"),
        ({"train_fraction": 0.5}, [], "part"),
        ((), ["train is 100 of 2490 rows"], "part"),
        ((), ["train has 99 rows, the official split 2490"], "part"),
        ({"task": "toy-rte"}, [], "toy"),
    ],
)
def test_data_are_called_what_they_are(settings, notes, kind):
    df = load([record(NONE, 0, 0.6, settings=settings, data={"majority": 0.5, "notes": notes})])
    assert df.data[0] == kind and f" {kind} (" in provenance(df)


def test_provenance_names_everything():
    df = load(
        [record(NONE, s, 0.6) for s in (0, 1, 2, 5)]
        + [
            failed(MINUS, 0),
            record(NONE, 0, 0.6, settings={"model": "/models/minilm-l6-h384", "recipe": "istar-released"}),
        ]
    )
    text = provenance(df)
    for part in (
        "bert-base-cased (size unknown)",
        "minilm-l6-h384 (size unknown; a stand-in",
        "rte whole (2490 rows for training, 277 for evaluation)",
        "corrected (quick)",
        "as released (istar-released)",
        "Seeds 0, 1, 2, 5",
        "A CPU, 2 threads, fp32",
        "Commit 01234567.",
        "6 runs, 1 failed",
    ):
        assert part in text, part
    assert "/models" not in text


# ---- summaries


def test_failed_and_collapsed_runs_are_counted():
    df = load(
        [
            record(NONE, 0, 0.6),
            record(NONE, 1, 0.8),
            record(NONE, 2, 0.527, collapsed=True),
            failed(NONE, 3),
            failed(PLUS, 0),
        ]
    )
    s = summarise(df).set_index("method")
    one = s.loc["base"]
    assert (one.n, one.failed, one.collapsed) == (3, 1, 1) and one.seeds == [0, 1, 2, 3] and len(one["keys"]) == 4
    np.testing.assert_allclose(
        [one["mean"], one["sd"], one["median"], one["worst"]],
        [np.mean([0.6, 0.8, 0.527]), np.std([0.6, 0.8, 0.527], ddof=1), 0.6, 0.527],
    )
    assert (s.loc["I-STAR λ=1", "n"], s.loc["I-STAR λ=1", "failed"]) == (0, 1)
    text = to_markdown(summarise(df))
    assert (
        "3, and 1 failed" in text
        and "1 of 3" in text
        and "no finished run" in text
        and "1 of 5 runs" not in text
        and "5 runs, 2 failed" in text
    )


def test_every_setting_that_varies_makes_a_row():
    df = load([record(NONE, s, 0.6, settings={"lr": lr, "data_dir": f"d{s}"}) for s in (0, 1) for lr in (1e-5, 3e-5)])
    s = summarise(df)
    assert list(s.lr) == [1e-5, 3e-5] and list(s.n) == [2, 2] and list(s.columns[:3]) == ["task", "lr", "method"]
    assert list(summarise(df, by=[]).n) == [4]
    with pytest.raises(ValueError, match="by: no column 'lrr'; settings that vary are lr"):
        summarise(df, by=["lrr"])
    with pytest.raises(ValueError, match="by: collapsed is what a run gave"):
        summarise(df, by="collapsed")
    with pytest.raises(ValueError, match="by: metrics holds tables or lists; give columns of single values"):
        summarise(df, by="metrics")


def test_runs_of_two_models_of_one_name_are_no_seeds_of_one_method():
    runs = [record(NONE, s, 0.6, settings={"model": f"/{where}/bert"}) for where in "ab" for s in range(2)]
    with pytest.warns(UserWarning, match="by: 2 runs of base have seed 0; they differ in model: add that to by"):
        summarise(load(runs))
    assert list(summarise(load(runs), by=["model"]).n) == [2, 2]
    assert list(summarise(load([runs[0], runs[3]])).n) == [2]  # a folder that was moved


def test_protocols_are_never_mixed():
    df = load([record(NONE, s, 0.6, settings={"recipe": r}) for s in (0, 1) for r in ("istar-released", "istar-paper")])
    assert list(summarise(df).protocol) == ["as released", "corrected"]


def test_other_values():
    df = arms(none=[0.6, 0.7], plus=[0.5, 0.4])
    assert list(summarise(df, value="f1")["mean"]) == [0.5, 0.5] and summarise(df, value="isoscore_after")[
        "mean"
    ].round(3).tolist() == [0.105, 0.205]
    with pytest.raises(ValueError, match="value: 'bleu' is in no finished run; use one of accuracy, f1"):
        summarise(df, value="bleu")


# ---- comparisons


def test_compare_against_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.6, 0.02, 9), rng.normal(0.62, 0.02, 9)
    r = compare(arms(none=x, plus=y)).iloc[0]
    theirs = stats.ttest_rel(y, x)
    np.testing.assert_allclose([r.difference, r.low, r.high], [np.mean(y - x), *theirs.confidence_interval()])
    assert r.p == pytest.approx(
        stats.permutation_test(
            (y, x), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=np.inf
        ).pvalue
    )
    assert r.n == 9 and r.incomplete == [] and r.p_holm == r.p and r.differ == []


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(-0.5, 0.5)), min_size=2, max_size=7))
@settings(max_examples=25, deadline=None)
def test_what_a_seed_adds_to_both_arms_changes_nothing(rows):
    a, b, shared = np.round(np.array(rows).T, 3)
    one, two = compare(arms(none=a, plus=b)).iloc[0], compare(arms(none=a + shared, plus=b + shared)).iloc[0]
    np.testing.assert_allclose([one.difference, one.p], [two.difference, two.p], atol=1e-9)
    if not np.allclose(b - a, (b - a)[0]):
        np.testing.assert_allclose([one.low, one.high], [two.low, two.high], atol=1e-9)
    back = compare(arms(none=a, plus=b), baseline="I-STAR λ=1").iloc[0]
    np.testing.assert_allclose([back.difference, back.p], [-one.difference, one.p], atol=1e-9)
    swap = {"higher": "lower", "lower": "higher"}
    assert back.verdict == swap.get(one.verdict, one.verdict)


@pytest.mark.parametrize(
    "n, effect, verdict",
    [
        (5, 0.1, "too few seeds for this test: with 5 pairs p is at least 0.0625; it takes 6 pairs"),
        (6, 0.1, "higher"),
        (6, -0.1, "lower"),
        (1, 0.1, "too few seeds for this test: with 1 pair p is at least 1.000; it takes 6 pairs"),
        (8, 0.0, "equal in all 8 pairs"),
    ],
)
def test_verdicts(n, effect, verdict):
    base = np.random.default_rng(n).normal(0.6, 0.02, n)
    assert compare(arms(none=base, plus=base + effect)).verdict[0] == verdict


def test_the_mixed_signs_of_eight_seeds_are_no_difference():
    base = np.full(8, 0.6)
    assert (
        compare(arms(none=base, plus=base + 0.01 * np.array([1, -1, 1, -1, 1, 1, -1, 1]))).verdict[0]
        == "no difference shown"
    )
    odd = compare(arms(none=base, plus=base + 0.01 * np.array([0, 0, 0, 0, 1, 1, 1, 1]))).iloc[0]
    assert (
        odd.verdict.endswith("this test: with 8 pairs (4 of them unequal) p is at least 0.125; it takes 6 pairs")
        and odd.p == 0.125
    )


def test_rows_of_too_few_pairs_take_no_part():
    base = np.random.default_rng(0).normal(0.6, 0.02, 6)
    df = arms(none=base, minus=base - 0.1, plus=base + 0.1)
    few = df[~((df.method == "I-STAR λ=1") & (df.seed > 1))]
    whole, most = compare(few), compare(few, min_pairs=3)
    assert (
        list(whole.n) == [6, 2]
        and list(most.n) == [6]
        and most.p_holm[0] == 2 / 64 < whole.p_holm[0]
        and most.seeds_table[0] == 6
    )
    with pytest.raises(ValueError, match="min_pairs: no comparison has 7 complete pairs"):
        compare(few, min_pairs=7)


@pytest.fixture
def tables_alone(monkeypatch):
    "A report without its figures, which other tests draw."
    monkeypatch.setattr(report, "_figures", lambda df, tables: {})


def on_tasks(base=0.5, **differences):
    "Runs of a base and of I-STAR λ=1 whose differences these are, by task."
    return load(
        [
            r
            for task, d in differences.items()
            for s, x in enumerate(d)
            for r in (record(NONE, s, base, task=task), record(PLUS, s, base + x, task=task))
        ]
    )


numbers_of_seeds = st.lists(st.floats(-0.3, 0.3).map(lambda x: round(x, 3)), min_size=2, max_size=5).filter(
    lambda d: np.ptp(d) > 0
)


@given(numbers_of_seeds, numbers_of_seeds)
@settings(max_examples=25, deadline=None)
def test_two_tasks_together_are_welchs_interval_and_all_sign_patterns(one, two):
    row = over_tasks(compare(on_tasks(cola=one, rte=two))).iloc[0]
    welch = stats.ttest_ind(one, -np.array(two), equal_var=False).confidence_interval()
    np.testing.assert_allclose(
        [row.difference, row.low, row.high],
        [(np.mean(one) + np.mean(two)) / 2, welch.low / 2, welch.high / 2],
        atol=1e-9,
    )
    means = [
        np.mean(np.array(one) * f[: len(one)]) + np.mean(np.array(two) * f[len(one) :])
        for f in itertools.product((-1, 1), repeat=len(one) + len(two))
    ]
    assert np.isclose(row.p, np.mean(np.abs(means) >= abs(np.mean(one) + np.mean(two)) - 1e-9))
    assert row.n == len(one) + len(two) and row.task == "cola + rte" and row.tasks == 2
    np.testing.assert_allclose(
        [row["mean"], row.mean_baseline, np.mean(row.differences)],
        [0.5 + row.difference, 0.5, row.difference],
        atol=1e-9,
    )
    seeds = max(len(one), len(two))
    by_seed = sum(np.pad(np.array(d) / len(d), (0, seeds - len(d))) for d in (one, two))
    assert np.isclose(
        row.p_seeds,
        np.mean([abs(by_seed @ f) >= abs(by_seed.sum()) - 1e-9 for f in itertools.product((-1, 1), repeat=seeds)]),
    )
    back = over_tasks(compare(on_tasks(rte=two, cola=one))).iloc[0]
    np.testing.assert_allclose(
        [back.difference, back.low, back.high, back.p], [row.difference, row.low, row.high, row.p], atol=1e-9
    )


def test_one_task_together_is_that_task():
    table = compare(on_tasks(rte=[0.02, 0.01, 0.03, 0.015, 0.022, 0.008]))
    one, both = table.iloc[0], over_tasks(table).iloc[0]
    for c in (
        "task",
        "method",
        "baseline",
        "n",
        "mean",
        "mean_baseline",
        "p",
        "p_holm",
        "verdict",
        "collapsed",
        "failed",
    ):
        assert both[c] == one[c], c
    np.testing.assert_allclose(both.differences, one.differences)
    assert both.p_seeds == one.p
    np.testing.assert_allclose([both.difference, both.low, both.high], [one.difference, one.low, one.high])


def test_tasks_together_reach_what_each_alone_cannot():
    table = compare(on_tasks(cola=[0.02, 0.01, 0.03], rte=[0.05, 0.01, 0.02], mrpc=[0.01, -0.02, -0.01]))
    assert all(v.startswith("too few seeds for this test") for v in table.verdict)
    row = over_tasks(table).iloc[0]
    assert row.verdict == "no difference shown" and (row.tasks, row.agree) == (3, 2), (
        "nine pairs could tell; one task speaks against"
    )
    assert over_tasks(table[table.task != "mrpc"]).verdict[0] == "higher"
    assert "2 of 3" in to_markdown(over_tasks(table)) and "cola + mrpc + rte" in to_markdown(over_tasks(table))


def test_missing_and_failed_runs_of_a_task_are_named_over_tasks():
    gone = [
        *(record(NONE, s, 0.5, task="cola") for s in range(3)),
        *(record(PLUS, s, 0.6, task="cola") for s in range(2)),
        failed(PLUS, 2, task="cola"),
    ]
    table = compare(pd.concat([on_tasks(rte=[0.1, 0.11, 0.12]), load(gone)]))
    row = over_tasks(table).iloc[0]
    assert row.n == 5 and row.failed == 1 and row.incomplete == ["cola, seed 2: I-STAR λ=1 failed"]
    np.testing.assert_allclose(
        [row.least, row.most], [(0.11 + table[table.task == "cola"][c].item()) / 2 for c in ("least", "most")]
    )
    with pytest.raises(ValueError, match="table: not one of compare"):
        over_tasks(pd.DataFrame({"n": [1]}))
    with pytest.raises(ValueError, match="table: not one of compare"):
        over_tasks(over_tasks(table))
    with pytest.raises(ValueError, match="table: cola has two rows of I-STAR λ=1"):
        over_tasks(pd.concat([table, table]))
    with pytest.raises(ValueError, match="table: no comparison has a complete pair"):
        over_tasks(table[table.n > 9])


def test_a_task_of_failed_runs_only_is_not_forgotten_over_tasks():
    lost = [r for s in range(6) for r in (record(NONE, s, 0.6, task="cola"), failed(PLUS, s, task="cola"))]
    row = over_tasks(compare(pd.concat([on_tasks(rte=[0.011, 0.012, 0.013, 0.014, 0.015, 0.016]), load(lost)]))).iloc[0]
    assert (row.task, row.n, row.tasks, row.failed, len(row.incomplete)) == ("rte", 6, 1, 6, 6)
    assert row.least < 0 < row.difference and row.verdict == "higher in the complete pairs only"


@pytest.mark.parametrize("rte", [[0.1], [0.1, 0.1, 0.1]])
def test_no_interval_over_tasks_where_one_has_no_spread(rte):
    row = over_tasks(compare(on_tasks(cola=[0.02, 0.01, 0.03], rte=rte))).iloc[0]
    assert math.isnan(row.low) and math.isnan(row.high) and np.isclose(row.difference, 0.06)


def test_a_task_without_a_difference_agrees_with_none():
    assert over_tasks(compare(on_tasks(cola=[0.1, -0.1, 0.05, -0.05], rte=[0.1, 0.2]))).agree[0] == 1


def test_tasks_with_settings_of_training_of_their_own_are_put_together():
    df = pd.concat(
        [
            on_tasks(cola=[0.1, 0.2]),
            load(
                [
                    record(m, s, 0.5 + (m is PLUS) * 0.1, task="rte", settings={"epochs": 10})
                    for s in range(2)
                    for m in (NONE, PLUS)
                ]
            ),
        ]
    )
    assert list(over_tasks(compare(df)).tasks) == [2] and list(over_tasks(compare(df, by=["epochs"])).tasks) == [1, 1]


def test_one_method_against_several_over_tasks():
    base = {
        t: [
            record(m, s, v + 0.01 * s * (m is PLUS), task=t)
            for s in range(3)
            for m, v in ((NONE, 0.5), (PLUS, 0.6), (MINUS, 0.4))
        ]
        for t in ("cola", "rte")
    }
    found = over_tasks(compare(load(base["cola"] + base["rte"]), of="I-STAR λ=1")).set_index("baseline")
    assert list(found.n) == [6, 6] and np.allclose(found.difference[["base", "I-STAR λ=-1"]], [0.11, 0.21])


def test_holm_over_the_table_raises_the_seeds():
    base = np.random.default_rng(0).normal(0.6, 0.02, 6)
    c = compare(arms(none=base, minus=base + 0.1, plus=base - 0.1))
    assert list(c.p) == [2 / 64] * 2 and list(c.p_holm) == [4 / 64] * 2
    assert set(c.verdict) == {
        "too few seeds for this test: with 6 pairs p is at least 0.031 (0.0625 in this table); "
        "it takes 7 pairs in this table, 6 alone"
    }
    seven = np.random.default_rng(0).normal(0.6, 0.02, 7)
    assert list(compare(arms(none=seven, minus=seven + 0.1, plus=seven - 0.1)).verdict) == ["higher", "lower"]


def test_missing_partners_and_failed_runs_are_named():
    base = [record(NONE, s, 0.6 + 0.001 * s) for s in range(8)]
    df = load(
        [
            *base[:7],
            failed(NONE, 7),
            *(record(PLUS, s, 0.7) for s in (0, 1, 2, 3, 4, 5)),
            failed(PLUS, 6),
            record(PLUS, 7, 0.7),
            record(PLUS, 9, 0.7),
        ]
    )
    r = compare(df).iloc[0]
    assert (
        r.n == 6
        and r.incomplete == ["seed 9: no run of base", "seed 6: I-STAR λ=1 failed", "seed 7: base failed"]
        and r.failed == 2
    )
    whole = sum(0.7 - 0.6 - 0.001 * s for s in range(6))
    assert r.least == pytest.approx((whole + (0.527 - 0.606) + (0.7 - 0.7)) / 8) and r.most == pytest.approx(
        (whole + (0.7 - 0.606) + (0.7 - 0.527)) / 8
    )
    assert r.verdict == "higher" and [s for s, *_ in r.records] == [s for s, *_ in r.records_baseline] == list(
        range(6)
    )  # what is linked is what the mean is of
    text = to_markdown(compare(df))
    assert "seed 9: no run of base; seed 6: I-STAR λ=1 failed" in text and "if failed runs count" in text


def test_a_difference_that_failed_runs_could_undo_is_called_so():
    base = np.linspace(0.60, 0.62, 6)
    df = load(
        [record(NONE, s, v) for s, v in enumerate(base)]
        + [record(PLUS, s, v + 0.005) for s, v in enumerate(base)]
        + [record(NONE, 6, 0.61), failed(PLUS, 6)]
    )
    r = compare(df).iloc[0]
    assert r.verdict == "higher in the complete pairs only" and r.least < 0 < r.difference


def test_arms_of_other_data_or_another_machine_say_so():
    about = lambda data, cpu: {
        "data": {"majority": 0.527, "notes": [], "train_rows": 9, "evaluation_rows": 9, "fingerprint": data},
        "hardware": {"cpu": cpu, "threads": 1, "precision": "fp32"},
    }
    runs = lambda method, **a: [record(method, s, 0.6 + 0.01 * s, **about(**a)) for s in range(3)]
    base = runs(NONE, data="one", cpu="A")
    for data, cpu, differ in (
        ("one", "A", []),
        ("two", "A", ["data"]),
        ("one", "B", ["hardware"]),
        ("two", "B", ["hardware", "data"]),
    ):
        assert compare(load(base + runs(PLUS, data=data, cpu=cpu))).differ[0] == differ
    assert (
        compare(
            load(base + runs(PLUS, data="one", cpu="A") + [failed(PLUS, 3), record(NONE, 3, 0.6, **about("one", "A"))])
        ).differ[0]
        == []
    )
    on = lambda method, cpus: [record(method, s, 0.6 + 0.01 * s, **about("one", cpu)) for s, cpu in enumerate(cpus)]
    assert compare(load(on(NONE, "AB") + on(PLUS, "BA"))).differ[0] == [
        "hardware"
    ]  # the same machines, no pair on one of them
    assert compare(load(on(NONE, "AABB") + on(PLUS, "AA"))).differ[0] == []  # every pair on one machine


def test_the_majority_rate_bounds_the_metric_alone():
    runs = [record(m, s, 0.6 + 0.01 * s) for m in (NONE, PLUS) for s in range(3)] + [
        record(NONE, 3, 0.6),
        failed(PLUS, 3),
    ]
    seen = [0.1 + 0.01 * s for s in range(4)] + [0.2 + 0.01 * s for s in range(3)]
    r = compare(load(runs), value="isoscore_after").iloc[0]
    assert r.most == pytest.approx((0.3 + max(seen) - 0.13) / 4) and r.least == pytest.approx(
        (0.3 + min(seen) - 0.13) / 4
    )


def test_pairs_need_one_run_a_seed_and_the_same_setting():
    both = [
        record(m, s, 0.6 + 0.01 * s + lr, settings={"lr": lr})
        for m in (NONE, PLUS)
        for s in range(3)
        for lr in (1e-5, 3e-5)
    ]
    c = compare(load(both))
    assert list(c.lr) == [1e-5, 3e-5] and list(c.n) == [3, 3]
    with pytest.raises(ValueError, match="by: 2 runs of .* have seed 0; they differ in lr"):
        compare(load(both), by=[])
    uneven = load(
        [record(NONE, s, 0.6 + 0.01 * s, settings={"epochs": 3}) for s in range(3)]
        + [record(PLUS, s, 0.7, settings={"epochs": 5}) for s in range(3)]
    )
    assert compare(uneven, by=[]).differ[0] == ["epochs"]
    assert compare(uneven, by=["epochs"]).verdict[0] == "no pair to compare"
    assert "arms differ in" in to_markdown(compare(uneven, by=[]))
    with pytest.raises(ValueError, match="baseline: 'Base' is unknown; did you mean 'base'"):
        compare(uneven, "Base")


def test_two_models_of_one_name_are_told_apart_by_their_weights():
    def of(path, weights, seeds, method=NONE):
        return [
            record(method, s, 0.5 + 0.1 * (method is PLUS), settings={"model": path}, model={"fingerprint": weights})
            for s in seeds
        ]

    two = [r for m in (NONE, PLUS) for r in (*of("m/v1/bert", "aa", range(3), m), *of("m/v2/bert", "bb", range(3), m))]
    assert set(load(two).model_name) == {"v1/bert", "v2/bert"}
    assert list(compare(load(two)).n) == [3, 3] and "v1/bert" in compare(load(two)).attrs["caption"]
    moved = [*of("m/bert", "aa", range(3)), *of("elsewhere/bert", "aa", range(3, 6))]  # the same model, lying elsewhere
    assert set(load(moved).model_name) == {"bert"} and summarise(load(moved)).n[0] == 6
    unknown = [*of("m/v1/bert", "aa", range(3)), *of("m/v2/bert", None, range(3, 6))]
    assert set(load(unknown).model_name) == {"bert"}


def test_a_run_without_a_value_has_not_failed():
    runs = [record(m, s, 0.5 + 0.01 * s + 0.1 * (m is PLUS)) for m in (NONE, PLUS) for s in range(4)]
    del runs[2]["metrics"]["f1"]
    c = compare(load(runs), value="f1")
    assert (c.n[0], c.failed[0]) == (3, 0) and c.incomplete[0] == ["seed 2: no value of base"]
    assert math.isnan(c.least[0]) and "failed" not in readable(c).to_string().replace("if failed runs count", "")
    for r in runs:
        r["metrics"].pop("f1", None)
    runs.extend(record(m, s, 0.5, task="mrpc") for m in (NONE, PLUS) for s in range(4))
    assert "no value" in readable(summarise(load(runs), value="f1")).to_string()


def test_methods_are_compared_each_at_the_setting_chosen_for_it():
    "As select, sweep and report leave them: one learning rate for each method and task."
    chosen = {("rte", "none"): 1e-5, ("rte", "plus"): 3e-5, ("mrpc", "none"): 5e-5, ("mrpc", "plus"): 5e-5}
    runs = [
        record({"none": NONE, "plus": PLUS}[m], s, 0.6 + 0.01 * s + 0.1 * (m == "plus"), task=t, settings={"lr": lr})
        for (t, m), lr in chosen.items()
        for s in range(6)
    ]
    with pytest.warns(UserWarning, match="^lr: runs of a pair differ") as told:
        c = compare(load(runs))
    assert len(told) == 1 and list(c.n) == [6, 6] and list(c.task) == ["mrpc", "rte"]
    assert list(c.differ) == [[], ["lr"]] and over_tasks(c).tasks[0] == 2
    assert set(summarise(load(runs)).lr) == set(chosen.values())  # what was chosen stays in the summary
    assert sorted(compare(load(runs), by=["lr"]).n) == [0, 6]
    broken = load([*runs, failed(NONE, 7, settings={"lr": 3e-5})])  # a failed run parts no pairs
    with pytest.warns(UserWarning, match="^lr: runs of a pair differ"):
        assert list(compare(broken).n) == [6, 6]
    others = [record(NONE, s, 0.5, settings={"lr": 3e-5}) for s in range(6)]  # now there are equal ones
    c = compare(load(runs + others))
    assert list(c.n[(c.task == "rte") & (c.lr == 3e-5)]) == [6] and not any(c.differ)


def own_task(seed, rows, method=NONE, digest=None, **settings):
    "A run of a task of one's own, whose data have a fingerprint and, where they are files, a digest."
    own = {"name": "mine", "folder": "mine"} | ({"sha256": {"train": digest}} if digest else {})
    data = {"majority": 0.5, "notes": [], "fingerprint": rows}
    return record(method, seed, 0.6 + 0.01 * seed, "mine", {"definition": own} | settings, data=data)


def test_runs_of_changed_data_of_a_task_of_ones_own_are_told_apart():
    "Those of files by their digests; those of a folder by a warning, whose remedy does it."
    files = load([own_task(s, f"rows {s > 2}", digest=f"{s > 2}") for s in range(6)])
    found = summarise(files)
    assert list(found.n) == [3, 3] and found.definition_sha256.nunique() == 2
    folder = load([own_task(s, f"rows {s > 2}", m) for m in (NONE, PLUS) for s in range(6)])
    with pytest.warns(UserWarning, match="^mine: its runs read different rows, .* apart by fingerprint$"):
        assert list(summarise(folder).n) == [6, 6]
    assert list(summarise(folder, by=["fingerprint"]).n) == [3] * 4
    assert list(compare(folder, by=["fingerprint"]).n) == [3, 3]


def test_changed_rows_of_a_task_of_isoreg_are_warned_of():
    data = lambda s: {"majority": 0.5, "notes": [], "fingerprint": f"rows {s > 2}"}
    with pytest.warns(UserWarning, match="^rte: its runs read different rows"):
        summarise(load([record(NONE, s, 0.6, data=data(s)) for s in range(6)]))


def test_a_model_whose_weights_changed_under_its_name_is_warned_of():
    runs = [record(NONE, s, 0.6) | {"model": {"fingerprint": f"weights {s > 2}"}} for s in range(6)]
    with pytest.warns(UserWarning, match="^bert-base-cased: .* started from different weights, .* apart by weights$"):
        assert list(summarise(load(runs)).n) == [6]
    assert list(summarise(load(runs), by=["weights"]).n) == [3, 3]


def test_data_that_follow_the_seed_are_no_changed_data(recwarn):
    drawn = [own_task(s, f"rows {s}", max_train=100) for s in range(3)]
    assert list(summarise(load(drawn)).n) == [3] and not len(recwarn)


def test_two_runs_of_a_seed_on_changed_data_are_told_how_to_be_told_apart():
    runs = load([own_task(0, f"rows {k}", key=f"{k}") for k in range(2)])
    with pytest.raises(ValueError, match="seed 0; they differ in fingerprint: add that to by"):
        compare(load([own_task(0, f"rows {k}", m, key=f"{k}{m}") for k in range(2) for m in (NONE, PLUS)]))
    with pytest.raises(ValueError, match="by: definition holds tables .* such as definition_sha256"):
        summarise(runs, by=["definition"])


def test_runs_with_and_without_groups_by_length_are_not_pooled():
    runs = [
        record(m, s, 0.6 + 0.01 * s + 0.1 * (g > 1), settings={"length_groups": g})
        for m in (NONE, PLUS)
        for s in range(3)
        for g in (1, 4)
    ]
    assert list(summarise(load(runs)).n) == [3] * 4 and list(compare(load(runs)).n) == [3, 3]
    apart = [
        record(NONE, s, 0.6, task=t, settings={"length_groups": g})
        for s in range(3)
        for t, g in (("rte", 1), ("mrpc", 4))
    ]
    assert "length_groups" not in summarise(load(apart))  # one form a task: nothing to tell apart


def test_collapsed_runs_stand_beside_the_difference():
    df = load(
        [record(NONE, s, 0.6 + 0.01 * s) for s in range(4)]
        + [record(MINUS, s, 0.527, collapsed=True) for s in range(3)]
    )
    assert "3 of 3; baseline 0 of 3" in to_markdown(compare(df))


# ---- tables


def links(text):
    return re.findall(r"\]\(([^ )]+) \"([^\"]+)\"\)", text)


def outputs(name, start):
    "Markdown outputs of the cells of a notebook whose source contains `start`."
    cells = json.loads((NBS / name).read_text())["cells"]
    return [
        "".join(o["data"]["text/markdown"])
        for c in cells
        if start in "".join(c["source"])
        for o in c.get("outputs", [])
        if "text/markdown" in o.get("data", {})
    ]


def test_the_stored_tables_are_what_the_records_give(monkeypatch):
    monkeypatch.chdir(NBS)
    df = load("results/istar_first.jsonl")
    assert outputs("report/27_records.ipynb", "#| label: tbl-first\n") == [to_markdown(summarise(df))]
    assert outputs("report/27_records.ipynb", "#| label: tbl-first-differences\n") == [to_markdown(compare(df))]
    learnt = clears_majority(load("results/runs.jsonl").query("method == 'base' and train_fraction == 1"))
    assert outputs("report/27_records.ipynb", "#| label: tbl-learnt\n") == [
        learnt.to_markdown(index=False, floatfmt=".3f")
    ]


def test_the_page_of_the_first_round_shows_the_same_numbers():
    "Each row from the records themselves: pairs of runs with the same seed."
    (table,) = (o for o in outputs("tables/first.ipynb", "lines.to_markdown"))
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    head, rows = rows[0], [dict(zip(rows[0], row)) for row in rows[2:]]
    runs = {}
    for line in (NBS / "results" / "runs.jsonl").read_text().splitlines():
        r = json.loads(line)
        c = r["config"]
        if (
            c["recipe"] == "quick"
            and c["seed"] < 100
            and c["train_fraction"] == 1
            and c["model"].endswith("minilm-l6-h384")
        ):
            runs.setdefault((c["task"], label(c, scores=False)), {})[c["seed"]] = r
    names = {"CoLA": "cola", "MRPC": "mrpc", "STS-B": "stsb", "RTE": "rte"}

    def learnt(task):
        base = list(runs[task, "base"].values())
        x, x0, rows = (
            np.array([r["value"] for r in base]),
            base[0]["data"]["majority"],
            base[0]["data"]["evaluation_rows"],
        )
        spread = x.mean() * (1 - x.mean()) / rows if x0 else 1 / (rows - 1)
        return x.mean() - x0 > 2 * np.sqrt(spread + x.var(ddof=1) / len(x))

    judged = {
        t for (t, m), arm in runs.items() if m != "base" and len(set(arm) & set(runs[t, "base"])) >= 3 and learnt(t)
    }
    *columns, every, rest = head[1:]
    assert (
        rest.startswith("without CoLA")
        and len(rows) > 10
        and {names[h.split()[0]] for h in columns} == judged
        and every.startswith(f"all {len(columns)} tasks")
    )
    for row in rows:
        each = []
        for column in columns:
            task, seeds = re.fullmatch(r"(\S+) \(n = (\d+)(?: to \d+)?\)", column).groups()
            base = runs[names[task], "base"]
            if row["method"].startswith("base"):
                scores = [r["value"] for r in base.values()]
                low, high = stats.ttest_1samp(scores, 0).confidence_interval()
                assert row[column] == f"{np.mean(scores):.3f} [{low:.3f}, {high:.3f}]" and len(base) >= int(seeds)
            elif row[column]:
                arm = runs[names[task], row["method"]]
                both = sorted(set(arm) & set(base))
                a, b = (np.array([g[s]["value"] for s in both]) for g in (arm, base))
                low, high = stats.ttest_rel(a, b).confidence_interval()
                assert len(both) >= int(seeds) >= 3 and row[
                    column
                ] == f"{(a - b).mean():+.3f} [{low:+.3f}, {high:+.3f}]" + "†" * int(
                    np.mean([arm[s]["collapsed"] for s in both]) >= 0.5
                )
                each.append(a - b)
            else:
                assert len(runs.get((names[task], row["method"]), {})) < 3
        if not row["method"].startswith("base"):
            assert bool(row[every]) == (len(each) == len(columns) and not any("†" in row[c] for c in columns))
        for column, part in ((every, each), (rest, each[1:])):  # CoLA stands first
            if not part or not row[column]:
                continue
            error, freedom = zip(*((d.var(ddof=1) / len(d), len(d) - 1) for d in part))
            half = (
                stats.t.ppf(0.975, sum(error) ** 2 / sum(e**2 / f for e, f in zip(error, freedom)))
                * math.sqrt(sum(error))
                / len(part)
            )
            mean = np.mean([d.mean() for d in part])
            assert row[column].rstrip("†") == f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def test_each_cell_leads_to_its_records(monkeypatch):
    monkeypatch.chdir(NBS)
    df = load("results/istar_first.jsonl")
    means = ["against", "pairs", "mean", "baseline's mean"]
    found = links(to_markdown(summarise(df))) + links(to_markdown(compare(df), columns=means))
    assert len(found) == 6 + 8
    for href, title in found:
        path, first, last = re.fullmatch(r"(.+)#L(\d+)-L(\d+)", href).groups()
        keys = [json.loads(line)["key"] for line in Path(path).read_text().splitlines()[int(first) - 1 : int(last)]]
        assert len(keys) == 3 and title == f"{keys[0]} and 2 more"
    assert "(https://host/blob/main/nbs/results/istar_first.jsonl#L1-L3" in to_markdown(
        summarise(df), base="https://host/blob/main/nbs/"
    )


def linked(href):
    "The records of a link with ranges of lines."
    path, lines = href.split("#")
    spans = [
        [int(n) for n in re.fullmatch(r"L(\d+)(?:-L(\d+))?", span).groups(default="0")] for span in lines.split(",")
    ]
    stored = Path(path).read_text().splitlines()
    return [json.loads(line) for first, last in spans for line in stored[first - 1 : last or first]]


def test_a_difference_leads_to_the_runs_of_both_arms(monkeypatch):
    monkeypatch.chdir(NBS)
    df = load("results/runs.jsonl")
    df = df[df.dropout.isin(["standard", "guided"]) & df.regularizer.isin(["none"]) & df.task.isin(["mrpc", "stsb"])]
    each = compare(df)
    for table in (each, over_tasks(each)):
        found = links(to_markdown(table, columns=["task", "difference"]))
        assert len(found) == len(table)
        for (href, title), row in zip(found, table.itertuples()):
            runs = linked(href)
            assert (
                len(runs) == 2 * row.n
                and len({r["key"] for r in runs}) == len(runs)
                and title.endswith(f" and {len(runs) - 1} more")
            )
            assert {r["config"]["task"] for r in runs} == set(row.task.split(" + "))
            mean = {
                (t, d): np.mean([r["value"] for r in runs if (r["config"]["task"], r["config"]["dropout"]) == (t, d)])
                for t in row.task.split(" + ")
                for d in ("standard", "guided")
            }
            assert np.mean([mean[t, "guided"] - mean[t, "standard"] for t in row.task.split(" + ")]) == pytest.approx(
                row.difference
            )


def test_a_difference_of_runs_in_folders_has_no_link_and_its_means_have(tmp_path):
    for s in (0, 1):
        for name, how, value in (("none", NONE, 0.6), ("istar", PLUS, 0.7)):
            (tmp_path / f"{name}{s}").mkdir()
            (tmp_path / f"{name}{s}" / "record.json").write_text(json.dumps(record(how, s, value)))
    table = compare(load(tmp_path))
    assert (
        len(table) == 1
        and not links(to_markdown(table, columns=["difference"]))
        and len(links(to_markdown(table))) == 4
    )


def test_scattered_records_have_one_link_a_seed(tmp_path):
    for s in (0, 1):
        (tmp_path / f"a run {s}").mkdir()
        (tmp_path / f"a run {s}" / "record.json").write_text(json.dumps(record(NONE, s, 0.6)))
    text = to_markdown(summarise(load(tmp_path)))
    found = links(text)
    assert (
        len(found) == 2
        and all("a%20run%20" in href and href.endswith("/record.json") for href, _ in found)
        and "(seeds [0](" in text
        and ", [1](" in text
    )


def test_no_table_without_origin():
    table = pd.DataFrame({"a|b": ["1 | 2", "x_y & <z> 5 %"]})
    with pytest.raises(ValueError, match="caption: "):
        to_markdown(table)
    assert r"1 \| 2" in to_markdown(table, "from here") and "from here" in to_markdown(table, "from here")
    with pytest.raises(ValueError, match=r"columns: 'c' is unknown; use 'a\|b'"):
        to_markdown(table, "x", columns=["c"])


def test_the_forms_of_a_report_hold_the_same_cells(tmp_path):
    "HTML, LaTeX and Markdown have the cells of the readable table; nothing of the caption is markup in LaTeX."
    df = load(FIRST)
    write_report(df, tmp_path)
    for name, table in (("summary", summarise(df)), ("comparisons", compare(df))):
        shown, (page, tex) = (
            readable(table).map(str),
            ((tmp_path / f"{name}.{x}").read_text("utf-8") for x in ("html", "tex")),
        )
        cells = [html.unescape(text) for text in re.findall(r"<t[dh]>(.*?)</t[dh]>", page)]
        assert cells == [*shown, *shown.to_numpy().ravel()] and html.escape(provenance(df)) in page
        body = tex.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        assert len(body) == len(shown) and {len(re.findall(r"(?<!\\)&", line)) for line in body} == {shown.shape[1] - 1}
        assert not re.search(r"(?<!\\)[%_#$]", tex.split(r"\end{tabular}")[1])
        plain = [re.sub(r"\[((?:\\.|[^\]])*)\]\([^)]*\)", r"\1", line) for line in to_markdown(table).splitlines()]
        assert [c.strip() for c in plain[2].strip("|").split("|")] == [report._escape(c) for c in shown.iloc[0]]


def test_digits_stay_as_they_are_written():
    assert "0.60 ± 0.00" in to_markdown(summarise(arms(none=[0.6, 0.6])), digits=2) and "all equal" in to_markdown(
        summarise(arms(none=[0.6, 0.6]))
    )


# ---- published numbers


def test_each_published_number_has_its_source():
    raw = json.loads((NBS.parent / "isoreg" / "assets" / "published.json").read_text(encoding="utf-8"))
    known = {
        "paper",
        "table",
        "model",
        "task",
        "metric",
        "method",
        "statistic",
        "value",
        "sd",
        "n",
        "unit",
        "confidence",
        "source",
        "note",
    }
    for entry in raw:
        assert len(entry["source"]) > 20 and (
            re.search(r"20\d\d", entry["source"]) or "released with their code" in entry["source"]
        ), entry
        assert (
            entry["confidence"] in ("certain", "high", "medium")
            and set(entry) <= known
            and {"paper", "table", "method", "statistic", "value", "unit"} <= set(entry)
        )
        assert isinstance(entry["value"], (int, float, list)) and not (entry.get("sd") is not None and "n" not in entry)
    named = [
        tuple(str(e.get(k)) for k in ("paper", "table", "model", "task", "method", "statistic", "metric"))
        for e in raw
        if e["table"] != "Figure 4"
    ]
    assert len(set(named)) == len(named)
    assert not (NBS / "results" / "published_guided_dropout.json").exists()


def test_published_numbers_agree_with_each_other():
    rows = published(paper="guided dropout", table="Table A.5").set_index("statistic").value
    runs = np.array(rows["each of 30 restarts"])
    found = {
        "mean": runs.mean(),
        "median": np.median(runs),
        "standard deviation": runs.std(ddof=1),
        "smallest": runs.min(),
        "largest": runs.max(),
    }
    assert len(runs) == 30 and all(round(v, 4) == rows[k] for k, v in found.items())
    two = (
        published(paper="guided dropout", table="Table 2")
        .pivot(index=["task", "method"], columns="statistic", values="value")
        .astype(float)
    )
    assert len(two) == 30 and (two["largest"] >= two["mean"]).all()
    lodha = (
        published(paper="guided dropout", method="Guided dropout")
        .query("table.str.startswith('comparison') and statistic.str.startswith('100')")
        .set_index("task")
        .value
    )
    assert all(lodha[t] == two.loc[(t, "Guided dropout"), "largest"] for t in lodha.index)
    assert (
        len(published(paper="guided dropout", table="Table 1")) == 20
        and published(paper="I-STAR", task="squad", method="I-STAR").value[0] == 87.76
    )
    assert [len(v) for v in published(paper="IsoScore").query("metric == 'IsoScore'").value] == [12, 6, 12, 12]
    assert sorted(published(paper="I-STAR", table="Figure 4").value) == [0.004, 0.007, 0.007]
    with pytest.raises(ValueError, match="table: 'Table 9' is unknown; did you mean .*use 'Table 1'"):
        published(table="Table 9")


def test_three_columns_keep_protocols_apart():
    runs = [
        record(m, s, v + more + 0.01 * s, settings={"recipe": r})
        for m, v in ((NONE, 0.6), (MINUS, 0.7))
        for r, more in (("istar-released", 0), ("istar-paper", 0.1))
        for s in (0, 1)
    ]
    numbers = published(paper="I-STAR", table="Table 1", model="BERT", task="rte")
    t = three_columns(load(runs), numbers, {"Base": "base", "I-STAR": "I-STAR λ=-1"})
    around = lambda m: f"{m:.2f} ± 0.71 [{m - 6.35:.2f}, {m + 6.35:.2f}] (n=2)"  # t of one degree of freedom is 12.706
    assert [str(c) for c in t["as released"]] == [around(60.5), around(70.5)] and [str(c) for c in t["corrected"]] == [
        around(70.5),
        around(80.5),
    ]
    assert (
        list(t.published) == ["62.24 ± 0.48 (BERT, mean of 5)", "62.53 ± 0.70 (BERT, mean of 5)"]
        and numbers.source[0] in t.attrs["caption"]
    )
    assert [
        str(c)
        for c in three_columns(load(runs), published(paper="I-STAR", task="squad"), {"Base": "base"})["corrected"]
    ] == ["not run"]
    mixed = load([*runs, record(NONE, 0, 0.9, settings={"recipe": "istar-paper", "lr": 1e-5})])
    with pytest.raises(ValueError, match="df: the corrected runs of base on rte differ in lr"):
        three_columns(mixed, numbers, {"Base": "base"})
    several = numbers.assign(value=[[v] for v in numbers.value])
    with pytest.raises(ValueError, match="numbers: one value is a list"):
        three_columns(load(runs), several, {"Base": "base"})


def test_another_metric_than_the_published_one_is_said():
    df = load([record(NONE, 0, 0.6, metric="f1")])
    assert (
        str(
            three_columns(df, published(paper="I-STAR", table="Table 1", model="BERT", task="rte"), {"Base": "base"})[
                "corrected"
            ][0]
        )
        == "60.00 (n=1, f1)"
    )


# ---- tasks that can judge


def plain(values, task="rte", rows=277, metric="accuracy", majority=0.527):
    data = {"majority": majority, "notes": [], "train_rows": 2490} | ({"evaluation_rows": rows} if rows else {})
    return [record(NONE, s, v, task=task, metric=metric, data=data) for s, v in enumerate(values)]


@pytest.mark.parametrize(
    "metric, of",
    [
        ("pearson", lambda x, y: np.corrcoef(x, y)[0, 1]),
        ("spearman", lambda x, y: stats.spearmanr(x, y).statistic),
        ("matthews_correlation", lambda x, y: np.corrcoef(x > 0.5, y > 0)[0, 1]),
    ],
)
def test_the_error_of_a_correlation_is_that_of_answers_without_knowledge(metric, of):
    rng = np.random.default_rng(0)
    chance = [of(rng.normal(size=120), rng.normal(size=120)) for _ in range(4000)]
    row = clears_majority(load(plain([0.1], rows=120, metric=metric, majority=0.0))).iloc[0]
    assert row.error == pytest.approx(np.std(chance), rel=0.05) and not row.clears


def test_the_error_of_a_rate_is_binomial_with_the_spread_of_the_seeds():
    values = [0.60, 0.62, 0.61]
    row = clears_majority(load(plain(values))).iloc[0]
    assert row.error == pytest.approx(math.hypot(stats.binom(277, 0.61).std() / 277, stats.sem(values)))
    unknown = clears_majority(load(plain([0.61], rows=None))).iloc[0]
    assert math.isnan(unknown.error) and not unknown.clears


def test_a_base_near_the_majority_cannot_judge_however_many_seeds():
    assert (
        not clears_majority(load(plain([0.58] * 50))).clears[0]
        and clears_majority(load(plain([0.58] * 50, rows=2770))).clears[0]
    )
    assert clears_majority(load(plain([0.8, 0.79]) + plain([0.53], task="mrpc"))).set_index(
        "task"
    ).clears.to_dict() == {"mrpc": False, "rte": True}
    assert clears_majority(load(plain([0.53, 0.531], rows=None))).clears[0], "without the rows only the seeds speak"
    assert not clears_majority(load([failed(NONE, 0)])).clears[0]
    with pytest.raises(ValueError, match="baseline: 'best' is unknown"):
        clears_majority(load(plain([0.6])), "best")


def test_settings_are_judged_apart():
    few = [record(NONE, 0, 0.53, settings={"train_fraction": 0.1}), record(NONE, 0, 0.7)]
    assert clears_majority(load(few))[["train_fraction", "clears"]].values.tolist() == [[0.1, False], [1.0, True]]


def test_a_task_without_a_majority_has_nothing_to_clear():
    (run,) = plain([0.01])
    del run["data"]["majority"]
    assert clears_majority(load([run])).clears[0]


def test_what_can_judge_is_a_table_with_its_origin():
    text = to_markdown(
        clears_majority(
            load(
                plain([0.60, 0.62])
                + plain([0.3, 0.4], task="cola", rows=1043, metric="matthews_correlation", majority=0.0)
                + [failed(NONE, 0, task="mrpc")]
            )
        )
    )
    rows = {
        cells[0]: cells
        for line in text.splitlines()
        if line.startswith("|")
        for cells in [[c.strip() for c in line.strip("|").split("|")]]
    }
    assert rows["rte"][1:] == ["accuracy", "2", "0.610", "0.527", "0.062", "yes"] and rows["cola"][3:] == [
        "0.350",
        "0.000",
        "0.118",
        "yes",
    ]
    assert (
        rows["mrpc"][2:4] == ["0", "no finished run"] and rows["mrpc"][-1] == "no" and "Model bert-base-cased" in text
    )


@pytest.mark.parametrize("name, value", [("max_train", 100), ("eval_split", "test"), ("clip", 2.0)])
def test_none_and_a_value_are_two_settings(name, value, tmp_path, tables_alone):
    "None is a value: neither pooled with the other runs nor paired with them, in tables and in the report."
    of = lambda x, task, base, gain: [
        record(m, s, v + 0.01 * s, task=task, settings={name: x})
        for s in range(3)
        for m, v in ((NONE, base), (MINUS, base + gain))
    ]
    df = load(
        [run for x, base in ((None, 0.8), (value, 0.7)) for task in ("rte", "mrpc") for run in of(x, task, base, 0.05)]
    )
    table = summarise(df)
    assert len(table) == 8 and set(table.n) == {3} and sorted(set(table["mean"].round(6))) == [0.71, 0.76, 0.81, 0.86]
    assert compare(df).difference.tolist() == pytest.approx([0.05] * 4)
    able = clears_majority(df)
    assert dict(zip(able["mean"].round(6), able.clears)) == {0.81: True, 0.71: True} and able.rows.tolist() == [277] * 4
    made = pd.read_csv(next(p for p in write_report(df, tmp_path) if p.name == "over_tasks.csv"))
    assert made.n.tolist() == [6, 6] and made.difference.tolist() == pytest.approx([0.05] * 2)
    low = load(
        [run for x, base in ((None, 0.53), (value, 0.7)) for task in ("rte", "mrpc") for run in of(x, task, base, 0.05)]
    )
    made = pd.read_csv(next(p for p in write_report(low, tmp_path) if p.name == "over_tasks.csv"))
    assert made["mean"].tolist() == pytest.approx([0.76])  # the tasks with None cannot judge


def test_none_and_a_value_have_panels_of_their_own():
    df = load([record(m, s, 0.8, settings={"clip": x}) for x in (None, 2.0) for m in (NONE, MINUS) for s in range(2)])
    assert len(plot_tradeoff(df).axes) == len(plot_layers(df).axes) == 2


# ---- rank correlation and figures


def strengths(seeds, score, task="rte", rng=None):
    "Runs of seven strengths: score(isotropy, seed)."
    out = []
    for lam in (-5, -3, -1, 0, 1, 3, 5):
        for s in range(seeds):
            iso = 0.3 + 0.05 * lam + 0.001 * s
            out.append(
                record(
                    NONE if lam == 0 else {"regularizer": "istar", "lam": float(lam)},
                    s,
                    score(iso, s),
                    task=task,
                    isoscore={"before": {"union": 0.2}, "after": {"union": iso, "layers": [0.1, iso]}},
                )
            )
    return out


@pytest.mark.parametrize("kind, theirs", [("spearman", stats.spearmanr), ("kendall", stats.kendalltau)])
def test_rank_correlation_is_that_of_scipy(kind, theirs):
    rng = np.random.default_rng(0)
    df = load(strengths(4, lambda iso, s: round(rng.normal(), 1)))
    c = rank_correlation(df, kind=kind, resamples=99)
    each = [theirs(g.isoscore_after, g.value).statistic for _, g in df.groupby("seed")]
    np.testing.assert_allclose(c["each"], each)
    np.testing.assert_allclose([c["mean"], c["low"], c["high"]], [np.mean(each), *np.clip(t_interval(each), -1, 1)])


def test_rank_correlation_finds_order_and_no_order():
    c = rank_correlation(load(strengths(5, lambda iso, s: 0.9 - iso)))
    assert (
        c["mean"] == pytest.approx(-1)
        and c["p"] == 1 / 10_000
        and math.isnan(c["low"])
        and (c["seeds"], c["settings"]) == (5, 7)
    )
    rng, small = np.random.default_rng(1), 0
    for _ in range(100):
        small += rank_correlation(load(strengths(3, lambda iso, s: rng.normal())), resamples=199)["p"] <= 0.1
    assert small < 10 + 3 * 3
    with pytest.raises(ValueError, match="pairs: no seed has three settings"):
        rank_correlation(arms(none=[0.6], plus=[0.7]))


def test_rank_correlation_compares_the_same_settings_in_all_seeds():
    runs = strengths(5, lambda iso, s: 0.9 - iso if s < 3 else iso)
    few = [
        r for r in runs if r["config"]["seed"] < 3 or abs(r["config"].get("lam") or 0) < 5
    ]  # two seeds lack two of the seven strengths
    c = rank_correlation(load(few), resamples=99)
    assert (c["seeds"], c["settings"], c["left_out"]) == (3, 7, 2) and c["mean"] == pytest.approx(-1)
    assert rank_correlation(load(runs), resamples=99)["left_out"] == 0


def test_tradeoff_shows_every_run():
    runs = strengths(3, lambda iso, s: 0.8 - 0.3 * iso + 0.01 * s) + strengths(3, lambda iso, s: 0.8, task="mrpc")
    runs[0] |= {"collapsed": True}
    runs[-1] = {"key": runs[-1]["key"], "config": runs[-1]["config"], "error": "killed"}
    fig = plot_tradeoff(load(runs))
    rte, mrpc = fig.axes
    points = lambda ax, fill: sum(
        len(line.get_xdata()) for line in ax.lines if line.get_markersize() == 4 and line.get_markerfacecolor() == fill
    )
    assert points(rte, "none") == 21 and points(mrpc, "none") == 20
    assert sum(len(line.get_xdata()) for line in rte.lines if line.get_marker() == "x") == 1 and any(
        "1 failed" == t.get_text() for t in mrpc.texts
    )
    assert (
        "ρ = -1.00" in rte.get_title()
        and "no rank correlation" in mrpc.get_title()
        and rte.get_xlabel() == "IsoScore after training"
        and rte.get_ylabel() == "accuracy"
    )


def test_fraction_has_the_median_within_quartiles():
    df = load(
        [
            record(m, s, v, settings={"train_fraction": f})
            for m in (NONE, PLUS)
            for f in (0.1, 0.5, 1.0)
            for s, v in enumerate((0.0, 0.6, 0.9, 0.7, 0.8))
        ]
    )
    fig = plot_fraction(df)
    (ax,) = fig.axes
    assert len(ax.collections) == 2
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.6) and band[:, 1].max() == pytest.approx(0.8)
    line = [line for line in ax.lines if line.get_linestyle() == "-"][0]
    assert list(line.get_xdata()) == [10, 50, 100] and np.allclose(
        line.get_ydata(), 0.7
    )  # the mean, 0.6, is the lower quartile


@pytest.mark.parametrize(
    "rates, title", [((1e-5, 1e-5), "rte"), ((1e-5, 3e-5), "rte\nlr by method")], ids=["one rate", "each its own"]
)
def test_a_panel_says_what_was_chosen_by_method(rates, title):
    chosen = [(NONE, {"lr": rates[0]}), (PLUS, {"lr": rates[1]})]
    fig = plot_tradeoff(load([record(m, s, v, settings=lr) for m, lr in chosen for s, v in enumerate((0.6, 0.7))]))
    assert fig.axes[0].get_title() == title


def test_layers_and_activations_need_their_fields():
    df = load(
        [
            record(
                m,
                s,
                0.6,
                geometry={
                    "after": {
                        "intrinsic_dimension": {"cls": [None, 5.0 + s, 4.0], "mean": [7.0, 6.0, 5.0]},
                        "mean_activation": [0.1 * s, 0.2, 0.3],
                    }
                },
            )
            for m in (NONE, PLUS)
            for s in (0, 1)
        ]
    )
    for fig, top in (
        (plot_layers(df), [0.3, 0.3, 0.2]),
        (plot_layers(df, "intrinsic_dimension"), [np.nan, 5.5, 4.0]),
        (plot_layers(df, "intrinsic_dimension", "mean"), [7, 6, 5]),
    ):
        np.testing.assert_allclose(
            [line.get_ydata() for line in fig.axes[0].lines if line.get_linestyle() != ":"][0], top
        )
    fig = plot_mean_activation(df)
    assert len(fig.axes) == 2
    np.testing.assert_allclose(fig.axes[0].lines[0].get_ydata(), [0.05, 0.2, 0.3])
    bare = arms(none=[0.6])
    with pytest.raises(ValueError, match="df: no finished run has intrinsic_dimension"):
        plot_layers(bare, "intrinsic_dimension")
    with pytest.raises(ValueError, match="df: no finished run has mean_activation"):
        plot_mean_activation(bare)
    with pytest.raises(ValueError, match="what: 'norm' is unknown"):
        plot_layers(bare, "norm")


def test_forest_fills_only_differences():
    base = np.random.default_rng(0).normal(0.6, 0.02, 8)
    fig = plot_forest(compare(arms(none=base, plus=base - 0.1, minus=base + 0.001 * np.array([1, -1] * 4))))
    marks = {line.get_markerfacecolor() for line in fig.axes[0].lines if line.get_marker() in ("o", "s")}
    assert marks == {"#D55E00", "white"} and any("lower" in t.get_text() for t in fig.axes[0].texts)


def test_forest_cuts_an_interval_that_would_hide_the_others():
    base = np.full(4, 0.6)
    wide, even = (
        {"none": base, "plus": base + d, "minus": base + 0.01 * np.array([1, 2, 1, 2])}
        for d in (np.array([0.3, -0.3, 0.1, -0.2]), 0.01 * np.array([2, 3, 2, 3]))
    )
    for runs, arrows in ((wide, {"<", ">"}), (even, set())):
        table = compare(arms(**runs))
        fig = plot_forest(pd.concat([table] + 2 * [table[table.method == "I-STAR λ=-1"]]))
        assert {line.get_marker() for line in fig.axes[0].lines} & {"<", ">"} == arrows
        assert (np.ptp(fig.axes[0].get_xlim()) < 0.3) and all(
            line.get_xdata()[0] >= fig.axes[0].get_xlim()[0]
            for line in fig.axes[0].lines
            if line.get_marker() in ("o", "s")
        )


def test_forest_puts_rows_below_their_heads():
    table = compare(arms(none=[0.6, 0.61], plus=[0.7, 0.72], minus=[0.5, 0.52]))
    fig = plot_forest(pd.concat([table, table.iloc[:1]]), heads=["one", "one", "two"])
    ticks, heads = fig.axes[0].get_yticks(), {t.get_text(): t.get_position()[1] for t in fig.axes[0].texts}
    assert list(ticks) == [-1, -2, -4] and (heads["one"], heads["two"]) == (0, -3)
    with pytest.raises(ValueError, match="heads: 1 for 2 rows"):
        plot_forest(table, heads=["one"])


def test_a_strength_has_its_colour_whatever_else_is_drawn():
    few, many = (
        plot_tradeoff(load([r for r in strengths(2, lambda iso, s: 0.8) if abs(r["config"].get("lam") or 0) <= top]))
        for top in (1, 5)
    )
    colour = lambda fig: {c.get_label(): c.lines[0].get_color() for c in fig.axes[0].containers}
    one, all_ = colour(few), colour(many)
    assert set(one) < set(all_) and all(one[k] == all_[k] for k in one) and len(set(all_.values())) == len(all_) == 7


def test_a_report_in_one_call(tmp_path):
    runs = tmp_path / "runs"
    for s in range(2):
        for m in (NONE, PLUS):
            folder = runs / f"{label(m)[:4]}{s}"
            folder.mkdir(parents=True)
            (folder / "record.json").write_text(json.dumps(record(m, s, 0.6 + 0.01 * s + (m is PLUS) * 0.1)))
    (runs / "bad").mkdir()
    (runs / "bad" / "failed.json").write_text(json.dumps(failed(MINUS, 0)))
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="folder: .*taken' is a file"):
        write_report(runs, tmp_path / "taken")
    made = write_report(runs, tmp_path / "report")
    names = {p.name for p in made}
    assert {f"{n}.{s}" for n in ("summary", "comparisons", "failures") for s in ("md", "html", "tex", "csv")} | {
        f"{n}.{s}" for n in ("tradeoff", "layers", "forest") for s in ("png", "pdf")
    } == names
    assert all(p.stat().st_size > 100 for p in made)
    text = (tmp_path / "report" / "summary.md").read_text()
    assert len(links(text)) == 5 and all((tmp_path / "report" / href).resolve().is_file() for href, _ in links(text))
    assert "out of memory" in (tmp_path / "report" / "failures.md").read_text()
    assert pd.read_csv(tmp_path / "report" / "summary.csv")["mean"].round(3).tolist()[1:] == [0.605, 0.705]


def test_a_report_of_several_tasks_puts_them_together(tmp_path, tables_alone):
    made = {p.name for p in write_report(on_tasks(0.7, cola=[0.02, 0.01], rte=[0.03, 0.01]), tmp_path)}
    assert {f"over_tasks.{s}" for s in ("md", "html", "tex", "csv")} <= made
    assert ast.literal_eval(pd.read_csv(tmp_path / "over_tasks.csv").differences[0]) == pytest.approx(
        [0.02, 0.01, 0.03, 0.01]
    )
    assert (
        "over_tasks.md" not in {p.name for p in write_report(on_tasks(0.7, rte=[0.03, 0.01]), tmp_path)}
        and not (tmp_path / "over_tasks.md").exists()
    )


def test_a_task_that_cannot_judge_is_named_and_left_out_of_the_whole(tmp_path, tables_alone):
    able, idle = on_tasks(0.7, cola=[0.02, 0.01], rte=[0.03, 0.01]), on_tasks(0.53, mrpc=[0.02, 0.03])
    write_report(pd.concat([able, idle]), tmp_path)
    text = (tmp_path / "over_tasks.md").read_text(encoding="utf-8")
    assert (
        "cola + rte |" in text
        and "Left out, since base does not clear the majority rate there: mrpc (0.530 beside 0.527; " in text
        and "two standard errors are 0.060)" in text
    )
    assert "mrpc" in (tmp_path / "comparisons.md").read_text(encoding="utf-8") and "Left out" not in (
        tmp_path / "comparisons.md"
    ).read_text(encoding="utf-8")
    write_report(pd.concat([on_tasks(0.7, cola=[0.02, 0.01]), idle]), tmp_path)
    assert not (tmp_path / "over_tasks.md").exists()


def test_when_every_run_failed_the_table_still_comes(tmp_path):
    df = load([failed(NONE, 0), failed(NONE, 1), failed(PLUS, 0)])
    s = summarise(df)
    assert list(s.n) == [0, 0] and list(s.failed) == [2, 1] and "no finished run" in to_markdown(s)
    c = compare(df).iloc[0]
    assert c.verdict == "no pair to compare" and c.incomplete == [
        "seed 1: no run of I-STAR λ=1",
        "seed 0: I-STAR λ=1 and base failed",
    ]
    assert {p.name for p in write_report(df, tmp_path)} >= {"summary.md", "failures.md"}


def test_rounding_is_no_spread():
    assert all(math.isnan(x) for x in t_interval([0.7 - 0.6, 0.1, 0.4 - 0.3]))
    assert compare(arms(none=[0.6, 0.3, 0.1], plus=[0.1 * 6, 0.1 * 3, 0.1])).verdict[0] == "equal in all 3 pairs"


def test_a_task_without_the_compared_method_has_no_pair():
    runs = [record(m, s, 0.6 + 0.01 * s) for m in (NONE, PLUS) for s in range(2)] + [record(NONE, 0, 0.5, task="cola")]
    table = compare(load(runs), of="I-STAR λ=1").set_index("task")
    assert list(table.n) == [0, 2] and table.metric["cola"] == "accuracy"
    assert table.incomplete["cola"] == ["seed 0: no run of I-STAR λ=1"]
    assert list(compare(load(runs), of="I-STAR λ=1", min_pairs=1).task) == ["rte"]


def test_the_share_of_a_gain_is_fieller_of_the_pairs():
    gains = {PLUS["lam"]: [0.02, 0.01, 0.03], MINUS["lam"]: [0.05, 0.04, 0.06]}
    runs = [record(m, s, 0.5 + (gains[m["lam"]][s] if m["lam"] else 0)) for m in (NONE, PLUS, MINUS) for s in range(3)]
    runs += [record(m, 0, 0.5, task="cola") for m in (NONE, PLUS)]
    *found, n = gain_share(compare(load(runs)), "I-STAR λ=1", "I-STAR λ=-1")
    assert n == 3 and found == pytest.approx(ratio_interval([np.c_[gains[1.0], gains[-1.0]]]))
    assert gain_share(compare(load(runs)), "I-STAR λ=1", "guided dropout")[3] == 0


def test_a_training_counts_once_in_the_share_of_a_gain():
    "The two tasks that one training of MNLI is evaluated on are no two trainings."
    gains = {PLUS["lam"]: [0.02, 0.01, 0.03], MINUS["lam"]: [0.05, 0.04, 0.06]}
    value = lambda m, s: 0.5 + (gains[m["lam"]][s] if m["lam"] else 0)
    others = lambda v: {"mnli-mm": {"metric": "accuracy", "value": v, "metrics": {"accuracy": v}}}
    runs = [(m, s, value(m, s)) for m in (NONE, PLUS, MINUS) for s in range(3)]
    alone = [record(*run, task="mnli") for run in runs]
    both = [record(*run, task="mnli", others=others(run[2])) for run in runs]
    assert load(both).task.nunique() == 2
    found = [gain_share(compare(load(r)), "I-STAR λ=1", "I-STAR λ=-1") for r in (alone, both)]
    assert found[1] == pytest.approx(found[0]) and found[0][3] == 3


def test_scores_of_squad_are_in_the_unit_of_the_others():
    "So that a mean over tasks is of like numbers; what an earlier version wrote in per cent is left out."
    squad = lambda v, **own: record(NONE, 0, v, task="squad", metric="f1", settings=own)
    with pytest.raises(ValueError, match="its score is in per cent"):
        load(squad(87.0, definition={"name": "mine", "kind": "qa"}))
    with pytest.warns(UserWarning, match="its score is in per cent"):
        assert list(load([squad(0.87), squad(87.0) | {"key": "earlier"}]).value) == [0.87]


def test_models_are_told_apart_where_the_last_part_of_a_path_says_nothing():
    at = lambda path, seeds: [record(NONE, s, 0.6, settings={"model": path}) for s in seeds]
    df = load([*at("runs/a/model", [0, 1]), *at("runs/b/model", [2, 3]), *at("m/bert", [4]), *at("n/bert", [5])])
    assert dict(summarise(df).set_index("model_name").n) == {"a/model": 2, "b/model": 2, "bert": 2}
    names = {"a/best/model": "a/best/model", "run/checkpoint-5": "run/checkpoint-5", "/model": "/model", "gpt2": "gpt2"}
    assert {path: model_label(path) for path in names} == names


def test_what_a_pair_does_not_share_is_named():
    more = {"model": {"fingerprint": "a"}, "versions": {"torch": "2.0", "transformers": "5.0"}}
    other = {"model": {"fingerprint": "b"}, "versions": {"torch": "2.1", "transformers": "5.0"}, "metric": "f1"}
    runs = lambda m, more: [record(m, s, 0.6 + 0.01 * s, **more) for s in range(2)]
    assert compare(load(runs(NONE, more) + runs(PLUS, more))).differ[0] == []
    assert compare(load(runs(NONE, more) + runs(PLUS, other))).differ[0] == ["metric", "weights", "libraries"]


@pytest.mark.parametrize("missing", ["seed", "regularizer", "model"])
def test_a_run_that_lacks_what_every_run_has_is_left_out(missing):
    whole, part = record(NONE, 0, 0.6), record(NONE, 1, 0.7)
    del part["config"][missing]
    with pytest.warns(UserWarning, match=f"no record: it has no {missing}"):
        assert list(load([whole, part]).value) == [0.6]


def test_other_scores_do_not_rename_the_usual_ones():
    guided = lambda scores, seed: record({"regularizer": "none", "dropout": "guided", "scores": scores}, seed, 0.6)
    usual = [guided("results/minilm_scores.json", s) for s in range(3)]
    found = load([*usual, guided("out/run-a/full", 0), guided(None, 0)])
    assert list(found.method[:3]) == ["guided dropout"] * 3
    assert list(found.method[3:]) == ["guided dropout scores run-a", "guided dropout with scores of its own"]


def test_guided_dropout_with_scores_of_each_task_is_one_method():
    "A file for each task parts no tasks: within a task nothing but the seed differs."
    runs = [record(NONE, s, 0.6, task) for task in ("rte", "sst2") for s in range(3)]
    guided = {"regularizer": "none", "dropout": "guided"}
    runs += [record(guided | {"scores": f"{t}.json"}, s, 0.7, t) for t in ("rte", "sst2") for s in range(3)]
    df = load(runs)
    assert set(df.method) == {"base", "guided dropout"}
    assert list(over_tasks(compare(df)).tasks) == [2]
    other = load([*runs, record(guided | {"scores": "other.json"}, 0, 0.7, "sst2")]).method
    assert set(other[6:]) == {f"guided dropout scores {name}" for name in ("rte", "sst2", "other")}


def test_one_method_against_each_other_mirrors_the_baseline():
    "compare(of=A) holds the differences of compare(baseline=A) with their signs turned."
    runs = load(FIRST)
    turned, plain = compare(runs, of="base"), compare(runs, baseline="base")
    assert set(turned.method) == {"base"} == set(plain.baseline) and list(turned.baseline) == list(plain.method)
    assert (
        np.allclose(turned.difference, -plain.difference)
        and np.allclose(turned.low, -plain.high, equal_nan=True)
        and np.allclose(turned.p, plain.p)
    )
    with pytest.raises(ValueError, match="of: 'guided' is unknown"):
        compare(runs, of="guided")


# ---- records that are odd but allowed, and those that are none


def undefined(method, seed, value, **isoscore):
    "A run of which some layer, or the union, had no score, as a collapsed run leaves it."
    after = {"union": 0.1 + 0.01 * seed, "layers": [0.3, 0.2], "embeddings": 0.3} | isoscore
    return record(
        method,
        seed,
        value,
        isoscore={"before": {"union": 0.2, "layers": [0.2, 0.1], "embeddings": 0.3}, "after": after},
        geometry={
            "after": {
                "intrinsic_dimension": {"cls": [None, 5.0, None], "mean": [7.0, None, 5.0]},
                "mean_activation": [0.1, None, 0.3],
            }
        },
    )


@pytest.mark.parametrize(
    "isoscore",
    [
        {"union": None},
        {"layers": [None, 0.2]},
        {"layers": [None, None]},
        {"embeddings": None},
        {"layers": None},
        {"union": None, "layers": [None, None], "embeddings": None},
    ],
)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.filterwarnings("error")
def test_null_scores_are_undefined_in_tables_and_figures(tmp_path, isoscore, every):
    df = load(
        [
            undefined(m, s, 0.5 + 0.01 * s + 0.1 * i, **(isoscore if every or (i, s) == (1, 0) else {}))
            for i, m in enumerate((NONE, MINUS, PLUS))
            for s in range(3)
        ]
    )
    s = summarise(df).set_index("method").loc["I-STAR λ=-1"]
    whole = isoscore.get("layers", [0.3, 0.2]) == [0.3, 0.2]
    assert s.layers_after_n == (3 if whole else 0 if every else 2) and s.isoscore_after_n == (
        3 if "union" not in isoscore else 0 if every else 2
    )
    assert math.isnan(s.layers_after) if not s.layers_after_n else s.layers_after == pytest.approx(0.25)
    text = to_markdown(summarise(df))
    assert ("(2 of 3)" in text) == (not every and (not whole or "union" in isoscore))
    assert list(compare(df).n) == [3, 3]
    if s.isoscore_after_n:
        assert compare(df, value="isoscore_after").n.tolist()[0] == s.isoscore_after_n
    for draw in (
        plot_layers,
        lambda d: plot_layers(d, "intrinsic_dimension"),
        plot_mean_activation,
        plot_fraction,
        lambda d: plot_forest(compare(d)),
        plot_tradeoff,
    ):
        try:
            fig = draw(df)
        except figures.NotRecorded:
            assert every and ("union" in isoscore or "layers" in isoscore)
        else:
            fig.savefig(tmp_path / "figure.png", dpi=30)


def test_undefined_layers_leave_the_others_as_they_are():
    fig = plot_layers(load([undefined(NONE, 0, 0.5, layers=[None, 0.4]), undefined(NONE, 1, 0.5)]))
    (line,) = [line for line in fig.axes[0].lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(line.get_ydata(), [0.3, 0.3, 0.3])
    fig = plot_tradeoff(load([undefined(NONE, 0, 0.5, union=None), undefined(NONE, 1, 0.5)]))
    assert [t.get_text() for t in fig.axes[0].texts if "without" in t.get_text()] == ["1 without isotropy"]


@pytest.mark.parametrize(
    "config",
    [
        {"task": None},
        {"model": None},
        {"seed": "x"},
        {"seed": None},
        {"seed": 1.5},
        {"lam": "x"},
        {"regularizer": None},
        {"train_fraction": None},
        {"layers": [1]},
    ],
)
def test_a_foreign_record_is_no_record(config):
    with pytest.warns(
        UserWarning, match=rf"left out 1 that is no record of runs: a record \(no record: {next(iter(config))} "
    ):
        df = load([record(NONE, 0, 0.6), record(NONE, 1, 0.6, settings=config)])
    assert list(df.seed) == [0]
    with pytest.raises(ValueError, match="source: no record of a run; left out 1"):
        load([record(NONE, 1, 0.6, settings=config)])


def test_odd_values_beside_the_settings_do_no_harm(tmp_path):
    odd = {
        "metric": 5,
        "data": {"majority": "x", "notes": "no list"},
        "isoscore": {"before": 3, "after": {"union": "x", "layers": "abc", "embeddings": []}},
        "geometry": {"after": [1]},
        "model": 7,
        "started": 3,
        "hardware": "x",
        "metrics": [1],
        "attempts": "two",
    }
    df = load([record(NONE, 0, 0.6) | odd, record(NONE, 0, 0.6), record(NONE, 1, 0.7) | odd])
    assert list(df.n if "n" in df else summarise(df).n) == [2]
    assert {p.name for p in write_report(df, tmp_path)} >= {"summary.md"}


def test_what_is_left_out_is_one_short_line(tmp_path):
    lines = [json.dumps({"kind": "geometry", "config": {"model": "m"}}) for _ in range(40)] + [
        json.dumps(record(NONE, 0, 0.6)),
        "{",
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    with pytest.warns(UserWarning) as caught:
        load(tmp_path / "all.jsonl")
    text = str(caught[0].message)
    assert (
        len(caught) == 1
        and "left out 41 that are no records of runs: " in text
        and text.endswith(" and 38 more")
        and text.count("all.jsonl") == 3
    )
    assert "line 1 (no run, but geometry)" in text and "line 42 (no complete JSON)" in text and "\n" not in text


def test_what_a_sweep_keeps_for_itself_is_no_run(tmp_path):
    for name, seed in (("a", 0), (".sweep/part/b", 1)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "record.json").write_text(json.dumps(record(NONE, seed, 0.6)))
    assert list(load(tmp_path).seed) == [0] and list(load(tmp_path / ".sweep").seed) == [1]


def test_attempts_are_shown_where_the_file_says_them():
    lost = failed(NONE, 0)
    silent = {k: v for k, v in failed(NONE, 1).items() if k != "attempts"}
    assert list(failures(load([lost, silent])).attempts) == ["2", ""] and list(failures(load([silent])).attempts) == [
        ""
    ]


def test_an_arm_without_a_finished_run_has_its_metric_and_no_interval():
    df = load([failed(MINUS, 0), record(NONE, 0, 0.6), record(NONE, 1, 0.7)])
    s = summarise(df).set_index("method").loc["I-STAR λ=-1"]
    row = next(line for line in to_markdown(summarise(df)).splitlines() if "I-STAR" in line)
    assert (
        s.metric == "accuracy" == compare(df).metric[0]
        and "| no run " in row
        and "no pair" not in row
        and "value" not in row
    )
    assert list(summarise(load([failed(MINUS, 0)])).metric) == ["unknown"]


def test_markdown_marks_in_cells_are_escaped_and_links_hold():
    text = "a *b* _c_ `d` <e> [f](g) h_i 2 < 3 | j\nk \\"
    df = load([record(NONE, 0, 0.6), failed(MINUS, 1, error=text.replace("\n", " "))])
    shown = to_markdown(failures(df))
    assert r"a \*b\* \_c\_ \`d\` \<e> \[f\](g) h_i 2 < 3 \| j k \\" in shown
    assert r"j k \\" in to_markdown(pd.DataFrame({"x": [text]}), "here")
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}
    cell = report._Cell("a_b [c]", ((0, "runs/a [b]/record.json", 0, 'a "b" | c'),))
    assert report._linked(cell, "") == r'[a_b \[c\]](runs/a%20%5Bb%5D/record.json "a \"b\" \| c")'


def test_a_second_report_leaves_nothing_of_the_first(tmp_path):
    (tmp_path / "mine.txt").write_text("stays")
    write_report(load([record(NONE, 0, 0.6), record(PLUS, 0, 0.7), failed(MINUS, 0)]), tmp_path)
    assert {"failures.md", "comparisons.tex", "forest.pdf"} <= {p.name for p in tmp_path.iterdir()}
    made = write_report(load([record(NONE, 0, 0.6)]), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in made} | {"mine.txt"} and {
        p.name for p in made
    } <= set(report._FILES)


def test_an_error_in_a_figure_is_not_swallowed(tmp_path, monkeypatch):
    def broken(df):
        raise ValueError("a fault of the figure")

    monkeypatch.setattr(figures, "plot_tradeoff", broken)
    with pytest.raises(ValueError, match="a fault of the figure"):
        write_report(load([record(NONE, 0, 0.6)]), tmp_path)


def test_comparison_knows_the_error_of_the_rows_and_mixed_commits():
    rng, truth = np.random.default_rng(0), np.random.default_rng(1).integers(2, size=300)
    draws = np.random.default_rng(0).integers(300, size=(500, 300))

    def one(seed, lam, right, commit):
        guess = np.where(rng.random(300) < right, truth, 1 - truth)
        config = {"task": "rte", "model": "m", "regularizer": "istar" if lam else "none", "lam": lam, "seed": seed}
        values = (guess == truth)[draws].mean(1)
        return guess, {
            "key": f"{lam}-{seed}",
            "config": config,
            "metric": "accuracy",
            "value": float((guess == truth).mean()),
            "status": "done",
            "git_commit": commit,
            "resampled": pack(values),
        }

    arms = {
        lam: [one(s, lam, right, "a" if s < 2 else str(lam)) for s in range(3)]
        for lam, right in ((0.0, 0.6), (0.1, 0.7))
    }
    row = compare(load([r for arm in arms.values() for _, r in arm])).iloc[0]
    per_row = np.mean([(a[0] == truth) * 1.0 - (b[0] == truth) for a, b in zip(arms[0.1], arms[0.0])], 0)
    assert row.row_error == pytest.approx(per_row.std() / 300**0.5, rel=0.1)
    assert "commit" in row.differ
    arms[0.1][0][1]["resampled"]["data"] = "damaged"
    with pytest.warns(UserWarning, match="resampled scores of 0.1-0 cannot be read: its comparisons count seeds alone"):
        alone = compare(load([r for arm in arms.values() for _, r in arm])).iloc[0]
    assert math.isnan(alone.row_error) and alone.difference == row.difference


# ---- one training, evaluated on two tasks


def matched(method, seed, value, other, **more):
    "A run on MNLI with its score on the mismatched rows."
    return record(method, seed, value, task="mnli", others={"mnli-mm": {"value": other, "metric": "accuracy"}}, **more)


def test_tasks_of_one_training_are_no_pairs_of_their_own():
    rng = np.random.default_rng(0)
    gains = rng.normal(0.01, 0.01, 5)
    runs = [matched(NONE, s, 0.6, 0.6) for s in range(5)]
    runs += [matched(MINUS, s, 0.6 + g, 0.6 + g) for s, g in enumerate(gains)]
    both = over_tasks(compare(load(runs))).iloc[0]
    low, high = t_interval(gains)
    assert (both.tasks, both.n) == (2, 5) and both.difference == pytest.approx(gains.mean())
    assert (both.low, both.high) == pytest.approx((low, high)) and both.p == pytest.approx(sign_flip(gains)[0])
    assert both.unequal == 5 and both.reachable == 2**-4
    runs = [matched(m, s, 0.6 + 0.01 * (m is MINUS), 0.6) for m in (NONE, MINUS) for s in range(5)]
    assert "this test: with 5 pairs p is at least 0.0625" in over_tasks(compare(load(runs))).verdict[0]


def test_other_tasks_keep_their_weight_beside_tasks_of_one_training():
    rng = np.random.default_rng(1)
    a, b, c = rng.normal(0.01, 0.01, (3, 5))
    runs = [matched(NONE, s, 0.6, 0.6) for s in range(5)] + [record(NONE, s, 0.6) for s in range(5)]
    runs += [matched(MINUS, s, 0.6 + a[s], 0.6 + b[s]) for s in range(5)]
    runs += [record(MINUS, s, 0.6 + c[s]) for s in range(5)]
    row = over_tasks(compare(load(runs))).iloc[0]
    assert row.n == 10 and row.difference == pytest.approx(np.mean([a.mean(), b.mean(), c.mean()]))
    pair = (a + b) / 2
    error = math.sqrt((2 / 3) ** 2 * pair.var(ddof=1) / 5 + (1 / 3) ** 2 * c.var(ddof=1) / 5)
    assert (row.high - row.low) / 2 > stats.norm.ppf(0.975) * error
    assert row.p == pytest.approx(sign_flip([*(2 * pair), *c])[0])


def test_a_training_that_failed_has_failed_on_all_its_tasks():
    runs = [matched(m, s, 0.6, 0.6) for m in (NONE, MINUS) for s in range(3)]
    runs += [matched(NONE, 3, 0.6, 0.6), failed(MINUS, 3, task="mnli")]
    df = load(runs)
    table = compare(df).set_index("task")
    assert table.failed.to_dict() == {"mnli": 1, "mnli-mm": 1}
    assert "8 runs, 1 failed" in provenance(df)


def test_a_share_of_a_gain_is_of_two_methods():
    settings = [{"train_fraction": f} for f in (0.1, 1.0)]
    runs = [
        record(m, s, 0.6 + 0.01 * s * (m is MINUS), settings=x)
        for m in (NONE, MINUS)
        for s in range(5)
        for x in settings
    ]
    table = compare(load(runs))
    with pytest.raises(ValueError, match="table: rte has a method in two settings"):
        gain_share(table, table.method.iloc[0], "no such method")


def test_no_interval_is_not_called_equal():
    runs = [record(m, s, 0.6 + 0.01 * s * (m is MINUS)) for m in (NONE, MINUS) for s in range(5)]
    runs += [record(m, 0, 0.6 + 0.02 * (m is MINUS), task="mrpc") for m in (NONE, MINUS)]
    assert "all equal" not in to_markdown(over_tasks(compare(load(runs))))


def test_layers_of_tables_that_were_joined():
    layers = lambda m, x: record(m, 0, 0.6, isoscore={w: {"union": x, "layers": [x, x]} for w in ("before", "after")})
    parts = [load([layers(m, x)]) for m, x in ((NONE, 0.1), (MINUS, 0.9))]
    lines = {line.get_label(): line.get_ydata() for line in plot_layers(pd.concat(parts)).axes[0].lines}
    base = next(y for name, y in lines.items() if name.startswith("base"))
    assert list(base[1:]) == pytest.approx([0.1, 0.1])  # layer 0 has none here


def test_a_report_takes_no_file_away_that_it_did_not_write(tmp_path):
    (tmp_path / "failures.md").write_text("mine")
    with pytest.raises(ValueError, match="folder: .* has failures.md, which no report wrote"):
        write_report(load([record(NONE, s, 0.6) for s in (0, 1)]), tmp_path)
    assert (tmp_path / "failures.md").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
