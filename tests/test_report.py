"""Records to rows, verdicts, tables that equal the stored ones, published numbers with sources, figures."""

import itertools
import json
import math
import os
import re
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from command import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

matplotlib.use("Agg")
from isoreg.experiments.config import RunConfig
from isoreg.experiments.record import RunRecord
from isoreg.report import figures
from isoreg.report.figures import plot_forest, plot_fraction, plot_layers, plot_mean_activation, plot_tradeoff
from isoreg.report.figures import write_report
from isoreg.report.records import Cell, clears_majority, compare, gain_share, label, load, over_tasks, provenance
from isoreg.report.records import published, readable, summarise, three_columns, to_markdown
from isoreg.report.statistics import ratio_interval

NBS = Path(__file__).parents[1] / "nbs"
FIRST = NBS / "results" / "istar_first.jsonl"
QUICK = {n: v for n, v in RunConfig(recipe="quick").to_record().items() if n not in RunConfig.model_fields}
NONE = {"regularizer": "none", "lam": 0.0, "zeta": 0.0}
MINUS, PLUS = ({"regularizer": "istar", "lam": lam} for lam in (-1.0, 1.0))


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    matplotlib.pyplot.close("all")


def record(method, seed, value, task="rte", settings=(), **more):
    "A run with all that tables and figures show; some layers have no dimension."
    config = {"task": task, "model": "bert-base-cased", "seed": seed, "recipe": "quick", "lr": 5e-5, "epochs": 3}
    config |= {"batch_size": 32} | method | dict(settings)
    before = {"union": 0.2, "layers": [0.2, 0.1], "embeddings": 0.3}
    after = {"union": 0.1 + 0.01 * seed + 0.1 * (method.get("lam") or 0), "layers": [0.3, 0.2], "embeddings": 0.3}
    dimension = {"cls": [7.0, 6.0, 5.0], "mean": [None, 5.0 + seed, 4.0]}
    found = {"key": f"{task}-{sorted(config.items())}", "status": "done", "metric": "accuracy"}
    found |= {"config": QUICK | config}
    found |= {"value": value, "metrics": {"accuracy": value, "f1": 0.5}}
    found |= {"data": {"majority": 0.527, "notes": [], "train_rows": 2490, "evaluation_rows": 277}}
    found |= {"isoscore": {"before": before, "after": after}, "git_commit": "0123456789abcdef"}
    found |= {"geometry": {"after": {"intrinsic_dimension": dimension, "mean_activation": [0.1 * seed, None, 0.3]}}}
    found |= {"hardware": {"cpu": "A CPU", "threads": 2, "gpu": None, "precision": "fp32"}}
    return found | {"started": f"2026-01-01T00:00:{seed:02d}"} | more


def failed(method, seed, error="RuntimeError: out of memory", **kw):
    whole = record(method, seed, 0.0, **kw)
    config = {n: v for n, v in whole["config"].items() if n in RunConfig.model_fields}  # as a sweep writes it
    return {"key": whole["key"], "config": config, "error": error, "attempts": 2}


def arms(**values):
    names = {"none": NONE, "minus": MINUS, "plus": PLUS}
    return load([record(names[n], s, v) for n, vs in values.items() for s, v in enumerate(vs)])


def on_tasks(base=0.5, **differences):
    "Runs of a base and of I-STAR λ=1 whose differences these are, by task."
    pairs = [(t, s, x) for t, d in differences.items() for s, x in enumerate(d)]
    return load([record(m, s, base + x * (m is PLUS), task=t) for t, s, x in pairs for m in (NONE, PLUS)])


def links(text):
    return re.findall(r"\]\(([^ )]+) \"([^\"]+)\"\)", text)


# ---- records to rows
def test_real_records_and_their_older_settings():
    df, lines = load(FIRST), [json.loads(line) for line in FIRST.read_text().splitlines()]
    assert list(df.key) == [r["key"] for r in lines] and list(df.line) == list(range(1, len(lines) + 1))
    assert list(df.value) == [r["value"] for r in lines]
    assert list(df.isoscore_after) == [r["isoscore"]["after"]["union"] for r in lines]
    assert set(df.dropout) == {"standard"} and set(df.p_max) == {0.1} and set(df.protocol) == {"corrected"}
    assert df.intrinsic_dimension_after.isna().all()
    assert df.isoscore_layers_after[0] == lines[0]["isoscore"]["after"]["layers"]
    assert sorted(set(df.method)) == ["I-STAR λ=-1", "I-STAR λ=1", "baseline"]


def test_a_folder_with_all_that_can_lie_in_it(tmp_path):
    files = {
        "a/record.json": record(NONE, 0, 0.6),
        "copy/record.json": record(NONE, 0, 0.6),
        "fisher/record.json": {"kind": "fisher", "config": {"model": "m"}, "status": "done"},
        "list/record.json": [1, 2],
        "lost/failed.json": failed(MINUS, 0),
        "again/failed.json": failed(PLUS, 0),
        "again/record.json": record(PLUS, 0, 0.7),  # of data that have changed since: the failure counts
        "nan/record.json": record(NONE, 1, float("nan")),
        "latin/record.json": json.dumps(record(NONE, 0, 0.6)).encode() + b"\xe9",
        "cut/record.json": json.dumps(record(NONE, 0, 0.6))[:300],
        ".sweep/part/record.json": record(NONE, 2, 0.6),  # what a sweep keeps for itself
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = content if isinstance(content, str | bytes) else json.dumps(content)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="left out 4 that hold no record of a run: .*cut.*fisher.*latin"):
        df = load(tmp_path)
    status = {"baseline0": "done", "I-STAR λ=-10": "failed", "I-STAR λ=10": "failed", "baseline1": "failed"}
    assert dict(zip(df.method + df.seed.astype(str), df.status)) == status and len(df) == 4
    assert df.error[df.method == "I-STAR λ=-1"].item().startswith("RuntimeError")
    assert math.isnan(df.value[df.seed == 1].item())
    path, other = tmp_path / "runs.jsonl", json.dumps({"kind": "geometry", "config": {"model": "m"}})
    path.write_text("\n".join([json.dumps(record(NONE, 0, 0.6)), "", other, other]))
    with pytest.warns(UserWarning, match=r"left out 2.*runs\.jsonl line 3, .* line 4$"):
        df = load(path)
    assert list(df.seed) == [0] and list(df.line) == [1]


def test_a_run_record_and_the_scores_on_further_tasks():
    run = RunRecord("k", RunConfig(regularizer="none", dropout="guided").to_dict(), metric="accuracy", value=0.5)
    other = record(NONE, 0, 0.6, task="mnli", others={"mnli-mm": {"value": 0.7, "metric": "accuracy"}})
    df = load([run, other])
    assert list(df.method) == ["guided dropout", "baseline"]
    for value, mean in (("mnli-mm", 0.7), ("f1", 0.5), ("isoscore_after", 0.1), ("lr", 5e-5)):
        assert summarise(df[df.task == "mnli"], value=value)["mean"].tolist() == pytest.approx([mean])


def test_scores_are_named_where_those_of_a_task_differ():
    def guided(scores, seed, task="rte"):
        return record({"regularizer": "none", "dropout": "guided", "scores": scores}, seed, 0.6, task)

    one = load([guided("a.json", 0), guided("a.json", 1), guided("b.json", 0, "mrpc")])
    assert set(one.method) == {"guided dropout"}
    two = load([guided("out/run-a/full", 0), guided(None, 0)])
    assert set(two.method) == {"guided dropout scores run-a", "guided dropout"}


def test_provenance_names_everything():
    other = {"model": "/models/minilm-l6-h384", "recipe": "istar-released", "train_split": "train_part"}
    runs = [record(NONE, s, 0.6) for s in (0, 1, 2, 5)] + [failed(MINUS, 0), record(NONE, 0, 0.6, settings=other)]
    text = provenance(load(runs))
    assert "bert-base-cased (size unknown)" in text and "/models" not in text
    assert "all-MiniLM-L6-v2 (a sentence encoder of size unknown, not a model of the papers)" in text
    assert "RTE (2490 rows of train or train_part, 277 for evaluation)" in text
    assert "as released (istar-released)" in text and "corrected (quick)" in text and "Seeds 0, 1, 2, 5" in text
    assert "A CPU, 2 threads, fp32" in text and "Commit 01234567." in text and "6 runs, 1 failed" in text


# ---- summaries
def test_failed_and_collapsed_runs_are_counted():
    runs = [record(NONE, 0, 0.6), record(NONE, 1, 0.8), record(NONE, 2, 0.527, collapsed=True)]
    table = summarise(load([*runs, failed(NONE, 3), failed(PLUS, 0)]))
    one, other = table.set_index("method").loc["baseline"], table.set_index("method").loc["I-STAR λ=1"]
    assert (one.n, one.failed, one.collapsed) == (3, 1, 1) and [s for s, *_ in one.records] == [0, 1, 2, 3]
    sd = np.std([0.6, 0.8, 0.527], ddof=1)
    np.testing.assert_allclose([one["mean"], one["sd"], one["median"], one["worst"]], [1.927 / 3, sd, 0.6, 0.527])
    assert (other.n, other.failed, other.metric) == (0, 1, "accuracy")
    text = to_markdown(table)
    assert all(part in text for part in ("3, and 1 failed", "1 of 3", "no finished run", "| no run ", "2 failed"))


def test_every_setting_that_varies_on_a_task_makes_a_row():
    df = load([record(NONE, s, 0.6, settings={"lr": lr, "data_dir": f"d{s}"}) for s in (0, 1) for lr in (1e-5, 3e-5)])
    s = summarise(df)
    assert list(s.lr) == [1e-5, 3e-5] and list(s.n) == [2, 2] and list(s.columns[:3]) == ["task", "lr", "method"]
    recipes = [record(NONE, s, 0.6, settings={"recipe": f"istar-{r}"}) for s in (0, 1) for r in ("released", "paper")]
    assert list(summarise(load(recipes)).protocol) == ["as released", "corrected"]
    ways = (("rte", 1), ("mrpc", 4))
    apart = [record(NONE, s, 0.6, task=t, settings={"length_groups": g}) for s in range(3) for t, g in ways]
    assert "length_groups" not in summarise(load(apart))  # one form a task: nothing to tell apart


def test_a_setting_that_is_a_table_tells_runs_apart():
    each = [(m, s, a) for m in (NONE, PLUS) for s in range(2) for a in (1, 2)]
    df = load([record(m, s, 0.6 + 0.1 * (m is PLUS), settings={"definition": {"a": a}}) for m, s, a in each])
    assert summarise(df, by=["definition"]).n.tolist() == compare(df, by=["definition"]).n.tolist() * 2 == [2] * 4
    with pytest.raises(ValueError, match="they differ in definition: add that to by"):
        summarise(df)


@pytest.mark.parametrize("name, value", [("max_train", 100), ("eval_split", "test"), ("clip", 2.0)])
def test_none_and_a_value_are_two_settings(name, value):
    "None is a value: neither pooled with the other runs nor paired with them."
    runs = [(x, t, s, m) for x in (None, value) for t in ("rte", "mrpc") for s in range(3) for m in (NONE, MINUS)]
    score = lambda x, s, m: (0.8 if x is None else 0.7) + 0.01 * s + 0.05 * (m is MINUS)
    df = load([record(m, s, score(x, s, m), task=t, settings={name: x}) for x, t, s, m in runs])
    table = summarise(df)
    assert len(table) == 8 and set(table.n) == {3} and sorted(set(table["mean"].round(6))) == [0.71, 0.76, 0.81, 0.86]
    assert compare(df).difference.tolist() == pytest.approx([0.05] * 4)
    assert set(clears_majority(df)["mean"].round(6)) == {0.81, 0.71}
    assert over_tasks(compare(df)).n.tolist() == [6, 6] and len(plot_tradeoff(df).axes) == 4


def test_no_mean_counts_a_seed_twice():
    runs = [record(NONE, s, 0.6, settings={"model": f"/{where}/bert"}) for where in "ab" for s in range(2)]
    with pytest.raises(ValueError, match="by: two runs of baseline have seed 0; they differ in model: add that to by"):
        summarise(load(runs))
    assert list(summarise(load(runs), by=["model"]).n) == [2, 2]
    assert list(summarise(load([runs[0], runs[3]])).n) == [2]  # a folder that was moved


# ---- comparisons
def test_compare_against_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.6, 0.02, 9), rng.normal(0.62, 0.02, 9)
    r = compare(arms(none=x, plus=y)).iloc[0]
    np.testing.assert_allclose([r.low, r.high], stats.ttest_rel(y, x).confidence_interval())
    patterns = np.array(list(itertools.product((-1, 1), repeat=9)))
    assert r.difference == pytest.approx(np.mean(y - x))
    assert r.p == pytest.approx(np.mean(abs(patterns @ (y - x)) >= abs(sum(y - x)) - 1e-12)) and r.p_holm == r.p
    assert r.n == 9 and r.incomplete == [] and r.differ == []


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(-0.5, 0.5)), min_size=2, max_size=7))
@settings(max_examples=5, deadline=None)
def test_what_a_seed_adds_to_both_arms_changes_nothing(rows):
    a, b, shared = np.round(np.array(rows).T, 3)
    one, two = compare(arms(none=a, plus=b)).iloc[0], compare(arms(none=a + shared, plus=b + shared)).iloc[0]
    np.testing.assert_allclose([one.difference, one.p], [two.difference, two.p], atol=1e-9)
    back = compare(arms(none=a, plus=b), baseline="I-STAR λ=1").iloc[0]
    np.testing.assert_allclose([back.difference, back.p], [-one.difference, one.p], atol=1e-9)
    swap = {"higher": "lower", "lower": "higher"}
    assert back.verdict == swap.get(one.verdict, one.verdict)
    turned = compare(arms(none=a, plus=b), of="baseline").iloc[0]
    assert (turned.method, turned.difference, turned.verdict) == (back.method, back.difference, back.verdict)


SIGNS, HALF = 0.01 * np.array([1, -1, 1, -1, 1, 1, -1, 1]), 0.01 * np.array([0, 0, 0, 0, 1, 1, 1, 1])
FEW = "too few seeds for this test: with {} the corrected p is {} or more; 6 pairs can reach 0.05"


@pytest.mark.parametrize(
    "effect, verdict",
    [
        ([0.1] * 5, FEW.format("5 unequal pairs", "0.0625")),
        ([0.1] * 6, "higher"),
        ([-0.1] * 6, "lower"),
        ([0.1], FEW.format("1 unequal pair", "1.000")),
        ([0.0] * 8, "equal in all pairs"),
        (SIGNS, "inconclusive"),
        (HALF, FEW.format("4 unequal pairs", "0.125")),
    ],
)
def test_verdicts(effect, verdict):
    base = np.random.default_rng(0).normal(0.6, 0.02, len(effect)).round(4)
    assert compare(arms(none=base, plus=base + effect)).verdict[0] == verdict


def test_holm_over_the_table_raises_the_seeds():
    base = np.random.default_rng(0).normal(0.6, 0.02, 7)
    c = compare(arms(none=base[:6], minus=base[:6] + 0.1, plus=base[:6] - 0.1))
    assert list(c.p) == [2 / 64] * 2 and list(c.p_holm) == list(c.reachable) == [4 / 64] * 2
    assert set(c.verdict) == {FEW.format("6 unequal pairs", "0.0625").replace("; 6", "; 7")}
    assert list(compare(arms(none=base, minus=base + 0.1, plus=base - 0.1)).verdict) == ["higher", "lower"]


def test_rows_of_too_few_pairs_take_no_part():
    base = np.random.default_rng(0).normal(0.6, 0.02, 6)
    few = arms(none=base, minus=base - 0.1, plus=base[:2] + 0.1)
    whole, most = compare(few), compare(few, min_pairs=3)
    assert list(whole.n) == [6, 2] and list(most.n) == [6] and most.p_holm[0] == 2 / 64 < whole.p_holm[0]
    with pytest.raises(ValueError, match="min_pairs: no row has 7 complete pairs"):
        compare(few, min_pairs=7)


def test_incomplete_pairs_are_named_and_a_verdict_says_that_a_run_failed():
    runs = [record(NONE, s, 0.6 + 0.001 * s) for s in range(7)] + [failed(NONE, 7), failed(PLUS, 6)]
    df = load([*runs, *(record(PLUS, s, 0.7) for s in (0, 1, 2, 3, 4, 5, 7, 9))])
    r = compare(df).iloc[0]
    assert (r.n, r.failed, r.verdict) == (6, 2, "higher in the complete pairs")
    assert r.incomplete == ["rte seed 6: a run failed", "rte seed 7: a run failed", "rte seed 9"]
    linked = [s for s, *_ in r.records], [s for s, *_ in r.records_baseline]
    assert linked == (list(range(6)), list(range(6)))  # what is linked is what the mean is of
    assert "rte seed 9" in to_markdown(compare(df))
    del runs[2]["metrics"]["f1"]  # a run without this value has not failed
    c = compare(load(runs[:7] + [record(PLUS, s, 0.7) for s in range(7)]), value="f1").iloc[0]
    assert (c.n, c.failed, c.incomplete) == (6, 0, ["rte seed 2"])


def test_arms_of_other_data_or_another_machine_say_so():
    def runs(method, data, cpus, commit="a"):
        about = {"data": {"majority": 0.5, "fingerprint": data}, "git_commit": commit}
        machines = [{"cpu": cpu, "threads": 1, "precision": "fp32"} for cpu in cpus]
        return [record(method, s, 0.6, **about, hardware=machine) for s, machine in enumerate(machines)]

    differ = lambda *other: compare(load(runs(NONE, "one", "AAA") + runs(PLUS, *other))).differ[0]
    assert differ("one", "AAA") == differ("one", "AA") == []  # of the complete pairs
    assert differ("two", "BBB") == ["hardware", "data"] and differ("one", "AAB") == ["hardware"]
    assert differ("one", "AAA", "b") == ["commit"]


def test_pairs_need_one_run_a_seed_and_the_same_setting():
    rates = [(m, s, lr) for m in (NONE, PLUS) for s in range(3) for lr in (1e-5, 3e-5)]
    both = load([record(m, s, 0.6 + 0.01 * s + lr, settings={"lr": lr}) for m, s, lr in rates])
    assert list(compare(both).lr) == [1e-5, 3e-5] and list(compare(both).n) == [3, 3]
    epochs = [(NONE, 3), (PLUS, 5)]
    uneven = load([record(m, s, 0.6 + 0.01 * s, settings={"epochs": e}) for m, e in epochs for s in range(3)])
    assert compare(uneven, by=[]).differ[0] == ["epochs"] and "methods differ in" in to_markdown(compare(uneven, by=[]))
    apart = load([record(m, s, 0.6, settings={"max_train": s * (m is PLUS)}) for m in (NONE, PLUS) for s in (1, 2)])
    assert set(compare(apart).verdict) == {"no pair to compare"}


@pytest.mark.parametrize("min_pairs", [0, 3])
def test_a_column_that_takes_all_pairs_apart_is_named(min_pairs):
    "λ differs between the baseline and each method, so that rows with one λ have no pair."
    df = arms(none=[0.6, 0.7], minus=[0.5, 0.6], plus=[0.6, 0.7])
    with pytest.raises(ValueError, match="by: no pair has the same lam as 'baseline'; leave that out of by"):
        compare(df, by=["precision", "lam"], min_pairs=min_pairs)
    assert compare(df, by=["precision"]).n.tolist() == [2, 2]
    none, epochs = record(NONE, 0, 0.6), record(PLUS, 0, 0.6, settings={"epochs": 5})
    some = load([none, epochs, record(MINUS, 0, 0.6)])  # with the same epochs there is one pair
    assert sorted(compare(some, by=["epochs"]).n) == [0, 1]


def test_methods_are_compared_each_at_the_setting_chosen_for_it():
    "As select, sweep and report leave them: one learning rate for each method and task."
    chosen = [("rte", NONE, 1e-5), ("rte", PLUS, 3e-5), ("mrpc", NONE, 5e-5), ("mrpc", PLUS, 5e-5)]
    score = lambda m, s: 0.6 + 0.01 * s + 0.1 * (m is PLUS)
    runs = [record(m, s, score(m, s), task=t, settings={"lr": lr}) for t, m, lr in chosen for s in range(6)]
    c = compare(load(runs))
    assert list(c.n) == [6, 6] and list(c.task) == ["mrpc", "rte"]
    assert list(c.differ) == [[], ["lr"]] and over_tasks(c).tasks[0] == 2
    assert set(summarise(load(runs)).lr) == {1e-5, 3e-5, 5e-5}  # what was chosen stays in the summary
    assert plot_tradeoff(load(runs)).axes[0].get_title() == "RTE\nlr by method"
    assert sorted(compare(load(runs), by=["lr"]).n) == [0, 6]
    # a failed run parts no pairs, and does not stand in the way of a done one
    for seed in (7, 0):
        assert list(compare(load([*runs, failed(NONE, seed, settings={"lr": 3e-5})])).n) == [6, 6]
    others = [record(NONE, s, 0.5, settings={"lr": 3e-5}) for s in range(6)]  # now there are equal ones
    c = compare(load(runs + others))
    assert list(c.n[(c.task == "rte") & (c.lr == 3e-5)]) == [6] and not any(c.differ)


# ---- over tasks
few_numbers = st.lists(st.floats(-0.3, 0.3).map(lambda x: round(x, 3)), min_size=2, max_size=5)
few_numbers = few_numbers.filter(lambda d: np.ptp(d) > 0)


@given(few_numbers, few_numbers)
@settings(max_examples=10, deadline=None)
def test_two_tasks_together_are_welchs_interval_and_all_sign_patterns(one, two):
    row = over_tasks(compare(on_tasks(cola=one, rte=two))).iloc[0]
    welch = stats.ttest_ind(one, -np.array(two), equal_var=False).confidence_interval()
    theirs = [(np.mean(one) + np.mean(two)) / 2, welch.low / 2, welch.high / 2]
    np.testing.assert_allclose([row.difference, row.low, row.high], theirs, atol=1e-9)
    share = lambda d: np.mean([abs(d @ f) >= abs(d.sum()) - 1e-9 for f in itertools.product((-1, 1), repeat=len(d))])
    parts = [np.array(d) / len(d) for d in (one, two)]
    seeds = max(map(len, parts))
    assert np.isclose(row.p, share(np.concatenate(parts)))
    assert np.isclose(row.p_seeds, share(sum(np.pad(d, (0, seeds - len(d))) for d in parts)))
    assert row.n == len(one) + len(two) and row.task == "cola + rte" and row.tasks == 2
    means = [row["mean"], row.mean_baseline, np.mean(row.differences)]
    np.testing.assert_allclose(means, [0.5 + row.difference, 0.5, row.difference], atol=1e-9)


def test_tasks_together_reach_what_each_alone_cannot():
    table = compare(on_tasks(cola=[0.02, 0.01, 0.03], rte=[0.05, 0.01, 0.02], mrpc=[0.01, -0.02, -0.01]))
    assert all(v.startswith("too few seeds for this test") for v in table.verdict)
    row = over_tasks(table).iloc[0]
    assert row.verdict == "inconclusive" and (row.tasks, row.agree) == (3, 2)  # nine pairs; one task against
    assert over_tasks(table[table.task != "mrpc"]).verdict[0] == "higher"
    assert "2 of 3" in to_markdown(over_tasks(table)) and "CoLA + MRPC + RTE" in to_markdown(over_tasks(table))
    for rte in ([0.1], [0.1, 0.1, 0.1]):  # a task without a spread leaves no interval
        table = over_tasks(compare(on_tasks(cola=[0.02, 0.01, 0.03], rte=rte)))
        assert math.isnan(table.low[0]) and table.difference[0] == pytest.approx(0.06)
        assert "all equal" not in to_markdown(table)


def test_a_task_of_failed_runs_only_is_not_forgotten_over_tasks():
    lost = [r for s in range(6) for r in (record(NONE, s, 0.6, task="cola"), failed(PLUS, s, task="cola"))]
    row = over_tasks(compare(pd.concat([on_tasks(rte=[0.011, 0.012, 0.013, 0.014, 0.015, 0.016]), load(lost)]))).iloc[0]
    assert (row.task, row.n, row.tasks, row.failed, len(row.incomplete)) == ("rte", 6, 1, 6, 6)
    assert row.verdict == "higher in the complete pairs"


def test_the_share_of_a_gain_is_fieller_of_the_pairs():
    gains = {0.0: [0, 0, 0], PLUS["lam"]: [0.02, 0.01, 0.03], MINUS["lam"]: [0.05, 0.04, 0.06]}
    runs = [record(m, s, 0.5 + gains[m["lam"]][s]) for m in (NONE, PLUS, MINUS) for s in range(3)]
    table = compare(load(runs + [record(m, 0, 0.5, task="cola") for m in (NONE, PLUS)]))
    *found, n = gain_share(table, "I-STAR λ=1", "I-STAR λ=-1")
    assert n == 3 and found == pytest.approx(ratio_interval([np.c_[gains[1.0], gains[-1.0]]]))
    assert gain_share(table, "I-STAR λ=1", "guided dropout")[3] == 0


# ---- tables
def outputs(name, start):
    "Markdown outputs of the cells of a notebook whose source contains `start`."
    cells = [c for c in json.loads((NBS / name).read_text())["cells"] if start in "".join(c["source"])]
    data = [o["data"] for c in cells for o in c.get("outputs", []) if "data" in o]
    return ["".join(d["text/markdown"]) for d in data if "text/markdown" in d]


def test_the_stored_tables_are_what_the_records_give(monkeypatch):
    monkeypatch.chdir(NBS / "report")
    page = "report/27_records.ipynb"
    heads = ["task", "method", "seeds", "mean ± sd", "95 % interval", "predicts a single class", "IsoScore after"]
    first = summarise(load("../results/istar_first.jsonl"))
    assert outputs(page, "#| label: tbl-first\n") == [to_markdown(first, columns=heads)]
    learnt = clears_majority(load("../results/runs.jsonl").query("method == 'baseline' and train_fraction == 1"))
    heads = ["task", "can judge", "seeds", "mean ± sd", "best constant answer", "two standard errors"]
    assert outputs(page, "#| label: tbl-learnt\n") == [to_markdown(learnt, caption="", columns=heads)]


def linked(href):
    "The records of a link with ranges of lines."
    path, lines = href.split("#")
    spans = [re.fullmatch(r"L(\d+)(?:-L(\d+))?", span).groups(default="0") for span in lines.split(",")]
    stored = Path(path).read_text().splitlines()
    return [json.loads(line) for a, b in spans for line in stored[int(a) - 1 : int(b) or int(a)]]


def test_each_cell_leads_to_its_records(monkeypatch):
    monkeypatch.chdir(NBS)
    df = load("results/istar_first.jsonl")
    means = ["against", "pairs", "mean", "baseline's mean"]
    found = links(to_markdown(summarise(df))) + links(to_markdown(compare(df), columns=means))
    assert len(found) == 6 + 8
    for href, title in found:
        keys = [r["key"] for r in linked(href)]
        assert len(keys) == 3 and title == f"{keys[0]} and 2 more"


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
            assert len({r["key"] for r in runs}) == len(runs) == 2 * row.n
            assert title.endswith(f"and {len(runs) - 1} more")
            score = pd.DataFrame([{**r["config"], "value": r["value"]} for r in runs])
            mean = score.groupby(["task", "dropout"]).value.mean().unstack()
            assert set(mean.index) == set(row.task.split(" + "))
            assert (mean.guided - mean.standard).mean() == pytest.approx(row.difference)


def test_digits_stay_as_they_are_written_and_a_column_may_go():
    table = pd.DataFrame({"a|b": ["1 | 2", "x_y & <z> 5 %"]})
    assert r"1 \| 2" in to_markdown(table, "from here") and "from here" in to_markdown(table, "from here")
    equal = summarise(arms(none=[0.6, 0.6]))
    assert "0.60 ± 0.00" in to_markdown(equal, digits=2) and "all equal" in to_markdown(equal)
    assert list(readable(equal).assign(minutes="8"))[-1] == "minutes"
    found = compare(arms(none=[0.6, 0.7], plus=[0.7, 0.9]))
    whole = rows_of(to_markdown(found))[0]
    for column, head in (("p_holm", "p, Holm"), ("verdict", "verdict"), ("records", "mean"), ("task", "task")):
        kept = rows_of(to_markdown(found.drop(columns=[column])))[0]
        assert head in whole and head not in kept and len(kept) == len(whole) - 1 - (column == "records")


def test_markdown_marks_in_cells_are_escaped_and_links_hold():
    text = "a *b* _c_ `d` <e> [f](g) h_i 2 < 3 | j\n\nk \\"
    assert r"a \*b\* \_c\_ \`d\` \<e> \[f\](g) h_i 2 < 3 \| j k \\" in to_markdown(pd.DataFrame({"x": [text]}), "x")
    cell = Cell("a_b [c]", ((0, "runs/a [b]/record.json", 0, 'a "b" | c'),))
    link = r'[a_b \[c\]](runs/a%20%5Bb%5D/record.json "a-b-c")'
    assert link in to_markdown(pd.DataFrame({"x": [cell]}), "x")


def test_what_has_one_name_is_told_apart_or_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rates.json").write_text('{"embeddings": 0.1}')
    files = [str(tmp_path / name / "rates.json") for name in ("a", "b")]
    runs = [record(NONE | {"dropout": file}, s, 0.6 + 0.1 * k) for k, file in enumerate(files) for s in (0, 1)]
    assert [m.partition(" (")[2] for m in summarise(load(runs)).method] == [f"{file})" for file in files]
    runs = [record(NONE | {"dropout": "guided", "scores": f"{k}/s.json"}, 0, 0.6) for k in "ab"]
    assert sorted(m.partition(" (")[2] for m in load(runs).method) == ["a/s.json)", "b/s.json)"]
    mixed = load([record(NONE, 0, 0.6), record(NONE, 1, 0.6, metric="f1")])
    for table in (summarise, compare):
        with pytest.raises(ValueError, match="metric: the runs of 'rte' have different metrics"):
            table(mixed)
    df = load([record(NONE, s, 0.6, settings={"segment_ids": s > 0}) for s in (0, 1)])
    assert [row[1] for row in rows_of(to_markdown(summarise(df)))[2:]] == ["no", "yes"]
    for column in ("notes", "isoscore_layers_after"):
        with pytest.raises(ValueError, match=f"by: '{column}' is unknown"):
            summarise(load([failed(NONE, 2), *(record(NONE, s, 0.6) for s in (0, 1))]), by=[column])
    error = summarise(load([record(NONE, s, 0.6) for s in (0, 1)]), value="isoscore_after").error
    assert error.item() == pytest.approx(0.005)


def test_of_two_failed_runs_of_a_seed_one_counts():
    done = [record(m, s, 0.6) for m in (NONE, PLUS) for s in (0, 1)]
    lost = [failed(NONE, 2, settings={"lr": lr}) for lr in (1e-5, 3e-5)]
    (row,) = compare(load([*done, record(PLUS, 2, 0.6), *lost])).itertuples()
    assert (row.n, row.failed, row.incomplete) == (2, 1, ["rte seed 2: a run failed"])


# ---- published numbers
def test_each_published_number_has_its_source():
    raw = json.loads((NBS.parent / "isoreg" / "assets" / "published.json").read_text(encoding="utf-8"))
    known = set("paper table model task metric method statistic value sd n unit confidence source note".split())
    for entry in raw:
        assert len(entry["source"]) > 20 and re.search(r"20\d\d|released with their code", entry["source"]), entry
        assert entry["confidence"] in ("certain", "high", "medium") and set(entry) <= known
        assert {"paper", "table", "method", "statistic", "value", "unit"} <= set(entry)
        assert isinstance(entry["value"], (int, float, list)) and not (entry.get("sd") is not None and "n" not in entry)
    what = ("paper", "table", "model", "task", "method", "statistic", "metric")
    named = [tuple(str(e.get(k)) for k in what) for e in raw if e["table"] != "Figure 4"]
    assert len(set(named)) == len(named)


def test_published_numbers_agree_with_each_other():
    dropout = published(paper="guided dropout")
    rows = dropout[dropout.table == "Table A.5"].set_index("statistic").value
    runs = np.array(rows["each of 30 restarts"])
    found = {"mean": runs.mean(), "median": np.median(runs), "smallest": runs.min(), "largest": runs.max()}
    found["standard deviation"] = runs.std(ddof=1)
    assert len(runs) == 30 and all(round(v, 4) == rows[k] for k, v in found.items())
    two = dropout[dropout.table == "Table 2"].pivot(index=["task", "method"], columns="statistic", values="value")
    assert len(two) == 30 and (two["largest"].astype(float) >= two["mean"].astype(float)).all()
    again = dropout.query("method == 'Guided dropout' and table.str.startswith('comparison')")
    again = again[again.statistic.str.startswith("100")].set_index("task").value
    assert all(again[t] == two.loc[(t, "Guided dropout"), "largest"] for t in again.index)
    assert published(paper="I-STAR", task="squad", method="I-STAR").value[0] == 87.76
    assert [len(v) for v in published(paper="IsoScore").query("metric == 'IsoScore'").value] == [12, 6, 12, 12]


def test_three_columns_keep_protocols_apart():
    recipes = (("istar-released", 0), ("istar-paper", 0.1))
    each = [(m, v + x + 0.01 * s, r, s) for m, v in ((NONE, 0.6), (MINUS, 0.7)) for r, x in recipes for s in (0, 1)]
    runs = [record(m, s, v, settings={"recipe": r}) for m, v, r, s in each]
    numbers = published(paper="I-STAR", table="Table 1", model="BERT", task="rte")
    t = three_columns(load(runs), numbers, {"Base": "baseline", "I-STAR": "I-STAR λ=-1"})
    around = lambda m: f"{m:.4f} ± 0.0071 [{m - 0.0635:.4f}, {m + 0.0635:.4f}] (n=2)"  # t of one degree: 12.706
    assert [str(c) for c in t["as released"]] == [around(0.605), around(0.705)]
    assert [str(c) for c in t["corrected"]] == [around(0.705), around(0.805)]
    assert list(t.published) == ["0.6224 ± 0.0048 (BERT, mean of 5)", "0.6253 ± 0.0070 (BERT, mean of 5)"]
    assert numbers.source[0] in t.attrs["caption"]
    some = three_columns(load([r for r in runs if "paper" in r["config"]["recipe"]]), numbers, {"Base": "baseline"})
    assert list(some["as released"]) == ["not run"]
    other = [record(NONE, s, 0.9, settings={"recipe": "istar-paper", "model": "m2"}) for s in (2, 3)]
    with pytest.raises(ValueError, match="df: runs of baseline on rte differ in model_name; choose one"):
        three_columns(load([*runs, *other]), numbers, {"Base": "baseline"})
    none = three_columns(load(runs), numbers, {"Base": "no dropout"})
    assert [str(c) for c in none.iloc[0][["as released", "corrected"]]] == ["not run"] * 2
    assert "Measured: nothing yet." in none.attrs["caption"]


TWO = lambda: arms(none=[0.6, 0.7], plus=[0.5, 0.4])
LRS = [record(m, s, 0.6, settings={"lr": lr}) for m in (NONE, PLUS) for s in (0, 1) for lr in (1e-5, 3e-5)]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: load("no/such/folder"), "No such file or directory: 'no/such/folder'"),
        (lambda: load([]), "source: holds no record"),
        (lambda: load([{"config": {"task": "rte"}, "value": 1}]), "source: holds no record"),
        (lambda: summarise(TWO(), by=["lrr"]), "by: 'lrr' is unknown; did you mean 'lr'"),
        (lambda: summarise(TWO(), value="bleu"), "value: 'bleu' is unknown; use 'accuracy', 'f1'"),
        (lambda: clears_majority(TWO(), "best"), "baseline: 'best' is unknown"),
        (lambda: compare(TWO(), "Baseline"), "baseline: 'Baseline' is unknown; did you mean 'baseline'"),
        (lambda: compare(TWO(), of="Baseline"), "of: 'Baseline' is unknown; did you mean 'baseline'"),
        (lambda: compare(load(LRS), by=[]), "by: two runs of .* have seed 0; they differ in lr"),
        (lambda: published(papr="I-STAR"), "where: 'papr' is unknown; did you mean 'paper'"),
        (lambda: published(table="Table 9"), "table: 'Table 9' is unknown; did you mean .*use 'Table 1'"),
        (lambda: three_columns(TWO(), published(table="Table 1"), {"Bse": "baseline"}), "methods: 'Bse' is unknown"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises((ValueError, OSError), match=message):
        call()


# ---- tasks that can judge
def plain(values, task="rte", rows=277, metric="accuracy", majority=0.527):
    data = {"majority": majority, "train_rows": 2490, "evaluation_rows": rows}
    return [record(NONE, s, v, task=task, metric=metric, data=data) for s, v in enumerate(values)]


@pytest.mark.parametrize(
    "runs, clears",
    [
        (plain([0.58] * 50), False),  # however many seeds
        (plain([0.58] * 50, rows=2770), True),
        (plain([0.53, 0.531], rows=None), True),  # without the rows only the seeds speak
        (plain([0.61], rows=None), False),
        (plain([0.1], rows=120, metric="pearson", majority=0.0), False),
        (plain([0.01], majority=None), True),  # nothing to clear
        ([failed(NONE, 0)], False),
    ],
)
def test_a_base_near_the_majority_cannot_judge(runs, clears):
    assert list(clears_majority(load(runs)).clears) == [clears]


def test_what_can_judge_is_a_table_with_its_origin():
    cola = plain([0.3, 0.4], task="cola", rows=1043, metric="matthews_correlation", majority=0.0)
    text = to_markdown(clears_majority(load(plain([0.60, 0.62]) + cola + [failed(NONE, 0, task="mrpc")])))
    rows = {row[0]: row for row in rows_of(text)}
    assert rows["RTE"][2:4] == ["2", "0.610 ± 0.014"] and rows["RTE"][5:] == ["0.527", "0.062", "yes"]
    assert rows["CoLA"][5:] == ["0.000", "0.118", "yes"] and "Model bert-base-cased" in text
    assert rows["MRPC"][2:5] == ["0, and 1 failed", "no finished run", "no run"] and rows["MRPC"][-1] == "no"


# ---- figures
def strengths(seeds, score, task="rte"):
    "Runs of seven strengths: score(isotropy, seed)."
    out = []
    for lam, s in itertools.product((-5, -3, -1, 0, 1, 3, 5), range(seeds)):
        iso, method = 0.3 + 0.05 * lam + 0.001 * s, {"regularizer": "istar", "lam": float(lam)} if lam else NONE
        scores = {"before": {"union": 0.2}, "after": {"union": iso, "layers": [0.1, iso]}}
        out.append(record(method, s, score(iso, s), task=task, isoscore=scores))
    return out


def test_tradeoff_shows_every_run():
    runs = strengths(3, lambda iso, s: 0.8 - 0.3 * iso + 0.01 * s) + strengths(3, lambda iso, s: 0.8, task="mrpc")
    runs[0] |= {"collapsed": True}
    runs[-1] = {"key": runs[-1]["key"], "config": runs[-1]["config"], "error": "killed"}
    rte, mrpc = plot_tradeoff(load(runs)).axes
    small = [[line for line in ax.lines if line.get_markersize() == 4] for ax in (rte, mrpc)]
    crosses = [line for line in rte.lines if line.get_marker() == "x"]
    points = [sum(len(line.get_xdata()) for line in lines if line.get_markerfacecolor() == "none") for lines in small]
    assert points == [21, 20] and sum(len(line.get_xdata()) for line in crosses) == 1
    assert [t.get_text() for t in mrpc.texts] == ["1 failed or without isotropy"]
    assert rte.get_ylabel() == "accuracy"


def test_fraction_has_the_median_within_quartiles():
    scores = (0.0, 0.6, 0.9, 0.7, 0.8)
    each = [(m, f, s, v) for m in (NONE, PLUS) for f in (0.1, 0.5, 1.0) for s, v in enumerate(scores)]
    (ax,) = plot_fraction(load([record(m, s, v, settings={"train_fraction": f}) for m, f, s, v in each])).axes
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    line = next(line for line in ax.lines if line.get_linestyle() == "-")
    assert (band.min(), band.max()) == pytest.approx((0.6, 0.8)) and list(line.get_xdata()) == [10, 50, 100]
    assert np.allclose(line.get_ydata(), 0.7)  # the mean, 0.6, is the lower quartile


def test_layers_and_activations_are_means_over_seeds_and_need_their_fields():
    df = load([record(m, s, 0.6) for m in (NONE, PLUS) for s in (0, 1)])
    line = lambda fig: next(x.get_ydata() for x in fig.axes[0].lines if x.get_linestyle() != ":" and len(x.get_ydata()))
    np.testing.assert_allclose(line(plot_layers(df)), [0.3, 0.3, 0.2])
    np.testing.assert_allclose(line(plot_layers(df, "intrinsic_dimension")), [np.nan, 5.5, 4.0])
    np.testing.assert_allclose(line(plot_mean_activation(df)), [0.05, np.nan, 0.3])
    joined = pd.concat([load([record(NONE, 0, 0.6)]), load([record(PLUS, 0, 0.6)])])  # both have a row 0
    assert len(plot_layers(joined).axes[0].lines) == 3
    dimension = lambda d: plot_layers(d, "intrinsic_dimension")
    for draw in (plot_layers, dimension, plot_tradeoff, plot_mean_activation, plot_fraction):
        with pytest.raises(figures.NotRecorded):
            draw(load([record(NONE, 0, 0.6, isoscore={}, geometry={})]))


LACKS = [{"union": None}, {"layers": [None, 0.2]}, {"layers": [None, None]}, {"embeddings": None}, {"layers": None}]


@pytest.mark.parametrize("isoscore", LACKS)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.filterwarnings("error")
def test_null_scores_are_undefined_in_tables_and_figures(isoscore, every):
    runs = [record(m, s, 0.5 + 0.01 * s + 0.1 * i) for i, m in enumerate((NONE, MINUS, PLUS)) for s in range(3)]
    for r in runs if every else runs[3:4]:
        r["isoscore"]["after"] |= isoscore
    df = load(runs)
    s = summarise(df).set_index("method").loc["I-STAR λ=-1"]
    assert math.isnan(s.isoscore_after) == ("union" in isoscore)  # no mean of some of the runs
    for draw in (plot_layers, plot_mean_activation, plot_tradeoff):
        try:
            draw(df)
        except figures.NotRecorded:
            assert every and ("union" in isoscore or "layers" in isoscore)


def test_forest_fills_only_differences_cuts_wide_intervals_and_has_heads():
    base = np.random.default_rng(0).normal(0.6, 0.02, 8)
    ax = plot_forest(compare(arms(none=base, plus=base - 0.1, minus=base + 0.001 * np.array([1, -1] * 4)))).axes[0]
    marks = {line.get_markerfacecolor() for line in ax.lines if line.get_marker() in ("o", "s")}
    assert marks == {"black", "white"} and any("n = 8, p = 0.016" in t.get_text() for t in ax.texts)
    base = np.full(4, 0.6)  # a wide interval is cut, rows stand below their heads
    table = compare(arms(none=base, plus=base + [0.3, -0.3, 0.1, -0.2], minus=base + 0.01 * np.array([1, 2, 1, 2])))
    rows = pd.concat([table] + 2 * [table[table.method == "I-STAR λ=-1"]])
    ax = plot_forest(rows, heads=["one", "one", "two", "two"]).axes[0]
    assert np.ptp(ax.get_xlim()) < 0.3 < np.ptp(table[table.method == "I-STAR λ=1"][["low", "high"]].to_numpy())
    heads = {t.get_text(): t.get_position()[1] for t in ax.texts}
    assert list(ax.get_yticks()) == [-1, -2, -4, -5] and (heads["one"], heads["two"]) == (0, -3)


# ---- the report
def test_a_report_in_one_call_and_a_second_in_its_place(tmp_path):
    for s, m in itertools.product(range(2), (NONE, PLUS)):
        folder = tmp_path / "runs" / f"a {label(m)[:4]}{s}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record(m, s, 0.6 + 0.01 * s + (m is PLUS) * 0.1)))
    (tmp_path / "runs/bad").mkdir()
    (tmp_path / "runs/bad/failed.json").write_text(json.dumps(failed(MINUS, 0)))
    folder = tmp_path / "report"
    made = write_report(tmp_path / "runs", folder)
    drawn = {f"{n}.png" for n in ("tradeoff", "layers", "forest", "intrinsic_dimension", "mean_activation")}
    assert {p.name for p in made} == {"summary.md", "comparisons.md", "failures.md", *drawn}
    assert all(p.stat().st_size > 100 for p in made)
    found = links((folder / "summary.md").read_text())  # of several runs to their folder
    places = sorted((folder / href).resolve() for href, _ in found)
    assert places == [tmp_path / "runs", tmp_path / "runs", tmp_path / "runs/bad/failed.json"]
    assert "out of memory" in (folder / "failures.md").read_text()
    (folder / "mine.txt").write_text("stays")
    again = write_report(load([record(NONE, 0, 0.6)]), folder)
    assert {p.name for p in folder.iterdir()} == {p.name for p in again} | {"mine.txt"} and len(again) < len(made)


def test_a_task_that_cannot_judge_is_named_and_left_out_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "DRAWN", {})
    able, idle = on_tasks(0.7, cola=[0.02, 0.01], rte=[0.03, 0.01]), on_tasks(0.53, mrpc=[0.02, 0.03])
    write_report(pd.concat([able, idle], ignore_index=True), tmp_path)
    text = (tmp_path / "over_tasks.md").read_text(encoding="utf-8")
    assert "CoLA + RTE |" in text
    assert "Left out, since baseline does not clear the majority rate there: MRPC. Model" in text
    assert "MRPC" in (tmp_path / "comparisons.md").read_text(encoding="utf-8")
    write_report(pd.concat([on_tasks(0.7, cola=[0.02, 0.01]), idle]), tmp_path)
    assert not (tmp_path / "over_tasks.md").exists()


def test_when_every_run_failed_the_table_still_comes(tmp_path):
    df = load([failed(NONE, 0), failed(NONE, 1), failed(PLUS, 0)])
    s, c = summarise(df), compare(df).iloc[0]
    assert list(s.n) == [0, 0] and list(s.failed) == [2, 1] and "no finished run" in to_markdown(s)
    assert c.verdict == "no pair to compare" and c.incomplete == [f"rte seed {s}: a run failed" for s in (0, 1)]
    assert {p.name for p in write_report(df, tmp_path)} >= {"summary.md", "failures.md"}


def test_a_cell_links_the_lines_of_its_records_in_every_file_beside_the_first():
    made = lambda *places: Cell("x", tuple((0, file, line, f"{file[2]}{line}") for file, line in places))
    table = lambda *places: to_markdown(pd.DataFrame({"a": [made(*places)]}), caption="")
    three = ("r/t.jsonl", 9), ("r/s.jsonl", 4), ("r/s.jsonl", 3)
    assert '[x](r/s.jsonl#L3-L4,t.jsonl:L9 "s3 and 2 more")' in table(*three)
    assert '[x](. "s3 and 1 more")' in table(("a/s.jsonl", 3), ("b/t.jsonl", 3))
    assert re.search(r'\[x]\(\. "\S+ and 1 more"\)', table(("a/s.jsonl", 3), (os.path.abspath("b/t.jsonl"), 3)))
