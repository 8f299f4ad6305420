"""Grids: what a file says, which runs it means, and which settings a search chooses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.experiments.config import LandscapeConfig
from isoreg.experiments.finetune import RunConfig
from isoreg.experiments.grid import choose, expand, final_grid, grid_path, load_grid

ROOT = Path(__file__).parents[1]
invoke = lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])
TINY = "{max_train: 32, max_eval: 20, epochs: 1, lam: -0.1}"


def grid(path, text):
    path.write_text(text)
    return path


def test_axes_tables_include_exclude_and_blocks(tmp_path):
    path = grid(
        tmp_path / "g.yaml",
        """
description: all that a file can say
fixed: {epochs: 1, lr: 1e-3}
axes:
  seed: 0..2
exclude:
  - {seed: 2, method: base}
blocks:
  - name: first
    axes:
      method:
        - {name: base, regularizer: none}
        - {name: istar, regularizer: istar, lam: [-1, 1], zeta: 0.4}
    include:
      - {task: toy-rte, regularizer: none, seed: [7, 8]}
  - name: second
    fixed: {seed: 5, regularizer: none, epochs: 2}
    axes: {max_train: [10, 20]}
  - name: third
    fixed: {regularizer: none}
    exclude: [{seed: [1, 2]}]
""",
    )
    plan = expand(load_grid(path))
    got = [
        (
            r.block,
            r.config["task"],
            r.config["regularizer"],
            r.config["lam"],
            r.config["zeta"],
            r.config["seed"],
            r.config["epochs"],
            r.config["max_train"],
        )
        for r in plan.runs
    ]
    istar = [("first", "toy-cola", "istar", lam, 0.4, seed, 1, None) for seed in (0, 1, 2) for lam in (-1.0, 1.0)]
    base = [("first", "toy-cola", "none", 0.0, 0.0, seed, 1, None) for seed in (0, 1)]
    assert sorted(map(str, got)) == sorted(
        map(
            str,
            istar
            + base
            + [("first", "toy-rte", "none", 0.0, 0.0, seed, 1, None) for seed in (7, 8)]
            + [("second", "toy-cola", "none", 0.0, 0.0, 5, 2, n) for n in (10, 20)],
        )
    )
    assert got[0][:6] == ("first", "toy-cola", "none", 0.0, 0.0, 0) and got[1][3] == -1.0  # the last axis runs fastest
    assert all(r.config["lr"] == 1e-3 for r in plan.runs)
    assert plan.combinations == 8 + 2 + 2 + 1 and plan.duplicates == 1  # third has seed 0 alone, which first has
    assert plan.excluded == 1 + 2 and dict((b[0], b[3]) for b in plan.blocks) == {"first": 10, "second": 2, "third": 0}
    assert any("second" in note and "takes nothing away" in note for note in plan.notes)


def test_keys_are_those_of_isoreg_run_and_order_is_the_grids():
    plan = expand(load_grid("toy"))
    assert [r.key for r in plan.runs] == [
        RunConfig(
            task=t, regularizer=m, lam=None if m == "none" else -0.1, seed=s, epochs=1, max_train=600, max_eval=200
        ).key
        for t in ("toy-cola", "toy-rte")
        for m in ("none", "istar")
        for s in (0, 1)
    ]


def test_overrides_take_the_place_of_what_the_grid_gives(tmp_path):
    path = grid(
        tmp_path / "g.yaml",
        "axes:\n  seed: [0, 1, 2]\n  m: [{dropout: standard}, {dropout: constant, dropout_p: 0.05}]\nfixed: {regularizer: none}\n",  # noqa: E501
    )
    plan = expand(load_grid(path), overrides={"seed": [4, 5], "dropout_p": 1e-2, "max_train": 9})
    assert sorted(
        (r.config["seed"], r.config["dropout"], r.config["dropout_p"], r.config["max_train"]) for r in plan.runs
    ) == [(4, "constant", 0.01, 9), (4, "standard", None, 9), (5, "constant", 0.01, 9), (5, "standard", None, 9)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("axes: {seed: [0]}\nfix: {}", ["fix", "fixed"]),
        ("axes: {sed: [0, 1]}", ["sed", "did you mean seed", "2 of 2"]),
        ("axes: {lam: [1, 2]}\nfixed: {lam: 1}", ["lam", "fixed and under axes"]),
        ("axes: {seed: 3}", ["seed", "no list"]),
        ("axes: {seed: []}", ["seed", "empty"]),
        ("axes: {seed: [4..0, 7]}", ["seed", "4..0", "write 0..4"]),
        ("axes: {m: [{name: a, seed: []}]}", ["seed", "empty"]),
        ("axes: {seed: [0]}\ninclude: [{seed: []}]", ["include: seed", "empty"]),
        ("axes: {seed: [0]}\ninclude: [null]", ["include", "entry 1 is empty"]),
        ("axes: {seed: [0]}\nexclude: [{}]", ["exclude", "entry 1 is empty"]),
        ("# nothing", ["g.yaml is empty"]),
        ("notebook: [finetune]", ["notebook", "unknown"]),
        ("fixed: {seed: [1, 2]}", ["seed", "axes"]),
        ("axes: {m: [{lam: 1}, {lam: 2}], lam: [1]}", ["lam", "two axes"]),
        ("axes: {m: [{lam: 1}, 2]}", ["mixes"]),
        ("axes: {seed: [0]}\nexclude: [{see: 0}]", ["see", "seed"]),
        ("axes: {seed: [0]}\nexclude: [{seed: 0}]", ["no run"]),
        ("blocks: [{name: a}, {name: a}]", ["same name"]),
        ("blocks: [{names: a}]", ["names", "name"]),
        ("blocks: []", ["no block"]),
        ("notebook: finetun", ["finetun", "finetune"]),
        ("axes: {lam: [.inf, 1]}", ["lam", "1 of 2"]),
        ("axes: !!python/object/apply:os.system [ls]", ["YAML"]),
        ("a: [", ["YAML"]),
        ("- 1", ["no table"]),
    ],
)
def test_bad_grids_are_refused_with_their_reason(tmp_path, text, words):
    path = grid(tmp_path / "g.yaml", text)
    with pytest.raises(ValueError) as caught:
        expand(load_grid(path))
    for word in words:
        assert word in str(caught.value)
    result = invoke("sweep", path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_ranges_may_be_negative_and_overrides_not_empty(tmp_path):
    path = grid(tmp_path / "g.yaml", "axes: {lam: -2..1}\n")
    assert [r.config["lam"] for r in expand(load_grid(path)).runs] == [-2.0, -1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="set: seed: the list is empty"):
        expand(load_grid(path), overrides={"seed": []})


def test_dry_run_counts_and_writes_nothing(tmp_path):
    path = grid(tmp_path / "g.yaml", f"fixed: {TINY}\naxes: {{regularizer: [none, istar], zeta: [0.2, 0.4]}}")
    result = invoke("sweep", path, "--dry-run", "--out", tmp_path / "out", "--set", "seed=[0,1]")
    assert (
        result.exit_code == 0
        and "6 runs: 0 done, 6 to do" in result.output
        and "2 combinations are equal to others" in result.output
    )
    assert result.output.count("missing toy-cola") == 6 and not (tmp_path / "out").exists()
    assert invoke("sweep", path, "--dry-run", "--set", "seed").exit_code == 2
    assert invoke("sweep", path, "--dry-run", "--only", "h").exit_code == 2
    assert "there are" in invoke("sweep", "nothing").output


@pytest.mark.parametrize("path", sorted((ROOT / "nbs" / "grids").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_grids_are_valid_and_count_what_they_say(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    plan = expand(load_grid(path.stem), overrides={"data_dir": str(tmp_path)} if "data_dir" in text else {})
    said = re.search(r"(\d[\d ]*) runs?\b", "".join(line for line in text.splitlines() if line.startswith("#")))
    assert int(said[1].replace(" ", "")) == len(plan.runs) == plan.combinations and not plan.notes
    assert grid_path(path.stem).samefile(path)


def test_grids_share_their_cells_and_only_padding_is_without_groups(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = {
        name: expand(load_grid(f"small-{name}"), overrides={"data_dir": str(tmp_path)}).runs
        for name in ("ablations", "search", "istar", "guided", "paucity")
    }
    shared = {r.key for r in plans["ablations"]} & {r.key for r in plans["istar"]}
    assert sorted((r.config["task"], r.config["seed"]) for r in plans["istar"] if r.key in shared) == [
        (t, s) for t in ("cola", "mrpc") for s in range(3)
    ]
    for name, runs in plans.items():
        whole = [r for r in runs if r.config["length_groups"] == 1 and r.config["task"] != "cola"]
        assert {r.block for r in whole} == ({"padding", "ungrouped"} if name == "ablations" else set()) and all(
            r.config["length_groups"] == 1 for r in runs if r.config["task"] == "cola"
        )
    of = lambda block: [r.config for r in plans["ablations"] if r.block == block and r.config["task"] == "mrpc"]
    padded = of("padding")
    for regularizer in (
        "none",
        "istar",
    ):  # each has its partners of the same seed, apart from the padding and the segment ids
        partners = [c for c in of("ungrouped") if c["regularizer"] == regularizer]
        assert sorted(c["seed"] for c in partners) == [0, 1, 2] and len(padded) == 6
        but = {"padding", "segment_ids", "seed"} | ({"regularizer", "lam", "zeta"} if regularizer == "none" else set())
        for c in padded:
            assert all(c[k] == partners[0][k] for k in c if k not in but)


def _search(tmp_path, seed="[100, 101]"):
    (tmp_path / "search.yaml").write_text(
        f"fixed: {{task: toy-cola}}\naxes:\n  seed: {seed}\n  task: [toy-cola, toy-rte]\n  lr: [1e-4, 5e-4]\n".replace(
            "fixed: {task: toy-cola}\n", ""
        )
        + "  method: [{regularizer: none}, {regularizer: istar, lam: [-0.1, 0.1]}, {regularizer: none, dropout: constant, dropout_p: 0.05}]\n"  # noqa: E501
    )
    return expand(load_grid(tmp_path / "search.yaml"))


def test_settings_are_chosen_on_the_same_seeds(tmp_path):
    "An easy seed of one setting is no merit."
    blocks = "blocks:\n- axes: {seed: [100, 101], lr: [1e-4]}\n- axes: {seed: [101, 102], lr: [5e-4]}\n"
    (tmp_path / "search.yaml").write_text(f"fixed: {{task: toy-cola, regularizer: none}}\n{blocks}")
    plan = expand(load_grid(tmp_path / "search.yaml"))
    with pytest.raises(ValueError, match=r"seed: settings of none .* have seeds \[100, 101\] and \[101, 102\]"):
        choose(plan, [{"key": r.key, "value": 0.5} for r in plan.runs])


def test_selection_takes_the_best_mean_of_each_task_and_method(tmp_path):
    plan = _search(tmp_path)
    score = {r.key: float(v) for r, v in zip(plan.runs, np.random.default_rng(0).random(len(plan.runs)))}
    choices = choose(plan, [{"key": k, "value": v} for k, v in score.items()])
    assert len(choices) == 6 and sorted(c.candidates for c in choices) == [2, 2, 2, 2, 4, 4]
    for c in choices:
        same = [
            r
            for r in plan.runs
            if (r.config["task"], r.config["regularizer"], r.config["dropout"]) == (c.place["task"], *c.method)
        ]
        means = {}
        for r in same:
            means.setdefault((r.config["lr"], r.config["lam"]), []).append(score[r.key])
        assert c.score == pytest.approx(max(np.mean(v) for v in means.values()))
        assert np.mean(means[c.config["lr"], c.config["lam"]]) == pytest.approx(c.score) and c.seeds == (100, 101)
    (tmp_path / "final.yaml").write_text(final_grid(choices, "0..2"))
    final = expand(load_grid(tmp_path / "final.yaml"))
    assert len(final.runs) == 18 and {r.config["seed"] for r in final.runs} == {0, 1, 2}
    for c in choices:
        assert sum({k: v for k, v in r.config.items() if k != "seed"} == c.config for r in final.runs) == 3


def test_selection_refuses_what_would_flatter(tmp_path):
    with pytest.raises(ValueError, match="seed: 3 is for final runs"):
        choose(_search(tmp_path, "[3, 100]"), [])
    plan = _search(tmp_path)
    with pytest.raises(ValueError, match="records: 1 of .* finish the search"):
        choose(plan, [{"key": r.key, "value": 0.5} for r in plan.runs[1:]])
    with pytest.raises(ValueError, match="records: no setting of toy-cola none standard has a score"):
        choose(plan, [{"key": r.key, "value": None} for r in plan.runs])
    choices = choose(plan, [{"key": r.key, "value": 0.5} for r in plan.runs])
    assert all(c.settings["lr"] == 1e-4 for c in choices)  # of equal ones the first of the grid
    (tmp_path / "final.yaml").write_text(final_grid(choices, "3..3"))
    assert {r.config["seed"] for r in expand(load_grid(tmp_path / "final.yaml")).runs} == {3}
    with pytest.raises(ValueError, match="seeds: '0,1'"):
        final_grid(choices, "0,1")
    with pytest.raises(ValueError, match="seeds: 100 was searched on"):
        final_grid(choices, "99..100")


def test_select_writes_the_grid_of_the_final_runs(tmp_path):
    plan = _search(tmp_path)
    done = {"status": "done", "metric": "accuracy"}
    records = [done | {"key": r.key, "config": r.config, "value": r.config["lr"]} for r in plan.runs]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    command = [
        str(tmp_path / "search.yaml"),
        str(tmp_path / "all.jsonl"),
        "--out",
        str(tmp_path / "final.yaml"),
        "--seeds",
        "0..1",
    ]
    result = CliRunner().invoke(app, ["select", *command])
    assert result.exit_code == 0 and "different numbers of settings" in result.output, result.output
    assert {r.config["lr"] for r in expand(load_grid(tmp_path / "final.yaml")).runs} == {5e-4}
    assert (
        CliRunner().invoke(app, ["select", str(tmp_path / "search.yaml"), str(tmp_path / "none.jsonl")]).exit_code == 2
    )


def test_what_is_excluded_and_included_is_said_of_the_runs_as_they_are(tmp_path):
    path = grid(
        tmp_path / "g.yaml",
        "axes: {task: [toy-cola, toy-rte], regularizer: [none, istar]}\n"
        "exclude: [{task: toy-rte, regularizer: istar}]\n",
    )
    got = lambda **o: {(r.config["task"], r.config["regularizer"]) for r in expand(load_grid(path), overrides=o).runs}
    assert len(got()) == 3 and got(task="toy-rte") == {("toy-rte", "none")}
    assert got(task="toy-cola") == {("toy-cola", "none"), ("toy-cola", "istar")}
    assert not expand(load_grid(path), overrides={"task": "toy-cola"}).notes
    named = grid(
        tmp_path / "n.yaml",
        "axes:\n  seed: [0, 1]\n  dropout: [{name: five, dropout: constant, dropout_p: 0.05}, {dropout: standard}]\n"
        "exclude: [{dropout: five, seed: 1}]\n",
    )
    assert len(expand(load_grid(named)).runs) == 3
    plan = expand(load_grid(named), overrides={"seed": [1, 2]})
    assert len(plan.runs) == 3 and not plan.notes
    only = grid(tmp_path / "i.yaml", "fixed: {regularizer: none}\ninclude: [{task: toy-rte, seed: [0, 1]}]\n")
    assert [(r.config["task"], r.config["seed"]) for r in expand(load_grid(only)).runs] == [
        ("toy-rte", 0),
        ("toy-rte", 1),
    ]


def test_null_reaches_a_notebook_whose_own_value_is_another(tmp_path):
    path = grid(tmp_path / "g.yaml", "notebook: landscape\nfixed: {limit: null, points: 3}\n")
    (run,) = expand(load_grid(path)).runs
    assert LandscapeConfig.from_dict(run.parameters).key == run.key


def test_a_search_that_was_swept_with_other_values_is_chosen_from_with_them(tmp_path):
    _search(tmp_path)
    swept = expand(load_grid(tmp_path / "search.yaml"), overrides={"seed": [102]})
    records = [{"key": r.key, "config": r.config, "value": r.config["lr"], "metric": "accuracy"} for r in swept.runs]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(r | {"status": "done"}) + "\n" for r in records))
    command = ["select", tmp_path / "search.yaml", tmp_path / "all.jsonl"]
    assert invoke(*command).exit_code == 2 and "--set" in invoke(*command).output
    assert invoke(*command, "--set", "seed=102").exit_code == 0
    other = expand(load_grid(grid(tmp_path / "g.yaml", "notebook: geometry\nfixed: {points: 60}\n")))
    with pytest.raises(ValueError, match="grid: .* has runs of geometry"):
        choose(other, [{"key": r.key, "value": 0.5} for r in other.runs])
