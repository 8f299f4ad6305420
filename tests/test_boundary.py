"""Whatever is given to a command, it ends in a line and an exit code, and touches nothing but its folder."""

import base64
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, CanineConfig, CanineModel, ViTConfig, ViTModel
from typer.testing import CliRunner

import isoreg
import isoreg.experiments.finetune
import isoreg.experiments.grid
import isoreg.experiments.notebook
from isoreg.cli import _ending, _hint, app
from isoreg.experiments.config import RunConfig, parse_set
from isoreg.files import (
    LARGEST,
    from_json,
    from_yaml,
    load_rows,
    own_folder,
    record_files,
    remove_abandoned,
    remove_abandoned_folders,
    unpack,
    write_atomically,
)
from isoreg.fisher import empirical_fisher
from isoreg.experiments.grid import expand, grid_path, load_grid
from isoreg.isoscore import isoscore, isoscore_from_cov
from isoreg.istar import CosReg, IStar, measure_isotropy
from isoreg.experiments.models import load_tokenizer, read_body, read_config
from isoreg.report.records import load, summarise, to_markdown, write_report
from isoreg.dropout import site_scores
from isoreg.sites import dropout_sites
from isoreg.experiments.sweep import Folder, clean, restore, status
from isoreg.experiments.toy import toy_model_path

LONG = "a" * 300
RUN = expand(load_grid("demo")).runs[0]
RECORD = {"key": RUN.key, "status": "done", "config": RUN.config, "metric": "m", "value": 0.5}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def ends(code, *arguments, words=(), report=False):
    "The command ends with the code, in words and without a traceback; a report is left only of a mistake."
    result = invoke(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output
    assert bool(list(Path().glob("isoreg-error-*.txt"))) == report, result.output
    return result


def raises(error):
    def function(*a, **k):
        raise error

    return function


@pytest.mark.parametrize(
    "error, code, word",
    [
        (OSError(28, "No space left on device"), 1, "No space"),
        (RuntimeError("the kernel did not start within 300 seconds"), 1, "kernel"),
        (TimeoutError("Kernel didn't respond"), 1, "Kernel"),
        (PermissionError(13, "Permission denied"), 1, "Permission"),
        (MemoryError(), 1, "memory"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_a_run_that_fails_exits_with_1_and_an_interrupt_with_130(monkeypatch, error, code, word):
    monkeypatch.setattr(isoreg.experiments.notebook, "execute", raises(error))
    ends(code, "run", "--out", "runs", words=[word])


def test_a_mistake_is_called_so_and_leaves_a_report(monkeypatch):
    monkeypatch.setattr(isoreg.experiments.notebook, "execute", raises(AssertionError("odd")))
    result = ends(1, "run", "--out", "runs", words=["mistake of isoreg"], report=True)
    (file,) = Path().glob("isoreg-error-*.txt")
    text = file.read_text()
    assert file.name in result.stderr and "AssertionError: odd" in text and "Traceback" in text
    assert text.startswith("isoreg run --out runs\n") and f"torch {torch.__version__.split('+')[0]}" in text


def test_an_interrupt_of_any_command_is_one_line(monkeypatch):
    monkeypatch.setattr("isoreg.experiments.sweep.status", raises(KeyboardInterrupt()))
    assert ends(130, "status", ".").stderr == "error: stopped\n"


@pytest.mark.parametrize("disk", [OSError(28, "No space left on device"), OSError(30, "Read-only", "out/x")])
def test_a_disk_that_refuses(monkeypatch, disk):
    Path("r.jsonl").write_text(json.dumps(RECORD))
    monkeypatch.setattr("isoreg.experiments.sweep.write_atomically", raises(disk))
    monkeypatch.setattr("isoreg.report.records.write_atomically", raises(disk))
    code, word = (1, "disk is full") if disk.errno == 28 else (2, "out: Read-only")
    ends(code, "sweep", "demo", "--records", "r.jsonl", "--out", "out", words=[word])
    ends(code, "report", "r.jsonl", "--out", "out", words=[word])


@pytest.mark.parametrize("out", ["/proc/nothing", "file", "file/below", LONG])
def test_forbidden_folders_are_named(out):
    Path("file").touch()
    Path("r.jsonl").write_text(json.dumps(RECORD))
    for command in (["sweep", "demo", "--records", "r.jsonl"], ["report", "r.jsonl"], ["run"], ["demo"]):
        ends(2, *command, "--out", out, words=["error:"])


@pytest.mark.parametrize(
    "command",
    [
        ["score", LONG],
        ["score", "t.txt", "--model", LONG],
        ["report", LONG],
        ["status", LONG],
        ["run", "--data-dir", LONG],
        ["run", "--task", LONG + ".yaml"],
        ["sweep", LONG],
        ["sweep", "demo", "--records", LONG],
        ["rerun", LONG],
        ["rerun", "x", "--records", LONG],
        ["select", LONG, "t.txt"],
        ["tasks", "--data-dir", LONG],
        ["report", "/dev/zero"],
        ["select", "demo", "/dev/zero"],
        ["sweep", "/dev/zero"],
        ["sweep", "demo", "--records", "/dev/zero"],
        ["rerun", "x", "--records", "/dev/zero"],
        ["score", "/dev/zero"],
        ["run", "--scores", "/dev/zero", "--dropout", "guided"],
        ["run", "--layers", "9" * 5000],
        ["run", "--seed", "9" * 5000],
        ["score", "t.txt", "--seed", "9" * 5000],
        ["select", "demo", "t.txt", "--seeds", "0.." + "9" * 5000],
    ],
)
def test_paths_and_numbers_that_cannot_be(command):
    Path("t.txt").write_text("text\n" * 10)
    ends(2, *command)


def test_a_folder_that_holds_no_runs_is_left_soon(monkeypatch):
    monkeypatch.setattr("isoreg.files.LARGEST", 20)
    for i in range(30):
        Path(f"a/{i}").mkdir(parents=True)
    ends(2, "report", "a", words=["more than 20 folders"])


def _broken_model(change):
    shutil.copytree(toy_model_path(), "model")
    change(Path("model"))


def _config(**more):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "config.json").write_text("[1]"),
        lambda d: (d / "config.json").write_text("null"),
        lambda d: (d / "config.json").write_text('{"model_type": '),
        _config(hidden_size="x"),
        _config(hidden_size=-1),
        _config(num_attention_heads=7),
        _config(hidden_act="no"),
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:2000]),
        lambda d: (d / "model.safetensors").write_bytes(b""),
        lambda d: ((d / "model.safetensors").unlink(), (d / "pytorch_model.bin").write_bytes(b"\x80\x04junk")),
        lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors.index.json").write_text("{}")),
        lambda d: (d / "tokenizer.json").write_text("[]"),
        lambda d: (d / "tokenizer_config.json").write_text("[1]"),
    ],
)
def test_damaged_checkpoints_are_refused(change):
    Path("t.txt").write_text("the cat\n" * 10)
    _broken_model(change)
    ends(2, "score", "t.txt", "--model", "model", words=["model:", "cannot be read", "complete checkpoint"])


def _tokenizer(**more):
    def change(folder):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    return change


def _further_ids(folder):
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["cat"] += 10**6
    file.write_text(json.dumps(tokenizer))


def _modules(content):
    return lambda folder: (folder / "modules.json").write_bytes(content)


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(
            _config(is_encoder_decoder=True),
            ["does not run on these texts", "give a model that reads text alone"],
            marks=pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 takes it for an encoder"),
        ),
        (_further_ids, ["does not run on these texts (IndexError"]),
        (_config(num_hidden_layers=10**9), ["num_hidden_layers of 'model': 1000000000 is out", "mend its config.json"]),
        (_config(num_labels=10**10), ["num_labels of 'model': 10000000000 is out of range"]),
        (_config(text_config={"decoder_layers": 10**9}), ["decoder_layers of 'model'"]),
        (_config(num_hidden_layers=0), ["does not run on these texts (ValueError"]),
        (_tokenizer(model_max_length=-5), ["model_max_length in the tokenizer of 'model': -5 is out of range"]),
        (_tokenizer(model_max_length="x"), ["'x' is not a number"]),
        (_tokenizer(pad_token=None, eos_token=None), ["no padding token and no end token"]),
        (_modules(b"[" * 100_000), ["cannot be read as a SentenceTransformers model"]),
        (_modules(b"\xff"), ["cannot be read as a SentenceTransformers model"]),
        pytest.param(
            _modules(b'[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]'),
            ["cannot be read as a SentenceTransformers model"],
            marks=pytest.mark.skipif(not find_spec("sentence_transformers"), reason="needs sentence-transformers"),
        ),
    ],
)
def test_a_checkpoint_that_does_not_run_is_refused_before_anything_is_scored(change, words):
    Path("t.txt").write_text("the cat\n" * 10)
    _broken_model(change)
    ends(2, "score", "t.txt", "--model", "model", words=["model:", *words])


@pytest.mark.parametrize(
    "change", [_config(return_dict=False), _tokenizer(model_input_names=[]), _tokenizer(model_input_names=["x"])]
)
def test_a_checkpoint_whose_settings_do_not_matter_is_scored_as_ever(change):
    Path("t.txt").write_text("the cat\n" * 10)
    shutil.copytree(toy_model_path(), "plain")
    _broken_model(change)
    scores = [ends(0, "score", "t.txt", "--model", m, "--json").stdout for m in ("plain", "model")]
    assert scores[0] == scores[1]


def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(monkeypatch):
    monkeypatch.setattr("builtins.input", raises(AssertionError("asked")))
    classes = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", None]}
    _broken_model(_config(model_type="evil", auto_map=classes))
    Path("model/evil.py").write_text("open('ran', 'w')")
    Path("model/tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    for call in (read_config, read_body, load_tokenizer):
        with pytest.raises(ValueError, match="model: 'model' brings code of its own, which is never run"):
            call("model")
    assert not Path("ran").exists()


ODD_TEXTS = ["1", "[]", '"a"', "null", "{", '{"key": []}', '{"key": {}}', "NaN"]
ODD_TEXTS += ["1" * 5000, "[" * 100_000, '{"a":' * 50_000]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_records_and_state_files_of_a_wrong_type(monkeypatch, text):
    monkeypatch.setattr(isoreg.experiments.finetune, "run", raises(AssertionError("a run was started")))
    folder = Path("runs") / RUN.key
    for file in ("record.json", "failed.json", "progress.json"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    (Path("runs/.sweep")).mkdir()
    Path("runs/.sweep/demo-1.json").write_text(text)
    Path("r.jsonl").write_text(text)
    ends(0, "status", "runs")
    ends(0, "sweep", "demo", "--out", "runs", "--dry-run")
    for command in (
        ["report", "runs"],
        ["report", "r.jsonl"],
        ["select", "demo", "runs"],
        ["select", "demo", "r.jsonl"],
    ):
        ends(2, *command)
    for command in (["rerun", folder], ["rerun", RUN.key, "--records", "r.jsonl"]):
        ends(2, *command)
    result = invoke("sweep", "demo", "--records", "r.jsonl", "--out", "other", "--dry-run")
    assert result.exit_code in (0, 2) and "mistake" not in result.output


@pytest.mark.parametrize("odd", [None, [], {}, "x" * 300])
@pytest.mark.parametrize("name", ["key", "predictions", "isoscore", "total_seconds", "versions", "hardware", "value"])
def test_parts_of_records_of_a_wrong_type(monkeypatch, name, odd):
    monkeypatch.setattr(isoreg.experiments.finetune, "run", raises(AssertionError("a run was started")))
    folder = Path("runs") / RUN.key
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(RECORD | {name: odd}))
    Path("r.jsonl").write_text(json.dumps(RECORD | {name: odd}))
    ends(0, "status", "runs")
    ends(0, "sweep", "demo", "--out", "runs", "--dry-run")
    ends(0, "sweep", "demo", "--records", "r.jsonl", "--out", "other", "--dry-run")
    ends(2, "rerun", folder)
    ends(2, "select", "demo", "r.jsonl")


@pytest.mark.parametrize(
    "plan",
    [
        {"runs": [1]},
        {"runs": [{}]},
        {"grid": [], "runs": [], "jobs": 1},
        {"grid": "a", "runs": [], "jobs": "x"},
        {"grid": "a", "runs": [{"key": "a", "notebook": "x", "config": 1}], "jobs": 1},
        {"grid": "a", "runs": [{"key": [], "notebook": "x", "config": {}}], "jobs": 1},
        {"grid": "a", "runs": [{"key": "a", "notebook": "finetune", "config": {"task": []}}], "jobs": 1},
    ],
)
def test_a_plan_that_is_none_is_not_read(plan):
    Path(".sweep").mkdir()
    Path(".sweep/a-1.json").write_text(json.dumps(plan))
    assert status(".")["missing"] is None
    ends(0, "status", ".")


@pytest.mark.parametrize(
    "said", [1, {"stage": 1}, {"step": [], "total": {}}, {"total": 3}, {"loss": "a", "stage": "x"}]
)
def test_progress_of_a_wrong_type(said):
    folder = Folder(".")
    Path(RUN.key).mkdir()
    (Path(RUN.key) / "progress.json").write_text(json.dumps(said))
    (Path(RUN.key) / "failed.json").write_text(json.dumps({"key": RUN.key, "error": said, "traceback": 3}))
    with folder.lock(RUN.key):
        ends(0, "status", ".")
    assert isoreg.experiments.notebook.read_progress(Path(RUN.key) / "progress.json").get("stage", "") in ("", "x")


LEVELS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = [
    "&a [*a]",
    "fixed: &a {x: *a}",
    "axes: {seed: &a [*a]}",
    "blocks: &a [{name: x, blocks: *a}]",
    LEVELS,
    "fixed: {lr: !!timestamp x}",
    "fixed: {lr: !!bool x}",
    "fixed: {lr: !!int x}",
    "axes: {seed: 0..5000000000}",
    "axes: {seed: 0..999, lam: 0..999}",
    "axes: {a: [{x: 0..999, y: 0..999}]}",
    f"fixed: {{seed: {'9' * 5000}}}",
    f"axes: {{seed: 0..{'9' * 5000}}}",
    f"fixed: {{lr: 0x{'f' * 5000}}}",
    "[" * 5000,
    "{a: " * 3000,
    "fixed: {lr: 2020-13-45}",
    "\x00",
    "a: " + "x" * 2**21,
]


@pytest.mark.parametrize("text", YAML, ids=lambda t: t[:20])
def test_yaml_that_would_not_end(text):
    Path("g.yaml").write_text(text)
    ends(2, "sweep", "g.yaml", "--dry-run", "--out", "o", words=["error: "])
    if "\n" not in text and len(text) < 2**20 and not text.startswith(("axes", "fixed")):
        with pytest.raises(ValueError, match="set: "):
            parse_set([f"task={text}"])


@pytest.mark.parametrize(
    "value", ["pad_to_max=[", "seed=&a [*a]", "seed=!!timestamp x", "lr=!!python/name:os", "seed=" + "9" * 5000]
)
def test_set_raises_a_value_error(value):
    with pytest.raises(ValueError, match="^set: .*cannot be read as YAML"):
        parse_set([value])
    ends(2, "run", "--set", value, "--out", "runs", words=["set:"])
    ends(2, "sweep", "demo", "--dry-run", "--set", value, words=["set:"])


def test_sizes_that_are_used_are_still_read():
    assert len(from_yaml("a: [" + ", ".join(["1"] * 50_000) + "]")["a"]) == 50_000
    assert from_yaml("a: &a [1]\nb: [*a, *a]") == {"a": [1], "b": [[1], [1]]}
    assert from_json("[" * 100 + "]" * 100) and LARGEST >= 100_000


def _command(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "isoreg.cli", *arguments], capture_output=True, env=os.environ | environment
    )
    assert b"Traceback" not in done.stderr + done.stdout
    return done


def test_a_file_name_that_is_not_utf8_on_a_terminal_that_knows_ascii_alone():
    name = os.fsdecode(b"bad\xff.npy")
    np.save(name, np.random.default_rng(0).normal(size=(30, 6)))
    done = _command("score", os.fsencode(name), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"\\u2588" in done.stdout
    ends(2, "score", os.fsdecode(b"no\xff.npy"), words=["file: no file"])
    Path(os.fsdecode(b"runs\xff")).mkdir()
    (Path(os.fsdecode(b"runs\xff")) / "record.json").write_text(json.dumps(RECORD))
    assert _command("status", b"runs\xff").returncode == 0
    if (report := invoke("report", os.fsdecode(b"runs\xff"), "--out", "r")).exit_code:  # pandas from 3 on cannot
        assert report.exit_code == 2 and "is not utf-8; give another name" in report.output


def test_an_output_path_with_braces(monkeypatch):
    "papermill would put parameters in the place of the names."
    asked = []
    monkeypatch.setattr("papermill.execute_notebook", lambda path, output, **k: asked.append(output))
    isoreg.experiments.notebook.execute("finetune", "r{seed}/{x}/notebook.ipynb", {"seed": 3})
    from papermill.parameterize import parameterize_path

    assert parameterize_path(asked[0], {"seed": 3}) == "r{seed}/{x}/notebook.ipynb" and Path("r{seed}/{x}").is_dir()


@pytest.mark.parametrize("odd", ["[/red]", "[bold]a", "[link=x]", "{x}", "%s", ":smile:", "a\nb"])
def test_markup_in_names_is_printed_as_it_is(odd):
    for command in (["score", odd], ["status", odd], ["run", "--task", odd], ["sweep", odd], ["report", odd], [odd]):
        result = ends(2, *command)
        assert odd.split("\n")[0] in result.output
    for command in (["run", "--lam", odd], ["run", "--" + odd], ["sweep", "demo", "--jobs", odd]):
        ends(2, *command)
    Path(RUN.key).mkdir()
    (Path(RUN.key) / "failed.json").write_text(json.dumps({"key": RUN.key, "error": odd, "config": RUN.config}))
    assert odd.split("\n")[0] in ends(0, "status", ".").output
    ends(0, "report", RUN.key, "--out", "r")


KEYS = [
    "k\n\n<script>alert(1)</script>",
    'k" onclick="x',
    "[a](javascript:alert(1))",
    "k\r\n# head",
    "k|b",
    "<javascript:x>",
]


@pytest.mark.parametrize("key", KEYS)
def test_markdown_in_records_stays_text(key):
    record = RECORD | {"key": key, "metric": key}
    other = RECORD | {"key": key + "2", "metric": key, "config": RUN.config | {"seed": 1}}
    Path("a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(other) + "\n")
    text = to_markdown(summarise(load("a.jsonl")))
    assert len(text.split("\n\n")) == 2 and len(text.split("\n\n")[0].splitlines()) == 3
    assert not re.search(r"(?<!\\)<(script|javascript)", text) and not re.search(r"(?<!\\)\]\(javascript", text)
    files = write_report("a.jsonl", "r", None)
    assert "<script" not in next(f for f in files if f.name == "summary.html").read_text()


def test_a_caption_is_no_command_of_latex():
    table = pd.DataFrame({"a": ["x"]})
    table.attrs["caption"] = r"\input{/etc/passwd} ~ 5 %"
    from isoreg.report.records import _forms

    tex = _forms(table, "")["tex"]
    assert r"\input" not in tex and r"\textbackslash{}input\{" in tex


# What a killed run leaves


def _old(path):
    os.utime(path, (0, 0))
    return path


def test_temporary_files_of_the_living_stay():
    file = Path(".isoreg-writing-ab12cd34.tmp")
    file.write_text("half")
    assert remove_abandoned(".") == []  # it is new
    _old(file)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_abandoned(".") == []
    others = [Path(n) for n in ("notes.temperature.tmp", "isoreg-analysis.tmp")]
    for other in others:
        _old(other.write_text("mine") and other)
    os.mkfifo(".isoreg-writing-pipe.tmp")
    _old(".isoreg-writing-pipe.tmp")
    assert remove_abandoned(".") == [file] and all(other.exists() for other in others)


def test_folders_of_the_living_stay(tmp_path):
    with own_folder(tmp_path) as (folder, _):
        _old(folder)
        assert remove_abandoned_folders(tmp_path) == [] and Path(folder).is_dir()
    code = (
        "import os, sys, subprocess, isoreg.files as f; c = f.own_folder(sys.argv[1]); folder, lock = c.__enter__();"
        "fd = lock._context.lock_file_fd; child = subprocess.Popen(['sleep', '60'], pass_fds=[fd], stdout=-3);"
        "print(folder, child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True).stdout.split()
    _old(said[0])
    try:
        assert remove_abandoned_folders(tmp_path) == []  # the kernel that it started lives
    finally:
        os.kill(int(said[1]), 9)
    until = time.monotonic() + 30
    while not remove_abandoned_folders(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(said[0]).exists()
    for name, owner in ("isoreg-notes", ""), ("isoreg-study123", "the owner of this study"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text(owner)
        _old(tmp_path / name)
    assert remove_abandoned_folders(tmp_path) == []  # none of ours


def test_status_cleans_what_nobody_computes(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(Path().absolute()))
    folder = Folder("runs")
    for key in ("held", "killed", "done", "failed"):
        folder.part(key).mkdir(parents=True)
        (folder.out / key).mkdir()
        (folder.out / key / "notebook.ipynb").touch()
    (folder.out / "done" / "record.json").write_text("{}")
    (folder.out / "failed" / "failed.json").write_text("{}")
    with folder.lock("held"):
        assert clean("runs", unfinished=False) == [folder.part("done")]
        assert "3 left-overs" in invoke("status", "runs", "--clean").stderr
    assert [p.name for p in (folder.home / "part").iterdir()] == ["held"]
    assert sorted(p.name for p in folder.out.iterdir()) == [".sweep", "done", "failed", "held"]
    assert (folder.out / "held/notebook.ipynb").exists() and (folder.out / "failed/notebook.ipynb").exists()


def test_without_a_network_it_is_said_once():
    Path("t.txt").write_text("a b\n" * 9)
    said = _command("score", "t.txt", "--model", "no/such", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.returncode == 2 and b"No network? Give --model as a folder, --texts as a file." in said.stderr
    if int(huggingface_hub.__version__.split(".")[0]) >= 1:  # the earlier ones ask again and say so
        assert b"Retrying" not in said.stderr and len(said.stderr.splitlines()) == 2
    assert _hint("lr: 3 is out of range; need less than 1", "run") == ""
    assert "--data-dir" in _hint("cannot reach it", "run") and "--data-dir" not in _hint("cannot reach it", "score")


# Messages

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "meta": X.to("meta"),
    "to_dense": X.to_sparse(),
    "nested": torch.nested.nested_tensor([X, X]),
    "float": X.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("word, tensor", TENSORS.items())
def test_tensors_that_hold_no_plain_values(word, tensor):
    calls = [
        (lambda: isoscore(tensor), "points"),
        (lambda: isoscore(X, mask=tensor), "mask"),
        (lambda: isoscore_from_cov(tensor), "cov"),
        (lambda: IStar(-0.1, zeta=0)((tensor,) * 3), "hidden_states"),
        (lambda: CosReg()((tensor,) * 3), "hidden_states"),
    ]
    for call, name in calls:
        with pytest.raises(ValueError, match=f"^{name}: the tensor .*{word}"):
            call()


def test_one_dimension_is_no_divergence():
    with pytest.raises(ValueError, match="one dimension, which has no isotropy"):
        IStar(-0.1, zeta=0)((torch.randn(2, 8, 1),) * 3)


@pytest.mark.parametrize(
    "content, word",
    [(b"\x80\x04junk", "cannot be read"), (b"junk", "cannot be read"), (b"\x93NUMPY\x01", "cannot be read")],
)
def test_a_damaged_file_is_no_pickle(content, word):
    Path("x.npy").write_bytes(content)
    ends(2, "score", "x.npy", words=["x.npy cannot be read"])
    np.save("x.npy", np.array([[{}]], dtype=object))
    ends(2, "score", "x.npy", words=["Python objects"])


def test_why_there_is_no_gradient():
    tokens = dict(
        AutoTokenizer.from_pretrained(toy_model_path())(["a b c", "d e f"], return_tensors="pt", padding=True)
    )
    batch = tokens | {"labels": torch.where(torch.arange(tokens["input_ids"].shape[1]) == 1, -100, tokens["input_ids"])}
    made = lambda: AutoModelForMaskedLM.from_pretrained(toy_model_path())
    model = made()
    with torch.inference_mode(), pytest.raises(ValueError, match="loss: depends on no .* torch.inference_mode"):
        empirical_fisher(model, [batch], loss="mlm")
    whole = empirical_fisher(model, [batch], loss="mlm").scores()
    layer = model.bert.encoder.layer[0]
    plain = layer.forward
    checkpointed = torch.utils.checkpoint.checkpoint
    layer.forward = lambda *a, **k: checkpointed(plain, *a, use_reentrant=True)
    assert empirical_fisher(model, [batch], loss="mlm").scores() == pytest.approx(whole, rel=1e-4, abs=1e-12)
    wrapped = {f"base_model.model.{n.replace('.query.', '.query.base_layer.')}": v for n, v in whole.items()}
    sites = dropout_sites(made())
    assert site_scores(sites, wrapped) == site_scores(sites, whole)


def test_masks_of_models_that_shorten_their_input():
    states, mask = tuple(torch.randn(2, 39, 16) for _ in range(3)), torch.ones(2, 400)
    for penalty in (IStar(-0.1, zeta=0), CosReg()):
        with pytest.raises(ValueError, match="that of its own steps: mask_fn of PenaltyTrainer"):
            penalty(states, mask)
    for penalty in (IStar(-0.1, zeta=0, padding=True), CosReg(padding=True)):
        assert torch.isfinite(penalty(states, mask))
    swin = (torch.randn(2, 64, 8), torch.randn(2, 16, 16), torch.randn(2, 4, 32))
    for layers in ("union", "mean"):
        with pytest.raises(ValueError, match="layers: those of shapes .* have no union and no mean"):
            IStar(-0.1, zeta=0, layers=layers)(swin)
    assert torch.isfinite(IStar(-0.1, zeta=0, layers=-1)(swin))


def test_a_model_without_values_is_not_measured():
    model = AutoModelForMaskedLM.from_pretrained(toy_model_path()).to("meta")
    with pytest.raises(ValueError, match="model: the tensor is on the meta device"):
        measure_isotropy(model, [{"input_ids": torch.ones(2, 4, dtype=torch.long)}])
    assert RunConfig().key


# ---- what a second look found


def test_code_of_a_sentence_transformers_folder_is_not_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Thing: pass\n")
    Path("t.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    for held in ([{"idx": 0, "name": "0", "path": "", "type": "evil_module.Thing"}], [1], {"a": 1}, [], "x"):
        (folder / "modules.json").write_text(json.dumps(held))
        result = ends(2, "score", "--model", folder, "--texts", "t.txt")
        assert "modules.json" in result.output and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_plain_file_is_not_replaced(kind, tmp_path):
    np.save("x.npy", np.random.default_rng(0).normal(size=(50, 4)))
    target = tmp_path / "target.svg"
    if kind == "fifo":
        os.mkfifo(target)
        assert "no plain file" in ends(2, "score", "x.npy", "--picture", target).output
        assert target.is_fifo()
    else:
        (tmp_path / "real.svg").write_text("old")
        target.symlink_to(tmp_path / "real.svg")
        ends(0, "score", "x.npy", "--picture", target)
        assert target.is_symlink() and "<svg" in (tmp_path / "real.svg").read_text()


def test_merge_keys_are_bounded():
    levels = "abcdefghi"
    text = "a: &a {" + ", ".join(f"k{i}: 1" for i in range(9)) + "}\n"
    text += "".join(f"{n}: &{n} {{<<: [{', '.join(['*' + m] * 9)}]}}\n" for m, n in itertools.pairwise(levels))
    Path("g.yaml").write_text(text)
    assert "merge keys" in ends(2, "sweep", "g.yaml", "--dry-run").output
    assert from_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}")["b"] == {"x": 1, "y": 2}


def test_blocks_are_counted_together():
    block = {"axes": {"seed": "0..29999"}}
    Path("g.yaml").write_text(json.dumps({"blocks": [block | {"name": f"b{i}"} for i in range(4)]}))
    assert "more than 100000 combinations" in ends(2, "sweep", "g.yaml", "--dry-run").output


def test_a_dollar_in_a_metric_is_a_letter():
    records = [RECORD | {"metric": "$$x$$"}, RECORD | {"metric": "$$x$$", "config": RUN.config | {"seed": 1}}]
    Path("a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    ends(0, "report", "a.jsonl", "--out", "r")


def test_a_shortcode_in_a_key_is_text():
    record = RECORD | {"key": "{{< include /etc/passwd >}}", "metric": "{{< env HOME >}}"}
    Path("a.jsonl").write_text(json.dumps(record) + "\n")
    assert "{{<" not in to_markdown(summarise(load("a.jsonl")))


def test_shapes_that_differ_are_said(tmp_path):
    shutil.copytree(toy_model_path(), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    Path("t.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    said = ends(2, "score", "--model", tmp_path / "m", "--texts", "t.txt").output
    assert "differ in their shapes" in " ".join(said.split()) and "ignore_mismatched" not in said


def test_a_damaged_configuration_and_weights_that_diverged_are_said(tmp_path):
    shutil.copytree(toy_model_path(), tmp_path / "m")
    Path("t.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\n")
    weights = load_file(tmp_path / "m/model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][7, 3] = torch.nan
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    for command in (["score", "--texts", "t.txt"], ["run", "--out", "r"]):
        said = invoke(*command, "--model", tmp_path / "m").output
        assert "NaN or infinity in 1 of its weights" in " ".join(said.split()), said
    (tmp_path / "m/config.json").write_text("{")
    said = ends(2, "score", "--model", tmp_path / "m", "--texts", "t.txt").output
    assert "config.json" in said and "tokenizer" not in said


# What an outsider found


def test_files_of_others_are_not_cleaned_away(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # not what other programs have left
    Path("analysis").mkdir()
    mine = [Path(p) for p in ("analysis/notebook.ipynb", "analysis/progress.json", "experiment.tmp", "a/database.tmp")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        _old(path)
    assert "0 left-overs" in invoke("status", ".", "--clean").stderr
    assert clean(".", unfinished=False) == [] and all(p.exists() for p in mine)


@pytest.mark.parametrize(
    "name, content", [("b.json", b"["), ("c.parquet", b"x"), ("d.csv", b'"'), ("e.jsonl", b""), ("f.csv", b"\xff\xfe")]
)
def test_damaged_texts_are_named(name, content):
    Path(name).write_bytes(content)
    ends(2, "score", "--model", "toy-bert", "--texts", name, words=[f"'{name}' cannot be read as"])


@pytest.mark.parametrize("name", [":::", "/"])
def test_what_names_no_text(name):
    ends(2, "score", "--model", "toy-bert", "--texts", name, words=["names no text"])


@pytest.mark.parametrize("version, given", [("3.0.0", {"trust_remote_code": False}), ("4.0.0", {})])
def test_code_of_a_data_set_is_never_run(monkeypatch, version, given):
    asked = []
    monkeypatch.setattr("datasets.__version__", version)
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **options: asked.append((names, options)))
    load_rows("own/data", split="train")
    assert asked == [(("own/data",), {"split": "train"} | given)]


def test_a_home_that_is_nobodys_is_a_folder_that_is_not_there():
    Path("t.txt").write_text("a b\n" * 9)
    ends(2, "score", "--model", "~nosuchuser/x", "--texts", "t.txt", words=["model: no folder '~nosuchuser/x'"])
    ends(2, "run", "--model", "~nosuchuser/x", "--task", "cola", words=["model: no config.json"])


ODD_VALUES = ["x", ["a"], {}, 10**59, 10**400, None, True]


@pytest.mark.parametrize("odd", ODD_VALUES, ids=str)
@pytest.mark.parametrize(
    "place",
    [
        "value",
        "data.train_rows",
        "isoscore.after",
        "config.lam",
        "config.epochs",
    ],
)
def test_a_report_of_records_with_odd_values_ends_in_a_table_or_in_words(place, odd):
    records = [json.loads(json.dumps(RECORD | {"data": {}, "model": {}, "isoscore": {}})) for _ in range(2)]
    part, _, name = place.rpartition(".")
    (records[0][part] if part else records[0])[name] = odd
    records[1]["key"] += "-other"
    with open("r.jsonl", "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)
    result = invoke("report", "r.jsonl", "--out", "report")
    assert result.exit_code == 0 and Path("report/summary.md").is_file(), result.output + result.stderr


SEEN = """
import os, sys
def ask(event, values):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(values[1], tuple)): os._exit(7)
sys.addaudithook(ask)
from isoreg.cli import app
for name in sys.argv[1:]:
    app(["score", "--model", "toy-bert", "--texts", name], standalone_mode=False)
"""


def test_a_file_asks_no_network():
    Path("t.csv").write_text("text\n" + "a b\n" * 9)
    Path("t.jsonl").write_text('{"text": "a b"}\n' * 9)
    command = [sys.executable, "-c", SEEN, "t.csv", "t.jsonl"]
    assert subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "0"}, capture_output=True).returncode == 0


def test_of_a_long_text_the_place_that_cannot_be_written_is_shown():
    said, code = _ending(UnicodeEncodeError("utf-8", "x" * 500 + "\udcff" + "y" * 500, 500, 501, "surrogate"), ["run"])
    assert code == 2 and r"xx\udcffyy" in said and len(said) < 200


def test_foreign_members_of_an_archive_are_no_arrays():
    np.savez("x.npz", a=np.random.default_rng(0).normal(size=(30, 6)))
    with zipfile.ZipFile("x.npz", "a") as archive:
        archive.writestr("readme.txt", "about")
    ends(0, "score", "x.npz", words=["30 points"])
    for member, said in ("readme.txt", "holds no vectors"), ("a.npy", "shape ()"):
        with zipfile.ZipFile("y.npz", "w") as archive:
            archive.writestr(member, "about")
        ends(2, "score", "y.npz", words=[said])


def test_ranges_are_capped_together_and_exclusions_read_once(monkeypatch):
    Path("g.yaml").write_text(f"axes: {{seed: [{', '.join(['0..99998'] * 300)}]}}")
    ends(2, "sweep", "g.yaml", "--dry-run", words=["too long at 0..99998; 100000 values at most"])
    Path("g.yaml").write_text(
        "axes: {seed: 0..9, penalty_settings: [{a: 1}, {a: 2}]}\nfixed: {regularizer: none}\n"
        "exclude: [{seed: 0..99999, task: mrpc}, {seed: [1, 2.0]}]"
    )
    seen, values = [], isoreg.experiments.grid._values
    monkeypatch.setattr(isoreg.experiments.grid, "_values", lambda x, what: seen.append(what) or values(x, what))
    invoke("sweep", "g.yaml", "--dry-run")
    assert 0 < len([w for w in seen if "exclude" in w]) <= 3


@pytest.mark.parametrize("name", ["batch_size", "seed", "max_train", "epochs", "length_groups"])
def test_a_whole_number_beyond_any_use(name):
    with pytest.raises(ValueError, match=f"{name}: 99999999999999999999 is out of range; need less than 4294967296"):
        RunConfig(**{name: 99999999999999999999})


def test_a_long_name_of_a_model_makes_no_folder_that_cannot_be(monkeypatch):
    key = RunConfig(model="a" * 300).key
    assert len(key) < 230 and key != RunConfig(model="a" * 301).key
    assert len(os.fsencode(RunConfig(model="é" * 300).key)) < 230
    for model in ("a" * 300, "sentence-transformers/" + "a" * 300):
        Path("t.txt").write_text("the cat\n" * 10)
        ends(2, "score", "t.txt", "--model", model, words=["model: 'a" if model[0] == "a" else "model:"])


def test_a_picture_of_a_file_whose_name_is_not_utf8():
    name = os.fsdecode(b"bad\xff.npy")
    np.save(name, X.numpy())
    ends(0, "score", name, "--picture", "page.svg")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["tasks"], ["tasks", "--json"], ["run", "--help"]])
def test_what_cannot_be_printed(arguments):
    command = [sys.executable, "-c", "import isoreg; isoreg._command()", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"Traceback" not in done.stderr and b"the disk is full" in done.stderr


def test_an_interrupt_while_the_command_is_loaded_is_one_line(monkeypatch, capsys):
    class Loading(type(isoreg)):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "isoreg.cli", Loading("isoreg.cli"))
    with pytest.raises(SystemExit) as ending:
        isoreg._command()
    assert ending.value.code == 130 and capsys.readouterr().err == "error: stopped\n"


def test_a_working_folder_that_is_gone(tmp_path):
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    Path(tmp_path / "gone").rmdir()
    try:
        said = invoke("tasks")
    finally:
        os.chdir(tmp_path)
    assert said.exit_code == 2 and "error: the working folder is gone; go to one that is there" in said.stderr


def test_what_a_file_holds_is_no_command_to_the_terminal():
    np.savez("x.npz", **{"a\x1b[2J\x1b]0;x\x07": X.numpy(), "b": X.numpy()})
    ends(2, "score", "x.npz", words=[r"a\x1b[2J\x1b]0;x\x07, b"])
    Path("r.jsonl").write_text(json.dumps(RECORD | {"config": RUN.config | {"task": "t\x1b[2Jx"}}) + "\n")
    assert "\x1b" not in ends(0, "report", "r.jsonl", "--out", "report").output


@pytest.mark.parametrize(
    "command",
    [
        ["score", "connect.npy"],
        ["score", "x.npy", "--array", "reach"],
        ["report", "offline_runs"],
        ["run", "--task", "resolution"],
    ],
)
def test_a_name_is_no_word_of_a_network(command):
    np.save("connect.npy", X[0].numpy())
    np.save("x.npy", X.numpy())
    assert "No network?" not in ends(2, *command).output


def _packed(kind, content, rows=1):
    return {"kind": kind, "rows": rows, "data": base64.b64encode(zlib.compress(content)).decode()}


@pytest.mark.parametrize(
    "odd",
    [
        {"key": ["a"]},
        {"isoscore": {"after": {"union": {"a": 1}}}},
        *({"predictions": _packed("json", text)} for text in (b"5", b"null", b"[[1, 2]]")),
        *({"predictions": _packed(kind, bytes(160), 40)} for kind in ("i2,i2", "U1", "O", "datetime64[s]")),
    ],
)
def test_a_record_that_cannot_be_compared_is_not_repeated(monkeypatch, odd):
    monkeypatch.setattr(isoreg.experiments.finetune, "run", lambda config: pytest.fail("it was run"))
    whole = {"predictions": _packed("int16", bytes(20), 10), "isoscore": {"after": {"union": 0.5}}, "git_commit": "x"}
    whole |= {"versions": {}, "hardware": {}}
    Path("record.json").write_text(json.dumps(RECORD | whole | odd))
    ends(2, "rerun", "record.json", words=["record:", "give another"])


@pytest.mark.parametrize("through_a_link", [False, True])
def test_what_is_read_is_not_written_over(through_a_link):
    Path("x.svg").write_text("a text")
    Path("search.yaml").write_text("axes: {seed: [100], lr: [1e-3, 2e-3]}\n")
    Path("runs").mkdir()
    for file, command in (
        ("x.svg", ["score", "--model", "toy-bert", "--texts", "x.svg", "--picture"]),
        ("search.yaml", ["select", "search.yaml", "runs", "--out"]),
    ):
        before = Path(file).read_bytes()
        if through_a_link:
            Path(f"link{Path(file).suffix}").symlink_to(file)
        out = f"link{Path(file).suffix}" if through_a_link else file
        ends(2, *command, out, words=[f"{command[-1][2:]}: '{out}' is a file that is read here; give another"])
        assert Path(file).read_bytes() == before


@pytest.mark.parametrize("error, word", [(OSError(28, "No space left"), "disk is full"), (MemoryError(), "memory")])
@pytest.mark.parametrize("model, texts", [("toy-bert", "t.jsonl"), ("m", "t.txt")])
def test_a_lack_of_room_while_reading_is_no_bad_input(monkeypatch, model, texts, error, word):
    def fail(*names, **options):
        raise error

    monkeypatch.setattr("datasets.load_dataset", fail)
    if model == "m":
        shutil.copytree(toy_model_path(), "m")
        monkeypatch.setattr(transformers.AutoModel, "from_pretrained", fail)
        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    for name in ("t.jsonl", "t.txt"):
        Path(name).write_text("the cat\n" * 9)
    ends(1, "score", "--model", model, "--texts", texts, words=[word])


@pytest.mark.parametrize("name", [".DS_Store", "README", "..claim", "...claim", ".claim", "a.txt"])
def test_a_stray_file_among_the_locks_names_no_run(name, tmp_path):
    folder = Folder("above/runs")
    for place in (folder.home / "locks", folder.home / "part" / RUN.key):
        place.mkdir(parents=True)
    (folder.home / "locks" / name).touch()
    mine = [Path("above/notebook.ipynb"), folder.out / "notebook.ipynb", folder.out / "progress.json"]
    for file in mine:
        file.write_text("somebody's")
    removed = clean(folder.out)
    assert all(file.exists() for file in mine) and removed == [folder.part(RUN.key)]


def test_cleaning_follows_no_link_in_place_of_the_parts(tmp_path):
    folder, elsewhere = Folder("runs"), tmp_path / "elsewhere/photos"
    elsewhere.mkdir(parents=True)
    folder.home.mkdir(parents=True)
    (folder.home / "part").symlink_to(elsewhere.parent)
    assert clean("runs") == [] and elsewhere.exists()


@pytest.mark.parametrize("link", ["the run", "its part"])
def test_cleaning_follows_no_link(link, tmp_path):
    folder, elsewhere = Folder("runs"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notebook.ipynb").write_text("somebody's")
    (folder.home / "part").mkdir(parents=True)
    final, part = folder.out / RUN.key, folder.part(RUN.key)
    for place in (final, part):
        place.symlink_to(elsewhere) if (place == final) == (link == "the run") else place.mkdir()
    clean("runs")
    assert (elsewhere / "notebook.ipynb").exists()
    assert part.is_symlink() == (link == "its part")  # what is no link goes


@pytest.mark.parametrize(
    "words, place",
    [
        (["score", "--", ""], "the one after '--'"),
        (["status", "--clean", ""], "the one after '--clean'"),
        (["report", "runs", "--out="], "'--out='"),
        (["demo", "", ""], "the one after 'demo'"),
    ],
)
def test_an_empty_argument_is_not_the_working_folder(words, place):
    Path("runs").mkdir()
    ends(2, *words, words=[f"argument: {place} is empty"])
    assert [p.name for p in Path().iterdir()] == ["runs"]


def test_a_file_that_is_given_twice_has_two_scores():
    np.save("x.npy", X.numpy())
    found = json.loads(ends(0, "score", "x.npy", "./x.npy", "--json").stdout)
    assert list(found["scores"]) == ["x.npy", "x.npy (2)"] and found["differences"][0]["difference"] == 0


def test_a_day_is_a_text_that_is_no_setting():
    Path("g.yaml").write_text("axes: {seed: [0, 1]}\nfixed: {lr: 2020-13-45}")
    ends(2, "sweep", "g.yaml", "--dry-run", words=["lr: ", "2020-13-45"])


def test_a_model_that_lacks_memory_is_not_called_damaged(monkeypatch):
    Path("t.txt").write_text("the cat\n" * 10)
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", raises(MemoryError()))
    ends(1, "score", "t.txt", "--model", "toy-bert", words=["the memory does not suffice"])


def test_predictions_that_unpack_to_too_much():
    packed = {"kind": "json", "rows": 1, "data": base64.b64encode(zlib.compress(bytes(2**28 + 9), 9)).decode()}
    with pytest.raises(ValueError, match="predictions: cannot be read .more than 256 MB"):
        unpack(packed)


def test_models_of_other_than_text_are_called_so():
    Path("t.txt").write_text("the cat\n" * 10)
    shutil.copytree(toy_model_path(), "model")
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    CanineModel(CanineConfig(**size, num_hash_buckets=32, local_transformer_stride=8)).save_pretrained("model")
    ends(2, "score", "t.txt", "--model", "model", words=["no state for each token", "reads text alone"])
    ViTModel(ViTConfig(**size, image_size=8, patch_size=4)).save_pretrained("model")
    ends(2, "score", "t.txt", "--model", "model", words=["does not run on these texts", "reads text alone"])


def _folder_with(record, out="runs"):
    folder = Path(out) / RUN.key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    return folder


OTHER = RECORD | {"config": RUN.config | {"lr": 0.123}}


def test_stored_records_replace_no_other_record():
    folder = _folder_with(OTHER)
    Path("r.jsonl").write_text(json.dumps(RECORD))
    plan = expand(load_grid("demo"))
    assert restore("r.jsonl", plan, "runs", dry_run=True) == {RUN.key} and len(list(folder.iterdir())) == 1
    assert restore("r.jsonl", plan, "runs") == {RUN.key}
    assert json.loads((folder / "record.aside-1.json").read_text()) == OTHER
    assert Folder("runs").record(RUN) == RECORD and restore("r.jsonl", plan, "runs") == set()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("record", [OTHER, RECORD | {"of": "a later version"}], ids=["another's", "a later one"])
def test_a_run_replaces_no_other_record(monkeypatch, record, force):
    folder = _folder_with(record)
    monkeypatch.setattr(isoreg.experiments.notebook, "execute", raises(RuntimeError("the kernel died")))
    refused = record != OTHER and not force
    with pytest.raises(ValueError if refused else typer.Exit, match="--force" if refused else None):
        isoreg.cli._run(RUN.config, Path("runs"), force)
    kept = "record.aside-1.json" if record == OTHER else "record.json"
    assert json.loads((folder / kept).read_text()) == record


def test_too_few_open_files_are_said_and_not_waited_for(monkeypatch):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = []
    monkeypatch.setattr("papermill.execute_notebook", lambda *a, **k: asked.append(a))
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    try:
        assert "notebook:" not in ends(1, "run", "--out", "r", words=["open files", "ulimit -n"]).output
        ends(1, "sweep", "demo", "--out", "s", words=["open files", "ulimit -n"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not asked and not list(Path("s").rglob("failed.json"))


@pytest.mark.parametrize("said", ["fifo", b"\xff\xfe\x00", b"host 12x 3", b"host " + b"9" * 5000 + b" 3", b""])
def test_an_owner_that_is_none_hangs_nothing(said):
    folder = Folder("runs")
    (folder.home / "locks").mkdir(parents=True)
    (folder.home / "part" / RUN.key).mkdir(parents=True)
    (folder.home / "locks" / f"{RUN.key}.claim").touch()
    owner = folder.home / "locks" / f"{RUN.key}.claim.owner"
    progress = folder.home / "part" / RUN.key / "progress.json"
    os.mkfifo(progress)
    if said == "fifo":
        os.mkfifo(owner)
    else:
        owner.write_bytes(said.replace(b"host", isoreg.experiments.sweep._machine().encode()))
    ends(0, "status", "runs")  # whether it lives is seen from its age
    _old(owner)
    assert json.loads(ends(0, "status", "runs", "--json").stdout)["running"] == []
    with folder.lock(RUN.key):
        assert folder.is_held(RUN.key)


def test_who_looks_whether_a_run_is_held_does_not_hold_it(tmp_path):
    folder, found = Folder(tmp_path), []
    with folder.lock("run"):
        pass
    stop = threading.Event()

    def look():
        while not stop.is_set():
            found.append(folder.is_held("run"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(200):
            with folder.lock("run"):
                pass
    finally:
        stop.set()
        thread.join()
    assert len(found) > 20


def test_a_search_of_which_a_record_is_none_of_its_run():
    Path("s.yaml").write_text("axes: {seed: [100], lr: [1e-3, 2e-3]}\nfixed: {task: toy-cola}\n")
    runs = expand(load_grid("s.yaml")).runs
    whole = [RECORD | {"key": r.key, "config": r.config, "value": v} for r, v in zip(runs, (0.5, 0.7))]

    def select(*more):
        Path("r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (*whole, *more)))
        return "select", "s.yaml", "r.jsonl"

    ends(0, *select(), words=["0.7"])
    ends(0, *select(whole[0], OTHER))  # twice the same; a run of another grid
    for odd in ({"value": True}, {"value": "0.9"}, {"status": "stopped"}, {"config": runs[1].config}):
        ends(2, *select(whole[0] | odd), words=[f"that of {runs[0].key} is no record of this run"])
    ends(2, *select(whole[0] | {"value": 0.4}), words=["with the values 0.5 and 0.4; give one"])
    for value in (1e308, 10**400, None, float("nan"), float("inf")):
        whole[1]["value"] = value
        assert "0.5" in ends(0, *select()).output
    whole[1] = {"key": runs[1].key, "config": runs[1].config, "status": "failed", "error": "no", "attempts": 1}
    ends(2, *select(), words=["1 of 2 runs of s have none"])


def test_a_search_of_another_kind_of_run_is_refused_in_words():
    Path("s.yaml").write_text("notebook: landscape\naxes: {seed: [1]}\n")
    (run,) = expand(load_grid("s.yaml")).runs
    Path("r.jsonl").write_text(json.dumps({"key": run.key, "status": "done", "config": run.config}))
    ends(2, "select", "s.yaml", "r.jsonl", words=["grid: s has runs of landscape"])


def test_a_name_of_several_words_is_named():
    Path("My search.yaml").write_text("fixed: {lr: 1e-3}\naxes: {lr: [1e-3, 2e-3]}\n")
    ends(2, "sweep", "My search.yaml", "--dry-run", words=["My search: lr stands under fixed and under axes"])


def test_linked_runs_count_everywhere_and_once():
    elsewhere = _folder_with(RECORD, "elsewhere")
    Path("runs").mkdir()
    (Path("runs") / RUN.key).symlink_to(elsewhere.absolute())
    (elsewhere / "up").symlink_to(Path("runs").absolute())
    assert [f.parent.name for f in record_files("runs")] == [RUN.key] and status("runs")["done"] == [RUN.key]
    ends(0, "report", "runs")


@pytest.mark.parametrize("what", ["a file", "a link to nothing"])
def test_a_file_in_place_of_a_run_is_said_before_anything_runs(what):
    Path("runs").mkdir()
    place = Path("runs") / RUN.key
    place.write_text("notes") if what == "a file" else place.symlink_to("nowhere")
    said = ends(2, "sweep", "demo", "--out", "runs").output
    assert f"{RUN.key} is no folder, but stands in the place of a run's" in said and "worker" not in said


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ImportError("libtorch.so: failed to map segment from shared object"), 1, "the memory does not suffice"),
        (ImportError("x.so: failed to map segment from shared object: Operation not permitted"), 1, "mistake"),
        (ImportError("libgomp.so.1: cannot allocate memory in static TLS block"), 1, "mistake"),
        (OSError(27, "File too large"), 1, "a file would be too large"),
        (RuntimeError("413 Client Error: File too large for url"), 1, "mistake"),
        (ValueError("Key backend: 'x' is not a valid value for backend"), 2, "MPLBACKEND: 'x'"),
        (ValueError("this has no head"), 1, "mistake"),
        (PermissionError(13, "Permission denied", "report/summary.md"), 2, "out: Permission denied"),
    ],
)
def test_how_a_command_ends(monkeypatch, error, code, words):
    monkeypatch.setattr("isoreg.report.records.load", raises(error))
    ends(code, "report", "runs", words=[words], report="mistake" in words)


def test_the_source_is_not_called_the_place_of_the_report(monkeypatch):
    monkeypatch.setattr(
        "isoreg.report.records.load", raises(PermissionError(13, "Permission denied", "report/a/record.json"))
    )
    ends(2, "report", "report/a", words=["path: Permission denied"])


def test_cleaning_follows_no_link_in_place_of_the_sweep_or_of_a_run():
    (Path("elsewhere/sweep/part") / RUN.key).mkdir(parents=True)
    half = Path("elsewhere/K/.isoreg-writing-ab12cd34.tmp")
    half.parent.mkdir()
    _old(half.write_text("half") and half)
    for name, target in (("a/.sweep", "sweep"), ("b/K", "K")):
        Path(name).parent.mkdir()
        Path(name).symlink_to(Path("elsewhere", target).absolute())
    (Path("b/.sweep/part") / "K").mkdir(parents=True)
    assert clean("a") == [] and not Path("elsewhere/sweep/locks").exists()
    clean("b")
    assert half.exists() and (Path("elsewhere/sweep/part") / RUN.key).exists()


def test_records_that_are_read_are_not_written_over():
    record = _folder_with(RECORD) / "record.json"
    ends(2, "select", "demo", "runs", "--out", record, words=["out:", "is read here"])
    ends(2, "select", "demo", "runs", "--out", grid_path("demo"), words=["out:", "is read here"])


@pytest.mark.parametrize(
    "page, said",
    [
        ("d.svg", "Is a"),
        ("a.svg", "Too many levels of symbolic links"),
        ("x.npy/page.svg", ""),
        ("/proc/x.svg", ""),
        (LONG + ".svg", ""),
    ],
)
def test_a_page_that_cannot_be_written_is_said_before_anything_is_scored(monkeypatch, page, said):
    np.save("x.npy", X.numpy())
    Path("d.svg").mkdir()
    Path("a.svg").symlink_to("b.svg")
    Path("b.svg").symlink_to("a.svg")
    monkeypatch.setattr("isoreg.embeddings.measure_points", lambda *a, **k: pytest.fail("it was scored"))
    ends(2, "score", "x.npy", "--picture", page, words=[f"picture: {said}", page[:100]])
    if page == "a.svg":
        with pytest.raises(OSError, match="symbolic links"):
            write_atomically(page, "x")
