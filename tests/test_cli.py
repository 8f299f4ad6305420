"""The command and the run notebook as a user meets them: processes, exit codes, files."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import papermill
import pytest
import typer
from command import invoke

from isoreg.cli import app
from isoreg.experiments.config import RunConfig
from isoreg.experiments.finetune import run
from isoreg.experiments.grid import load_grid
from isoreg.experiments.record import RunRecord
from isoreg.experiments.notebook import KernelDied, execute
from isoreg.experiments.sweep import status
from isoreg.files import write_atomically

ROOT = Path(__file__).parents[1]

TINY = {"max_train": 32, "max_eval": 20, "epochs": 1}
OPTIONS = [x for k, v in TINY.items() for x in ("--" + k.replace("_", "-"), str(v))]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs {seed}")  # a name that papermill would fill in
    command = [sys.executable, "-m", "isoreg.cli", "run", *OPTIONS, "--lam", "0.5", "--seed", "3"]
    return folder, subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_run_writes_record_and_notebook(done):
    folder, result = done
    assert result.returncode == 0, result.stderr
    config = RunConfig(**TINY, lam=0.5, seed=3)
    assert sorted(p.name for p in (folder / "runs" / config.key).iterdir()) == ["notebook.ipynb", "record.json"]
    record = RunRecord.load(folder / "runs" / config.key)
    assert record.config == config.to_record() and record.status == "done"
    assert f"{record.value:.4f}" in result.stdout and config.key in result.stdout
    notebook = json.loads((folder / "runs" / config.key / "notebook.ipynb").read_text())
    assert sum("image/png" in o.get("data", {}) for c in notebook["cells"] for o in c.get("outputs", [])) == 3


def test_finished_run_is_not_repeated_and_a_damaged_record_is_with_its_model(done, monkeypatch):
    folder, _ = done
    key = RunConfig(**TINY, lam=0.5, seed=3).key
    path, again = folder / "runs" / key / "record.json", ["run", *OPTIONS, "--lam", "0.5", "--seed", "3"]
    before, text = path.stat().st_mtime_ns, path.read_text()
    monkeypatch.chdir(folder)
    assert "already done" in invoke(*again).stdout and path.stat().st_mtime_ns == before
    path.write_text(text[: len(text) // 2])
    assert invoke(*again, "--save-model").exit_code == 0
    assert RunRecord.load(path).value == json.loads(text)["value"]
    saved = {p.name for p in (path.parent / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= saved
    assert "already done" in invoke(*again, "--save-model").stdout
    assert invoke(*again, "--force").exit_code == 0 and saved == {p.name for p in (path.parent / "model").iterdir()}


def test_a_run_is_repeated_and_compared(done, tmp_path):
    folder, _ = done
    path = folder / "runs" / RunConfig(**TINY, lam=0.5, seed=3).key / "record.json"
    assert "equal: score and all predictions" in invoke("rerun", path).output
    record = json.loads(path.read_text())
    changed = record | {"value": record["value"] + 0.1, "versions": record["versions"] | {"torch": "1.0"}}
    (tmp_path / "r.jsonl").write_text(json.dumps(changed))
    result = invoke("rerun", record["key"], "--records", tmp_path, "--set", "model=toy-bert")
    assert result.exit_code == 1 and "not equal: 0 predictions differ" in result.output
    assert re.search(r"torch +│ 1.0 ", result.output), "the version that differs is shown"
    result = invoke("rerun", path, "--set", "seed=4")
    assert result.exit_code == 2 and "where: 'seed' is unknown" in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "--task", "colla"], ["task", "colla"]),
        (["run", "--batch-size", 0], ["batch_size"]),
        (["run", "--layers=--1"], ["layers"]),
        (["run", "--set", "lr={a"], ["set", "lr={a"]),
        (["run", "--set", "self=3"], ["self", "unknown setting"]),
        (["run", "--regularizer", ".a:b"], ["regularizer", ".a:b"]),
        (["run", "--regularizer", "os:nothing"], ["regularizer", "os:nothing"]),
        (["rerun", __file__], ["no record", "test_cli.py"]),
        (["rerun", "nothing", "--records", "nowhere"], ["record", "nothing", "--records"]),
    ],
)
def test_bad_input_exits_with_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


def cell(name, value=""):
    return papermill.PapermillExecutionError(1, 1, "", name, value, [])


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ValueError("lam: no"), 2, "error: lam: no"),
        (cell("OverflowError", "negative"), 1, ""),  # anything else shows its traceback
        (KernelDied(-9), 1, ""),
        (TypeError("a mistake"), 1, ""),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (cell("ValueError", "task: no"), 2, "error: task: no\nnotebook: "),
        (cell("MissingSplit", "no split"), 2, "error: no split\nnotebook: "),
        (cell("OutOfMemoryError", "CUDA out of memory"), 2, "error: CUDA out of memory"),
        (cell("KeyboardInterrupt"), 130, "error: stopped; the same command does the rest"),
        (KeyboardInterrupt(), 130, "error: stopped; the same command does the rest"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_a_mistake_of_isoreg_an_exception(
    tmp_path, monkeypatch, error, code, words
):
    def ends(notebook, output, parameters):
        write_atomically(output, "half")
        raise error

    monkeypatch.setattr("isoreg.cli.execute", ends)
    write_atomically(earlier := tmp_path / RunConfig().key / "notebook.ipynb", "whole")
    result = invoke("run", "--force", "--out", tmp_path)
    assert earlier.read_text() == "whole"
    assert "notebook: " not in words or earlier.with_name("failed.ipynb").read_text() == "half"
    assert result.exit_code == code and words in result.stderr and "Traceback" not in result.stderr
    assert (result.exception is error) == (code == 1)


def test_a_run_takes_every_setting_by_its_option_or_as_a_grid_has_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("isoreg.cli._execute", lambda run, *a: seen.append(run.config) or run.config[None])
    given = {"task": "toy-rte", "seed": 2, "lam": 0.5, "layers": 3, "correction": "ustat", "padding": True, "lr": 1e-4}
    given |= {"batch_size": 8, "max_train": 64, "train_fraction": 0.5, "precision": "bf16", "batches": "by-length"}
    flags = [w for n, v in given.items() for w in (f"--{n.replace('_', '-')}", v)[: 2 - (v is True)]]
    pairs = [w for n, v in given.items() for w in ("--set", f"{n}={v}")]
    for words in (flags, pairs):
        invoke("run", *words, "--out", tmp_path)
    assert seen == 2 * [RunConfig(**given).to_dict()]
    shown = invoke("run", "--help").stdout
    assert all(f"--{n.replace('_', '-')}" in shown for n in RunConfig.model_fields if n != "definition")


def test_an_interrupted_run_leaves_no_record(tmp_path):
    command = [sys.executable, "-m", "isoreg.cli", "run", "--epochs", "50", "--out", str(tmp_path)]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # where tests run in the background it is ignored
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while process.poll() is None and not any("training" in p.read_text() for p in tmp_path.rglob("progress.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert err.splitlines()[-1] == "error: stopped; the same command does the rest"
    assert not list(tmp_path.rglob("record.json")) and not status(tmp_path)["running"]


def test_the_notebook_refuses_a_wrong_parameter_before_it_works(tmp_path):
    with pytest.raises(papermill.PapermillExecutionError) as error:
        execute("finetune", tmp_path / "out.ipynb", {"lamm": 3, "out": str(tmp_path / "runs")})
    assert error.value.ename == "ValueError" and "lamm" in error.value.evalue and not (tmp_path / "runs").exists()


def test_tasks_and_version():
    import isoreg as package

    shown = invoke("tasks").stdout
    assert all(name in shown for name in ("cola", "squad", "toy-rte"))
    assert invoke("--version").stdout.strip() == package.__version__


def test_names_and_heavy_packages_are_imported_when_they_are_used():
    code = """
import sys
lacks = lambda names: not set(names.split()) & set(sys.modules)
import isoreg, isoreg.checks
names = "IStar CosReg PenaltyTrainer isoscore IsoScore empirical_fisher apply_dropout".split()
assert set(names) <= set(dir(isoreg))
assert lacks("torch numpy pandas")
from typer.testing import CliRunner
from isoreg.cli import app
CliRunner().invoke(app, ["--help"])
assert lacks("torch transformers pandas datasets")
import isoreg.experiments.config
isoreg.experiments.config.RunConfig().key
assert lacks("torch")
import isoreg.report.records
isoreg.report.records.label({})
assert lacks("torch transformers matplotlib datasets")
from isoreg import isoscore
import isoreg.isoscore as module, torch
x = torch.randn(50, 4)
assert isoscore(x) == module.isoscore(x) == isoreg.isoscore.isoscore(x)
assert (isoreg.PenaltyTrainer.__module__, isoreg.IsoScore.__module__) == ("isoreg.trainer", "isoreg.metric")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_baseline_of_a_report_is_refused(tmp_path):
    typo = invoke("report", ROOT / "nbs/results/istar_first.jsonl", "--out", tmp_path / "r", "--baseline", "baselines")
    assert typo.exit_code == 2 and "did you mean 'baseline'" in typo.output and not (tmp_path / "r").exists()


def swept_here(plan, out, *_, **__):
    "Do the runs of a plan in this process."
    for each in plan.runs:
        run(RunConfig(**each.config)).save(out / each.key)
    return SimpleNamespace(code=0)


def test_demo_compares_two_runs_and_draws_them(tmp_path, monkeypatch):
    "Of fewer rows than usual; the README's command does it whole."
    small = lambda block: block.model_copy(update={"fixed": block.fixed | {"max_train": 320, "max_eval": 50}})
    demo = load_grid("demo")
    demo = demo.model_copy(update={"blocks": tuple(map(small, demo.blocks))})
    monkeypatch.setattr("isoreg.cli.load_grid", lambda name: demo)
    monkeypatch.setattr("isoreg.cli._sweep", swept_here)
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    loaded = [json.loads(p.read_text()) for p in tmp_path.glob("*/record.json")]
    assert (tmp_path / "demo.png").stat().st_size > 5000 and len(loaded) == 2
    for r in loaded:
        assert f"{r['value']:.4f}" in result.output and f"{r['isoscore']['after']['union']:.4f}" in result.output
    after = {r["config"]["regularizer"]: r["isoscore"]["after"]["union"] for r in loaded}
    assert after["istar"] < after["none"]  # a negative strength lowers isotropy
    assert "isoreg score" in result.output.split("demo.png")[1]  # what to do next


@pytest.mark.parametrize("command", ["", *typer.main.get_command(app).commands])
def test_help_shows_flags_as_flags(command):
    shown = invoke(*command.split(), "--help").stdout
    assert "--help" in shown and "<bool>" not in shown
