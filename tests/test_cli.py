"""The command and the run notebook as a user meets them: processes, exit codes, files."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import papermill
import pytest
import torch
import typer
from safetensors.torch import save_file
from transformers.utils import logging as transformers_log
from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.experiments.config import RunConfig
from isoreg.experiments.grid import Run, load_grid
from isoreg.experiments.record import RunRecord
from isoreg.embeddings import draw_texts, measure_model, read_points, score_points
from isoreg.isoscore import isoscore, participation_ratio
from isoreg.tokens import isoscore_by_sequence_with_error
from isoreg.experiments.notebook import execute
from isoreg.experiments.notebook import KernelDied
from isoreg.experiments.sweep import status
from isoreg.experiments.toy import toy_model_path

ROOT = Path(__file__).parents[1]

invoke = lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])
TINY = {"max_train": 32, "max_eval": 20, "epochs": 1}
OPTIONS = [x for k, v in TINY.items() for x in ("--" + k.replace("_", "-"), str(v))]


def _as_run(config):
    return Run(config.key, "finetune", config.to_dict())


def isoreg(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "isoreg.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


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
    assert record.config == config.to_record() and record.status == "done"
    assert f"{record.value:.4f}" in result.stdout and config.key in result.stdout
    notebook = json.loads((folder / "runs" / config.key / "notebook.ipynb").read_text())
    assert sum("image/png" in o.get("data", {}) for c in notebook["cells"] for o in c.get("outputs", [])) == 3


def test_finished_run_is_not_repeated_and_a_damaged_record_is_with_its_model(done):
    folder, _ = done
    key = RunConfig(**TINY, lam=0.5, seed=3).key
    path, again = folder / "runs" / key / "record.json", ["run", *OPTIONS, "--lam", "0.5", "--seed", "3"]
    before = path.stat().st_mtime_ns
    assert "already done" in isoreg(*again, cwd=folder).stdout
    refused = isoreg(*again, "--save-model", cwd=folder)
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert path.stat().st_mtime_ns == before and not (path.parent / "model").exists()
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert isoreg(*again, "--save-model", cwd=folder).returncode == 0
    assert RunRecord.load(path).value == json.loads(text)["value"]
    saved = {p.name for p in (path.parent / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= saved
    assert isoreg(*again, "--save-model", cwd=folder).returncode == 0


def test_a_run_is_repeated_and_compared(done, tmp_path):
    folder, _ = done
    path = folder / "runs" / RunConfig(**TINY, lam=0.5, seed=3).key / "record.json"
    assert "equal: score and all predictions" in invoke("rerun", path).output
    assert "equal: score and all predictions" in invoke("rerun", path.parent.name, "--records", path.parents[1]).output
    record = json.loads(path.read_text())
    changed = record | {"value": record["value"] + 0.1, "versions": record["versions"] | {"torch": "1.0"}}
    (tmp_path / "record.json").write_text(json.dumps(changed))
    result = invoke("rerun", tmp_path)
    assert result.exit_code == 1 and "not equal: 0 predictions differ" in result.output
    assert re.search(r"torch +│ 1.0 ", result.output), "the version that differs is shown"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "--task", "colla"], ["task", "colla"]),
        (["run", "--batch-size", 0], ["batch_size"]),
        (["run", "--lam", "nan"], ["lam"]),
        (["run", "--layers=--1"], ["layers"]),
        (["run", "--lamm", 1], ["--lamm"]),
        (["run", "--set", "lam"], ["set", "lam"]),
        (["run", "--set", "=3"], ["set", "'=3'"]),
        (["run", "--set", "lr={a"], ["set", "lr={a"]),
        (["run", "--set", "self=3"], ["self", "unknown setting"]),
        (["run", "--regularizer", ".a:b"], ["regularizer", ".a:b"]),
        (["run", "--regularizer", "os:path"], ["regularizer", "os:path"]),
        (["rerun", __file__], ["no record", "test_cli.py"]),
        (["rerun", "nothing", "--records", "nowhere"], ["record", "nothing", "nowhere"]),
        (["select", "toy", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["run", "--seed", "x"], ["--seed"]),
        (["score", "nowhere.npy"], ["nowhere.npy"]),
        (["score", __file__, "--model", "toy-bert", "--max-lines", 0], ["--max-lines"]),
        (["score", __file__, "--model", "toy-bert", "--seed", -1], ["--seed"]),
    ],
)
def test_bad_input_exits_with_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


def test_names_are_printed_as_they_are(tmp_path, monkeypatch):
    "Not as the styles and faces that rich would read in them."
    name = "[bold]a :smile:"
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert name in invoke("status", name).stdout and name in invoke("score", name).stderr


def cell(name, value=""):
    return papermill.PapermillExecutionError(1, 1, "", name, value, [])


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ValueError("lam: no"), 2, "error: lam: no"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (cell("ValueError", "task: no"), 2, "error: task: no\nnotebook: "),
        (cell("KeyboardInterrupt"), 130, "error: stopped; the same command does the rest"),
        (KeyboardInterrupt(), 130, "error: stopped; the same command does the rest"),
    ],
)
def test_what_a_user_can_mend_ends_a_command_with_one_line(tmp_path, monkeypatch, error, code, words):
    def ends(*a):
        raise error

    monkeypatch.setattr("isoreg.experiments.notebook.execute", ends)
    result = invoke("run", "--out", tmp_path)
    assert result.exit_code == code and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [cell("OverflowError", "negative"), KernelDied(-9), TypeError("a mistake")])
def test_anything_else_shows_its_traceback(tmp_path, monkeypatch, error):
    def ends(*a):
        raise error

    monkeypatch.setattr("isoreg.experiments.notebook.execute", ends)
    assert invoke("run", "--out", tmp_path).exception is error


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
    options = {o for p in typer.main.get_command(app).commands["run"].params for o in p.opts}
    assert {f"--{n.replace('_', '-')}" for n in RunConfig.model_fields if n != "definition"} < options


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_no_record_and_is_done_again(tmp_path, sent):
    command = [sys.executable, "-m", "isoreg.cli", "run", "--epochs", "50", "--out", str(tmp_path)]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # where tests run in the background it is ignored
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while process.poll() is None and not any("training" in p.read_text() for p in tmp_path.glob("*/progress.json")):
        time.sleep(0.05)
    process.send_signal(signal.Signals[sent])
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert err.splitlines()[-1] == "error: stopped; the same command does the rest"
    assert not list(tmp_path.rglob("record.json")) and not status(tmp_path)["running"]


@pytest.mark.parametrize("wrong", [{"lamm": 3}, {"lam": "x"}, {"task": "colla"}])
def test_notebook_refuses_wrong_parameters_before_it_works(wrong, tmp_path):
    start = time.monotonic()
    with pytest.raises(papermill.PapermillExecutionError) as error:
        execute("finetune", tmp_path / "out.ipynb", {**wrong, "out": str(tmp_path / "runs")})
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
    for arguments in (
        ["x.npy"],
        ["x.npz", "--array", "first"],
        ["x.safetensors"],
        ["wide.parquet"],
        ["with_id.parquet"],
        ["list.parquet", "--array", "embedding"],
    ):
        result = invoke("score", tmp_path / arguments[0], *arguments[1:], "--json")
        assert result.exit_code == 0, result.stderr
        values = json.loads(result.stdout)
        assert (
            values["isoscore"] == pytest.approx(exact, rel=1e-9)
            and values["points"] == 80
            and values["standard_error"] > 0
        )
        if arguments[0].startswith("w"):
            assert "12 columns are read as dimensions, c0 to c11; 1 others are left out" in result.stderr
    assert invoke("score", tmp_path / "x.npz").exit_code == 2  # two arrays: which?
    np.save(tmp_path / "holes.npy", np.where(x > 4, np.nan, x))
    result = invoke("score", tmp_path / "x.npy", tmp_path / "holes.npy")
    assert result.exit_code == 2 and "points: hold NaN" in result.stderr and "holes.npy" in result.stderr
    for name, content in {
        "broken.npz": b"PK",
        "broken.safetensors": b"xx",
        "broken.parquet": b"PAR1",
        "empty.npy": b"",
        "list.txt": b"1 2",
    }.items():
        (tmp_path / name).write_bytes(content)
        result = invoke("score", tmp_path / name)
        assert result.exit_code == 2 and name.split(".")[-1] in result.stderr
    np.save(tmp_path / "constant.npy", np.ones((8, 1)) * np.random.default_rng(0).normal(size=(1, 6)))
    assert "zero variance" in invoke("score", tmp_path / "constant.npy").stderr
    assert "IsoScore" in invoke("score", tmp_path / "x.npy").stdout


def test_any_byte_order_and_width_is_read(tmp_path):
    x = np.random.default_rng(0).integers(-100, 100, size=(40, 6))
    exact = float(isoscore(x.astype(float)))
    for kind in (">f8", ">f4", "<f2", ">i4", "i8", "u1", np.longdouble):
        values = np.abs(x) if np.dtype(kind).kind == "u" else x
        np.save(tmp_path / "x.npy", values.astype(kind))
        np.savez(tmp_path / "x.npz", x=values.astype(kind))
        want = float(isoscore(values.astype(float)))
        for name in ("x.npy", "x.npz"):
            assert score_points(read_points(tmp_path / name))["isoscore"] == pytest.approx(want, rel=1e-6)
    save_file({"x": torch.tensor(x)}, tmp_path / "x.safetensors")
    assert score_points(read_points(tmp_path / "x.safetensors"))["isoscore"] == pytest.approx(exact)


def _refused(tmp_path, name, words, *arguments):
    result = invoke("score", tmp_path / name, *arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


def test_vectors_beside_lists_of_words(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 6))
    pd.DataFrame({"tags": [["a"]] * 30, "v": list(x), "text": ["b"] * 30}).to_parquet(tmp_path / "x.parquet")
    assert torch.equal(read_points(tmp_path / "x.parquet"), torch.tensor(x))


def test_lines_are_drawn_evenly(tmp_path):
    (tmp_path / "t.txt").write_text("\n\n".join(map(str, range(10))))
    drawn = [draw_texts(tmp_path / "t.txt", 4, seed) for seed in range(1000)]
    assert drawn[7] == draw_texts(tmp_path / "t.txt", 4, 7) != drawn[8]
    assert all(len(set(d)) == 4 and n == 10 for d, n in drawn)
    times = np.bincount([int(line) for d, _ in drawn for line in d])
    assert len(times) == 10 and abs(times - 400).max() < 5 * (1000 * 0.4 * 0.6) ** 0.5


def test_dimensions_in_use_are_those_of_the_corrected_score():
    x = np.random.default_rng(1).normal(size=(40, 60)) * np.linspace(0.1, 3, 60)
    s = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    assert participation_ratio(np.cov(x.T)) == pytest.approx(s.sum() ** 2 / (s**2).sum())
    found = score_points(torch.tensor(x))  # in even use: by the corrected score, not the plain one
    assert found["dimensions_in_use"] == pytest.approx(1 + 59 * found["corrected"])
    assert found["corrected"] > found["isoscore"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [60, 500])
def test_spectrum_of_half_precision_is_that_of_its_values(tmp_path, n, dtype):
    "Far from the origin, where a mean in half precision is off, and with differences beyond the largest float16."
    x = torch.randn(n, 200, generator=torch.Generator().manual_seed(0)) + 200
    far = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.1, -6e4, 6e4)
    for points in (x.to(dtype), far.to(dtype)):
        save_file({"x": points}, tmp_path / "x.safetensors")
        result = invoke("score", tmp_path / "x.safetensors", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["spectrum"] == score_points(points.double())["spectrum"]


def test_score_of_a_model_on_text(tmp_path):
    from isoreg.experiments.toy import toy_corpus

    (tmp_path / "text.txt").write_text("\n".join(toy_corpus(60)))
    verbosity = transformers_log.get_verbosity()
    result = invoke("score", tmp_path / "text.txt", "--model", "toy-bert", "--json")
    rows = json.loads(result.stdout)
    assert result.stderr == "" and transformers_log.get_verbosity() == verbosity
    assert (
        result.exit_code == 0
        and len(rows) > 2
        and all(0 < r["isoscore"] < 1 and r["standard_error"] > 0 and sum(r["spectrum"]["share"]) < 1 for r in rows)
    )
    (tmp_path / "empty.txt").write_text("\n")
    assert invoke("score", tmp_path / "empty.txt", "--model", "toy-bert").exit_code == 2


def test_score_of_an_encoder_decoder_model_is_its_encoders(tmp_path):
    from transformers import T5Config, T5EncoderModel, T5Model
    from isoreg.experiments.toy import toy_corpus, toy_tokenizer

    torch.manual_seed(0)
    tokenizer, lines = toy_tokenizer(), toy_corpus(12)
    T5Model(
        T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "t.txt").write_text("\n".join(lines))
    result = invoke("score", tmp_path / "t.txt", "--model", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = T5EncoderModel.from_pretrained(tmp_path).eval()(**batch, output_hidden_states=True).hidden_states
    assert [r["isoscore"] for r in json.loads(result.stdout)] == pytest.approx(
        [float(isoscore(h[batch["attention_mask"].bool()])) for h in states], abs=1e-6
    )


@pytest.mark.parametrize("says", [True, False])
def test_score_of_an_encoder_without_its_decoder(tmp_path, texts, says):
    "A saved encoder, as of sentence-T5; older ones say that they are encoder and decoder."
    from transformers import T5Config, T5EncoderModel
    from isoreg.experiments.toy import toy_tokenizer

    torch.manual_seed(0)
    tokenizer, lines = toy_tokenizer(), texts[:8]
    encoder = T5EncoderModel(
        T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    ).eval()
    encoder.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = encoder(**batch, output_hidden_states=True).hidden_states
    assert [r["isoscore"] for r in measure_model(str(tmp_path), lines).rows] == pytest.approx(
        [float(isoscore(h[batch["attention_mask"].bool()])) for h in states], abs=1e-6
    )


@pytest.fixture(scope="module")
def texts():
    from isoreg.experiments.toy import toy_corpus

    return toy_corpus(90)


@pytest.mark.parametrize("count", [6, 25, 90])
def test_streamed_scores_of_a_model_equal_those_of_all_states(texts, count):
    from transformers import AutoModel
    from isoreg.experiments.toy import toy_tokenizer

    batch = toy_tokenizer()(texts[:count], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(toy_model_path()).eval()(**batch, output_hidden_states=True).hidden_states
    mask, rows = batch["attention_mask"], measure_model("toy-bert", texts[:count]).rows
    assert [r["layer"] for r in rows] == list(range(len(states)))
    for row, h in zip(rows, states):
        whole, exact = isoscore_by_sequence_with_error(h, mask), score_points(h[mask.bool()])["spectrum"]
        assert row["isoscore"] == pytest.approx(float(isoscore(h.flatten(0, 1), mask.flatten())), abs=1e-6)
        assert (row["corrected"], row["standard_error"]) == pytest.approx((whole.score, whole.stderr), abs=1e-6)
        assert (row["tokens"], row["sequences"]) == (int(mask.sum()), count) and row["spectrum"]["axes_for"] == exact[
            "axes_for"
        ]
        assert row["spectrum"]["share"] == pytest.approx(exact["share"], abs=1e-6)


@pytest.mark.parametrize("key", [len, str])
def test_score_of_a_sorted_file_is_that_of_a_draw_from_it(tmp_path, key):
    "By length, and by the first words: the first lines are unlike the rest."
    from isoreg.experiments.toy import toy_corpus

    (tmp_path / "t.txt").write_text("\n".join(sorted(toy_corpus(1200, seed=3), key=key)))
    draws = [draw_texts(tmp_path / "t.txt", *draw) for draw in ((1200, 0), (200, 0), (200, 1))]
    assert [(len(texts), total) for texts, total in draws] == [(1200, 1200), (200, 1200), (200, 1200)]
    for a, b, c in zip(*(measure_model("toy-bert", texts).rows for texts, _ in draws)):
        assert abs(b["corrected"] - a["corrected"]) < 3 * b["standard_error"] and b["corrected"] != c["corrected"]
        assert 1 < b["standard_error"] / a["standard_error"] < 5  # a sixth of the texts: about 2.4


def test_the_texts_that_were_drawn_are_told(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(f"the cat {i}" for i in range(60)))
    score = lambda *options: invoke("score", tmp_path / "t.txt", "--model", "toy-bert", "--max-lines", *options)
    rows = [json.loads(score(*options, "--json").stdout)[0] for options in ([60], [20], [20, "--seed", 1])]
    told = [(r["texts"], r["sequences"], r["seed"]) for r in rows]
    assert told == [(60, 60, None), (60, 20, 0), (60, 20, 1)]
    assert "20 of 60 texts, drawn with seed 1" in score(20, "--seed", 1).stdout
    assert "of 60 texts\n" in score(2000).stdout


def test_error_of_a_model_does_not_depend_on_the_order_of_the_texts():
    from isoreg.experiments.toy import toy_corpus

    lines = toy_corpus(600, seed=3)
    orders = [sorted(lines, key=key) for key in (len, str, lines.index)]
    errors = [[r["standard_error"] for r in measure_model("toy-bert", order).rows] for order in orders]
    assert (np.max(errors, 0) < 2 * np.min(errors, 0)).all()


def test_states_of_one_batch_are_held_at_most(texts, monkeypatch):
    from transformers import BertModel

    forward, states, held = BertModel.forward, [], []

    def spy(self, *args, **kwargs):
        held.append(sum(r() is not None for r in states))
        out = forward(self, *args, **kwargs)
        states.extend(weakref.ref(h) for h in out.hidden_states)
        return out

    monkeypatch.setattr(BertModel, "forward", spy)
    layers = len(measure_model("toy-bert", texts).rows)
    assert len(held) == 40 and len(states) == 40 * layers and max(held) <= layers  # 20 groups, seen twice


def test_tasks_and_version():
    import isoreg as package

    result = invoke("tasks", "--json")
    assert result.exit_code == 0 and {"cola", "squad", "toy-rte"} <= {r["task"] for r in json.loads(result.stdout)}
    assert "toy-cola" in invoke("tasks").stdout
    assert invoke("--version").stdout.strip() == package.__version__


def test_help_does_not_import_torch():
    script = "import sys; from typer.testing import CliRunner; from isoreg.cli import app; assert CliRunner().invoke(app, ['--help']).exit_code == 0; print([m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules])"  # noqa: E501
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )


def test_report_of_stored_records(tmp_path):
    results = Path(__file__).parents[1] / "nbs" / "results"
    done = CliRunner().invoke(app, ["report", str(results / "istar_first.jsonl"), "--out", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    made = {p.name for p in (tmp_path / "report").iterdir()}
    assert {"summary.md", "comparisons.md", "tradeoff.png", "forest.png"} <= made
    assert "I-STAR λ=-1" in (tmp_path / "report" / "summary.md").read_text()
    assert {"task", "method", "metric", "λ=-1"} <= set(done.stdout.replace(",", " ").split())  # the summary
    for wrong, words in (
        (["report", str(tmp_path / "nothing")], "is no file"),
        (["report", str(tmp_path)], "no record"),
        (["report", str(results / "istar_first.jsonl"), "--baseline", "Base"], "did you mean 'base'"),
    ):
        failed = CliRunner().invoke(app, [*wrong, "--out", str(tmp_path / "other")])
        assert failed.exit_code == 2 and words in failed.output and not (tmp_path / "other").exists()


def test_report_of_two_models_whose_folders_have_one_name(tmp_path):
    stored = (Path(__file__).parents[1] / "nbs" / "results" / "istar_first.jsonl").read_text().splitlines()
    other = [json.loads(r) for r in stored]
    other = [r | {"key": r["key"] + "-b", "config": r["config"] | {"model": "b/minilm-l6-h384"}} for r in other]
    (tmp_path / "r.jsonl").write_text("\n".join([*stored, *map(json.dumps, other)]))
    command = ["report", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "report")]
    told, apart = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--by", "model"]))
    words = "differ in model: add that to by"
    assert words in " ".join(told.output.split()) and words not in " ".join(apart.output.split())
    assert apart.exit_code == 0


def test_demo_compares_two_runs_and_draws_them(tmp_path, monkeypatch):
    "Of fewer rows than usual; the README's command does it whole."
    small = lambda block: dataclasses.replace(block, fixed=block.fixed | {"max_train": 320, "max_eval": 50})
    demo = load_grid("demo")
    demo = dataclasses.replace(demo, blocks=tuple(map(small, demo.blocks)))
    monkeypatch.setattr("isoreg.experiments.grid.load_grid", lambda name: demo)
    result = invoke("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    loaded = [json.loads(p.read_text()) for p in tmp_path.glob("*/record.json")]
    assert {r["config"]["regularizer"] for r in loaded} == {"none", "istar"} and (
        tmp_path / "demo.png"
    ).stat().st_size > 5000
    for r in loaded:
        assert f"{r['value']:.4f}" in result.output and f"{r['isoscore']['after']['union']:.4f}" in result.output
    after = {r["config"]["regularizer"]: r["isoscore"]["after"]["union"] for r in loaded}
    assert after["istar"] < after["none"]  # a negative strength lowers isotropy
    assert "isoreg score" in result.output.split("demo.png")[1]  # what to do next
