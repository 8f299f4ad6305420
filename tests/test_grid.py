"""Grids: what a file says, which runs it means, and which settings a search chooses."""

import contextlib
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from command import invoke

from isoreg.experiments.grid import choose, expand, final_grid, grid_path, load_grid

ROOT = Path(__file__).parents[1]
TINY = "{max_train: 32, max_eval: 20, epochs: 1, lam: -0.1}"


@pytest.fixture
def plan_of(tmp_path):
    "The plan of a text, with other values."

    def plan(text, only=(), **overrides):
        (tmp_path / "g.yaml").write_text(text)
        return expand(load_grid(tmp_path / "g.yaml"), only, overrides)

    return plan


def settings(plan, *names):
    return [tuple(run.config[n] for n in names) for run in plan.runs]


EVERYTHING = """
description: all that a file can say
fixed: {epochs: 1, lr: 1e-3}
axes:
  seed: 0..2
blocks:
  - name: first
    axes:
      method:
        - {name: base, regularizer: none}
        - {name: istar, regularizer: istar, lam: [-1, 1], zeta: 0.4}
  - name: second
    fixed: {seed: 5, regularizer: none, epochs: 2}
    axes: {max_train: [10, 20]}
  - name: third
    fixed: {regularizer: none}
    axes: {seed: [0]}
"""


def test_axes_tables_and_blocks(plan_of):
    plan = plan_of(EVERYTHING)
    assert settings(plan, "task", "regularizer", "lam", "seed", "epochs", "max_train") == [
        ("toy-cola", "none", 0.0, 0, 1, None),
        ("toy-cola", "istar", -1.0, 0, 1, None),  # the last axis runs fastest
        ("toy-cola", "istar", 1.0, 0, 1, None),
        ("toy-cola", "none", 0.0, 1, 1, None),
        ("toy-cola", "istar", -1.0, 1, 1, None),
        ("toy-cola", "istar", 1.0, 1, 1, None),
        ("toy-cola", "none", 0.0, 2, 1, None),
        ("toy-cola", "istar", -1.0, 2, 1, None),
        ("toy-cola", "istar", 1.0, 2, 1, None),
        ("toy-cola", "none", 0.0, 5, 2, 10),
        ("toy-cola", "none", 0.0, 5, 2, 20),
    ]
    assert all(run.config["lr"] == 1e-3 for run in plan.runs)
    assert plan.combinations == 9 + 2 + 1 and plan.duplicates == 1  # the run of third is one of first
    assert [b[::3] for b in plan.blocks] == [("first", 9), ("second", 2), ("third", 0)]
    assert [name for name, *_ in plan_of(EVERYTHING, ("second",)).blocks] == ["second"]


def test_overrides_take_the_place_of_what_the_grid_gives(plan_of):
    text = "axes: {seed: 0..2, m: [{dropout: standard}, {dropout: constant, dropout_p: 0.05}]}\nfixed: {lam: 1}\n"
    plan = plan_of(text, seed=[4, 5], dropout_p=1e-2, max_train=9, lam=[2, 3])
    assert plan.duplicates == 0 and sorted(settings(plan, "seed", "dropout", "dropout_p", "lam", "max_train")) == [
        (seed, how, p, lam, 9)
        for seed in (4, 5)
        for how, p in (("constant", 0.01), ("standard", None))
        for lam in (2.0, 3.0)
    ]


def test_a_value_picks_the_table_that_has_it(plan_of):
    text = "axes: {task: [{task: toy-cola}, {task: toy-rte, max_train: 9, lam: [1, 2]}]}"
    assert settings(plan_of(text, task="toy-rte"), "max_train", "lam") == [(9, 1.0), (9, 2.0)]
    both = settings(plan_of(text, task=["toy-stsb", "toy-rte"]), "task", "max_train", "lam")
    assert both == [("toy-stsb", None, -0.1), ("toy-rte", 9, 1.0), ("toy-rte", 9, 2.0)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("axes: {seed: [0]}\nfix: {}", "g.yaml: fix: unknown setting; did you mean 'fixed'"),
        ("folder: x", "g.yaml: folder: unknown setting"),
        ("_folder: x", "g.yaml: _folder: unknown setting"),
        ("axes: {sed: [0, 1]}", "2 of 2 .*sed: unknown setting; did you mean 'seed'"),
        ("axes: {seed: [4..0, 7]}\nfixed: {lr: 9}", "1 of 1 .*lr: .* less than 1"),  # an empty range has no value
        ("axes: {m: [{name: a, seed: []}]}", r"seed: \[\] has no value"),
        ("blocks: [null]", "blocks: Input should be a valid dictionary"),
        ("# nothing", "g.yaml: is no table"),
        ("notebook: [finetune]", "notebook: Input should be a valid string"),
        ("notebook: finetun", "notebook: 'finetun' is unknown; did you mean 'finetune'"),
        ("fixed: {seed: [1, 2]}", "seed: Input should be a valid integer"),
        ("axes: {m: [{lam: 1}, {lam: 2}], lam: [1]}", "axes: two axes set one of lam; keep each in one"),
        ("axes: {m: [{lam: 1}]}\nblocks: [{name: a, fixed: {lam: 2}}]", "a: fixed and an axis both set lam"),
        ("axes: {seed: 0..3, lr: [2, 1e-4], dropout: [standard, constant]}", "12 of 16 .*lr: .*dropout_p: "),
        ("axes: {lam: [.inf, 1]}", "1 of 2 .*lam: Input should be a finite number"),
        ("axes: {task: [nope.yaml, toy-cola]}", "1 of 2 .*No such file .*nope.yaml"),
        ("axes: {seed: 0..999999999999}", "more than 100000 combinations"),
        ("axes: {seed: 0..9999, lam: 0..9999}", "more than 100000 combinations"),
        ("blocks: [{name: a}, {name: a}]", "blocks: two have the same name"),
        ("axes: !!python/object/apply:os.system [ls]", "YAML"),
    ],
)
def test_bad_grids_are_refused_with_their_reason(tmp_path, plan_of, text, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        plan_of(text)
    result = invoke("sweep", tmp_path / "g.yaml", "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_dry_run_counts_and_writes_nothing(tmp_path):
    path = tmp_path / "g.yaml"
    path.write_text(f"fixed: {TINY}\naxes: {{regularizer: [none, istar], zeta: [0.2, 0.4]}}")
    result = invoke("sweep", path, "--dry-run", "--out", tmp_path / "out", "--set", "seed=[0,1]")
    assert result.exit_code == 0 and "6 runs: 0 done, 6 to do" in result.output
    assert "2 combinations are equal to others" in result.output
    assert result.output.count("missing toy-cola") == 6 and not (tmp_path / "out").exists()
    assert "-istar-0.1-seed1-" in result.output and result.output.count("  I-STAR λ=-0.1") == 4
    assert invoke("sweep", path, "--dry-run", "--set", "seed").exit_code == 2
    assert invoke("sweep", path, "--dry-run", "--only", "h").exit_code == 2
    assert "use 'base-dropout', " in invoke("sweep", "nothing").output


# ---- the grids of this project


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    "The plans of all shipped grids, expanded where their files are found."
    place = tmp_path_factory.mktemp("project")
    (place / "nbs").symlink_to(ROOT / "nbs")
    for name in ("data", "base-data"):
        (place / name).mkdir()
    with contextlib.chdir(place):
        return {path: expand(load_grid(path)) for path in sorted((ROOT / "nbs/grids").glob("*.yaml"))}


def test_shipped_grids_are_valid_and_count_what_they_say(shipped):
    for path, plan in shipped.items():
        comments = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        count = int(re.search(r"(\d[\d ]*) runs?\b", comments)[1].replace(" ", ""))
        assert count == len(plan.runs) == plan.combinations, path
        assert grid_path(path.stem).samefile(path)


def test_runs_of_the_shipped_grids_keep_their_keys(shipped):
    keys = [run.key for plan in shipped.values() for run in plan.runs]
    assert len(keys) == 26354 and hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16] == "b856c0c028553416"


# ---- choosing settings

METHODS = "[{regularizer: none}, {regularizer: istar, lam: [-0.1, 0.1]}, {regularizer: none, dropout: constant, dropout_p: 0.05}]"  # noqa: E501
SEARCH = f"axes: {{seed: [100, 101], task: [toy-cola, toy-rte], lr: [1e-4, 5e-4], method: {METHODS}}}"


def scored(plan, score):
    return [{"key": r.key, "value": score(r)} for r in plan.runs]


def test_settings_are_chosen_on_the_same_seeds(plan_of):
    "An easy seed of one setting is no merit."
    blocks = "blocks:\n- axes: {seed: [100, 101], lr: [1e-4]}\n- axes: {seed: [101, 102], lr: [5e-4]}\n"
    plan = plan_of(f"fixed: {{regularizer: none}}\n{blocks}")
    with pytest.raises(ValueError, match=r"seed: settings of none .* have seeds \[100, 101\] and \[101, 102\]"):
        choose(plan, scored(plan, lambda r: 0.5))


def test_selection_takes_the_best_mean_of_each_task_and_method(tmp_path, plan_of):
    plan = plan_of(SEARCH)
    score = {r.key: float(v) for r, v in zip(plan.runs, np.random.default_rng(0).random(len(plan.runs)))}
    choices = choose(plan, scored(plan, lambda r: score[r.key]))
    assert len(choices) == 6 and sorted(c.candidates for c in choices) == [2, 2, 2, 2, 4, 4]
    for c in choices:
        means = {}
        for r in plan.runs:
            if (r.config["task"], r.config["regularizer"], r.config["dropout"]) == (c.place["task"], *c.method):
                means.setdefault((r.config["lr"], r.config["lam"]), []).append(score[r.key])
        means = {setting: np.mean(values) for setting, values in means.items()}
        assert c.score == pytest.approx(max(means.values())) == means[c.config["lr"], c.config["lam"]]
        assert c.runner_up == pytest.approx(sorted(means.values())[-2]) and c.seeds == (100, 101)
    (tmp_path / "final.yaml").write_text(final_grid(choices, "0..2"))
    final = expand(load_grid(tmp_path / "final.yaml"))
    assert len(final.runs) == 18 and {r.config["seed"] for r in final.runs} == {0, 1, 2}
    for c in choices:
        assert sum({k: v for k, v in r.config.items() if k != "seed"} == c.config for r in final.runs) == 3


def test_selection_refuses_what_would_flatter(plan_of):
    with pytest.raises(ValueError, match="seed: 3 is for final runs"):
        choose(plan_of(SEARCH, seed=[3, 100]), [])
    with pytest.raises(ValueError, match="grid: only runs of finetune have a score"):
        choose(plan_of("notebook: geometry\naxes: {seed: [100]}"), [])
    plan = plan_of(SEARCH)
    with pytest.raises(ValueError, match="records: 1 of .* finish the search"):
        choose(plan, scored(plan, lambda r: 0.5)[1:])
    with pytest.raises(ValueError, match="records: no setting of toy-cola none standard has a score"):
        choose(plan, scored(plan, lambda r: None))
    choices = choose(plan, scored(plan, lambda r: 0.5))
    assert all(c.settings["lr"] == 1e-4 for c in choices)  # of equal ones the first of the grid
    assert {seed for (seed,) in settings(plan_of(final_grid(choices, "3")), "seed")} == {3}
    with pytest.raises(ValueError, match="seeds: 100 was searched on"):
        final_grid(choices, "99..100")
    with pytest.raises(ValueError, match="seeds: '0,1'; need whole numbers"):
        final_grid(choices, "0,1")


def test_select_writes_the_grid_of_the_final_runs_of_what_was_swept(tmp_path, plan_of):
    swept, search, all_ = plan_of(SEARCH, seed=[102]), tmp_path / "g.yaml", tmp_path / "all.jsonl"
    done = {"status": "done", "metric": "accuracy"}
    records = [done | {"key": r.key, "config": r.config, "value": r.config["lr"]} for r in swept.runs]
    all_.write_text("".join(json.dumps(r) + "\n" for r in records))
    missing = invoke("select", search, all_)
    assert missing.exit_code == 2 and "--set" in missing.output
    lost = tmp_path / "runs" / swept.runs[0].key
    lost.mkdir(parents=True)
    (lost / "failed.json").write_text(json.dumps({"key": swept.runs[0].key, "error": "x", "config": {}}))
    (tmp_path / "rest.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[1:]))
    failed = invoke("select", search, tmp_path / "rest.jsonl", lost.parent, "--set", "seed=102")
    assert failed.exit_code == 2 and "records: 1 of" in failed.output
    final = tmp_path / "final.yaml"
    result = invoke("select", search, all_, "--set", "seed=102", "--out", final, "--seeds", "0..1")
    assert result.exit_code == 0 and "different numbers of settings" in result.output, result.output
    assert set(settings(expand(load_grid(final)), "lr")) == {(5e-4,)}
    assert invoke("select", search, tmp_path / "none.jsonl").exit_code == 2
