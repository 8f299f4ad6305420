"""What comes from elsewhere does no harm: checkpoints, records, vectors and names; bad input ends in one line."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command import RECORD, RUN, ends as command_ends
from transformers import AutoConfig

from isoreg.experiments.models import load_tokenizer, pretrained, read_body
from isoreg.experiments.toy import toy_model_path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ends(code, *arguments, words=()):
    result = command_ends([code], *arguments)
    assert all(word in result.output for word in words), result.output
    return result


def broken_model(change):
    shutil.copytree(toy_model_path(), "model")
    change(Path("model"))


def written(name, **more):
    "A change of the JSON file of a model."
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | more))


DAMAGES = [
    lambda d: (d / "config.json").write_text('{"model_type": '),
    written("config.json", hidden_size="x"),
    lambda d: os.truncate(d / "model.safetensors", 2000),
    lambda d: os.truncate(d / "model.safetensors", 0),
    lambda d: ((d / "model.safetensors").unlink(), (d / "pytorch_model.bin").write_bytes(b"\x80\x04junk")),
    lambda d: (d / "tokenizer.json").write_text("[]"),
    lambda d: (d / "tokenizer.json").unlink(),
]


@pytest.mark.parametrize("change", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_its_name(change):
    Path("t.txt").write_text("the cat\n" * 10)
    broken_model(change)
    ends(2, "score", "--texts", "t.txt", "--model", "model", words=["error: ", "model"])


def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked"))
    classes = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", None]}
    broken_model(written("config.json", model_type="evil", auto_map=classes))
    Path("model/evil.py").write_text("open('ran', 'w')")
    Path("model/tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    for call in (partial(pretrained, AutoConfig), read_body, load_tokenizer):
        with pytest.raises(ValueError, match="model"):
            call("model")
    assert not Path("ran").exists()


def test_a_checkpoint_in_pickle_is_not_unpickled():
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("ran",)

    broken_model(lambda d: ((d / "model.safetensors").unlink(), torch.save(Evil(), d / "pytorch_model.bin")))
    Path("t.txt").write_text("the cat\n" * 10)
    np.save("x.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    ends(2, "score", "--texts", "t.txt", "--model", "model")
    ends(2, "score", "x.npy")
    assert not Path("ran").exists()


DAMAGED = ["", "{", json.dumps(RECORD)[:80], "null", "[]", '{"key": 1}']
DAMAGED += [json.dumps(RECORD | {"config": config}) for config in ([1], {"definition": 3})]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_record_is_a_run_to_do_and_no_record_to_read(text):
    folder = Path("runs") / RUN.key
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(text)
    ends(0, "status", "runs")
    assert f"missing {RUN.key}" in ends(0, "sweep", "demo", "--out", "runs", "--dry-run").output
    ends(2, "report", "runs", words=["no record"])
    ends(2, "rerun", folder / "record.json", words=["error: "])


@pytest.mark.parametrize("out", ["/proc/nothing", "file/below", "a" * 300])
def test_a_folder_that_cannot_be_is_one_line(out):
    Path("file").touch()
    for command in (["run"], ["sweep", "demo"]):
        ends(2, *command, "--out", out, words=["error: "])


def failed(error):
    Path(RUN.key).mkdir()
    (Path(RUN.key) / "failed.json").write_text(json.dumps({"key": RUN.key, "error": error, "config": RUN.config}))


@pytest.mark.parametrize("odd", ["[/red]", "{x}", ":smile:", "a\nb"])
def test_markup_in_names_is_printed_as_it_is(odd):
    for command in (["score", odd], ["run", "--task", odd], ["sweep", odd], ["report", odd]):
        assert odd.split("\n")[0] in ends(2, *command).output
    failed(odd)
    assert odd.split("\n")[0] in ends(0, "status", ".").output


def test_what_a_file_holds_is_no_command_to_the_terminal():
    failed("\x1b]0;title\x07 \x1b[2Jgone")
    said = ends(0, "status", ".").stdout + ends(2, "score", "\x1b[2Jx.npy").stderr
    assert "\x1b]0" not in said and "\x1b[2J" not in said and r"\x1b[2J" in said
