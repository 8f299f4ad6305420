"""The command and the run notebook as a user meets them: processes, exit codes, files."""
import dataclasses
import inspect
import json
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import papermill
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from isoreg.cli import app, run_command, score_points, spectrum
from isoreg.finetune import RunConfig, RunRecord
from isoreg.isoscore import isoscore
from isoreg.notebook import execute, run_notebook_path

invoke = lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])
TINY = {"max_train": 32, "max_eval": 20, "epochs": 1}
OPTIONS = [x for k, v in TINY.items() for x in ("--" + k.replace("_", "-"), str(v))]


def isoreg(*arguments, cwd=None): return subprocess.run([sys.executable, "-m", "isoreg.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, isoreg("run", *OPTIONS, "--lam", "0.5", "--seed", "3", cwd=folder)


def test_run_writes_record_and_notebook(done):
    folder, result = done
    assert result.returncode == 0, result.stderr
    config = RunConfig(**TINY, lam=0.5, seed=3)
    assert sorted(p.name for p in (folder / "runs" / config.key).iterdir()) == ["notebook.ipynb", "record.json"]
    record = RunRecord.load(folder / "runs" / config.key)
    assert record.config == config.to_dict() and record.status == "done"
    assert f"{record.value:.4f}" in result.stdout and config.key in result.stdout
    notebook = json.loads((folder / "runs" / config.key / "notebook.ipynb").read_text())
    assert sum("image/png" in o.get("data", {}) for c in notebook["cells"] for o in c.get("outputs", [])) == 2


def test_finished_run_is_not_repeated_and_a_damaged_record_is(done):
    folder, _ = done
    key = RunConfig(**TINY, lam=0.5, seed=3).key
    path = folder / "runs" / key / "record.json"
    before = path.stat().st_mtime_ns
    assert "already done" in isoreg("run", *OPTIONS, "--lam", "0.5", "--seed", "3", cwd=folder).stdout
    assert path.stat().st_mtime_ns == before
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert isoreg("run", *OPTIONS, "--lam", "0.5", "--seed", "3", cwd=folder).returncode == 0
    assert RunRecord.load(path).value == json.loads(text)["value"]


@pytest.mark.parametrize("arguments, words", [
    (["run", "--task", "colla"], ["task", "colla"]),
    (["run", "--batch-size", 0], ["batch_size"]),
    (["run", "--lam", "nan"], ["lam"]),
    (["run", "--data-dir", "nowhere"], ["data_dir", "nowhere"]),
    (["run", "--layers=--1"], ["layers"]),
    (["run", "--out", __file__ + "/below"], ["out", "written"]),
    (["run", "--lamm", 1], ["--lamm"]),
    (["run", "--seed", "x"], ["--seed"]),
    (["score", "nowhere.npy"], ["nowhere.npy"]),
    (["tasks", "--data-dir", "nowhere"], ["nowhere"]),
])
def test_bad_input_exits_with_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in words: assert word in result.stderr


def test_missing_model_exits_with_2_and_a_failing_run_with_1(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    result = invoke("run", "--model", tmp_path / "model", "--out", tmp_path / "runs")
    assert result.exit_code == 2 and "notebook.ipynb" in result.stderr
    import isoreg.cli as cli
    monkeypatch.setattr(cli, "_trained", lambda path: True)
    assert invoke("run", "--model", tmp_path / "model", "--out", tmp_path / "runs").exit_code == 1


def test_options_parameters_and_configuration_have_the_same_names():
    fields = {f.name for f in dataclasses.fields(RunConfig)}
    assert set(inspect.signature(run_command).parameters) == fields | {"out", "force"}
    parameters = papermill.inspect_notebook(str(run_notebook_path("finetune")))
    assert set(parameters) == fields | {"out"}
    assert RunConfig(**{k: None if v["default"] in ("None", '""') else json.loads(v["default"]) for k, v in parameters.items() if k != "out"}) == RunConfig()


@pytest.mark.parametrize("wrong", [{"lamm": 3}, {"lam": "x"}, {"task": "colla"}])
def test_notebook_refuses_wrong_parameters_before_it_works(wrong, tmp_path):
    start = time.monotonic()
    with pytest.raises(papermill.PapermillExecutionError) as error: execute("finetune", tmp_path / "out.ipynb", {**wrong, "out": str(tmp_path / "runs")})
    assert error.value.ename == "ValueError" and next(iter(wrong)) in error.value.evalue
    assert not (tmp_path / "runs").exists() and time.monotonic() - start < 120


def test_score_of_files(tmp_path):
    x = np.random.default_rng(0).normal(size=(80, 12)) * np.linspace(0.2, 2, 12)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", first=x, second=x[:, :5])
    save_file({"x": torch.tensor(x)}, tmp_path / "x.safetensors")
    pd.DataFrame(x, columns=[f"c{i}" for i in range(12)]).assign(name="text").to_parquet(tmp_path / "wide.parquet")
    pd.DataFrame({"embedding": list(x), "id": range(80)}).to_parquet(tmp_path / "list.parquet")
    pd.DataFrame(x, columns=[f"c{i}" for i in range(12)]).assign(id=range(80)).to_parquet(tmp_path / "with_id.parquet")
    exact = float(isoscore(x))
    for arguments in (["x.npy"], ["x.npz", "--array", "first"], ["x.safetensors"], ["wide.parquet"], ["with_id.parquet"], ["list.parquet", "--array", "embedding"]):
        result = invoke("score", tmp_path / arguments[0], *arguments[1:], "--json")
        assert result.exit_code == 0, result.stderr
        values = json.loads(result.stdout)
        assert values["isoscore"] == pytest.approx(exact, rel=1e-9) and values["points"] == 80 and values["standard_error"] > 0
    assert invoke("score", tmp_path / "x.npz").exit_code == 2  # two arrays: which?
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object))
    assert invoke("score", tmp_path / "objects.npy").exit_code == 2  # a pickle is not opened
    for name, content in {"broken.npz": b"PK", "broken.safetensors": b"xx", "broken.parquet": b"PAR1", "empty.npy": b"", "list.txt": b"1 2"}.items():
        (tmp_path / name).write_bytes(content)
        result = invoke("score", tmp_path / name)
        assert result.exit_code == 2 and name.split(".")[-1] in result.stderr
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    assert invoke("score", tmp_path / "words.npy").exit_code == 2
    np.save(tmp_path / "constant.npy", np.ones((8, 1)) * np.random.default_rng(0).normal(size=(1, 6)))
    assert "zero variance" in invoke("score", tmp_path / "constant.npy").stderr
    assert "IsoScore" in invoke("score", tmp_path / "x.npy").stdout


def test_spectrum_against_the_singular_values():
    x = np.random.default_rng(1).normal(size=(40, 60)) * np.linspace(0.1, 3, 60)
    s = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    share = s / s.sum()
    assert spectrum(x)["share"] == pytest.approx(share[:10].tolist())
    assert spectrum(x)["axes_for"]["90%"] == int((share.cumsum() < 0.9).sum()) + 1
    assert score_points(torch.tensor(x))["effective_dims"] == pytest.approx(s.sum() ** 2 / (s**2).sum())


def test_score_of_a_model_on_text(tmp_path):
    from isoreg.toy import toy_corpus
    (tmp_path / "text.txt").write_text("\n".join(toy_corpus(60)))
    result = invoke("score", tmp_path / "text.txt", "--model", "toy-bert", "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0 and len(rows) > 2 and all(0 < r["isoscore"] < 1 and r["standard_error"] > 0 and sum(r["spectrum"]["share"]) < 1 for r in rows)
    (tmp_path / "empty.txt").write_text("\n")
    assert invoke("score", tmp_path / "empty.txt", "--model", "toy-bert").exit_code == 2


def test_tasks_and_version():
    import isoreg as package
    result = invoke("tasks", "--json")
    assert result.exit_code == 0 and {"cola", "squad", "toy-rte"} <= {r["task"] for r in json.loads(result.stdout)}
    assert "toy-cola" in invoke("tasks").stdout
    assert invoke("--version").stdout.strip() == package.__version__


def test_help_does_not_import_torch():
    script = "import sys; from typer.testing import CliRunner; from isoreg.cli import app; assert CliRunner().invoke(app, ['--help']).exit_code == 0; print([m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "[]"
