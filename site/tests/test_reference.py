"""The reference, the page of the commands, the pages of reproducing and the tutorials: nothing is missing, nothing is
out of date, every link has its place."""

import dataclasses
import inspect
import json
import re
import shlex
import types
from pathlib import Path

import numpy as np
import pytest
import typer
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import reference
from isoreg.cli import app
from isoreg.experiments.config import CONFIGS
from isoreg.experiments.record import RunRecord
from isoreg.experiments.toy import toy_corpus, toy_tokenizer
from pages import addresses
from reference import EXAMPLES, anchor, commands_page, entry, fields, index_page, public_names

ROOT = Path(__file__).parents[2]
NBS = ROOT / "nbs"
ROOMS = [room for room, _, _ in reference.rooms(NBS)]
PUBLIC = [(room, name, value) for room in ROOMS for name, value in public_names(room).items()]
COMMANDS = typer.main.get_command(app).commands
TUTORIALS = sorted((NBS / "tutorials").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text())["cells"]


def text(cell):
    return "".join(cell["source"])


def test_fields_of_a_record_show_their_defaults():
    shown = entry(RunRecord)._repr_markdown_()
    assert "status: Literal['done'] = 'done',  # done in every record" in shown and "setting(" not in shown


# ---- the index


def test_every_public_name_is_linked_to_its_entry_or_has_it_here():
    page, homes = index_page(NBS), {room: file for room, file, _ in reference.rooms(NBS)}
    for room, name, value in PUBLIC:
        mark = anchor(room, name)
        if f"nbs/{homes[room]}" in addresses(ROOT).pages:
            assert f"- [{name}](../{homes[room]}#{mark}): " in page, mark
            page_entry = entry(value)._repr_markdown_()
            assert f'<section id="{anchor(room, value.__name__)}" class="level2">' in page_entry
            assert "#LNone" not in page_entry
        else:
            assert f'<section id="{mark}" class="level2"><h2 hidden>{name}</h2>' in page, mark


@pytest.mark.parametrize("address", ["", "https://code.example/x"])
def test_a_link_to_the_source_needs_an_address(address):
    mark = f"[source]({address}/blob/main/isoreg/x.py){{target='_blank'}}"
    shown = types.SimpleNamespace(_repr_markdown_=lambda: mark + "\n### x")
    assert (mark in reference._Entry(shown, "")._repr_markdown_()) == bool(address)


def test_anchors_differ():
    marks = [anchor(room, value.__name__) for room, name, value in PUBLIC if name == value.__name__]
    assert len(marks) == len(set(marks)) and len({m.lower() for m in marks}) < len(marks)  # as moments and Moments


# ---- fields

CLASSES = [(f"{room}.{name}", value) for room, name, value in PUBLIC if inspect.isclass(value)]


@pytest.mark.parametrize("kind", [value for _, value in CLASSES], ids=[name for name, _ in CLASSES])
def test_a_class_shows_its_fields(kind):
    expected = [*getattr(kind, "_fields", ()), *getattr(kind, "model_fields", ())]
    if dataclasses.is_dataclass(kind):
        expected += [f.name for f in dataclasses.fields(kind) if f.init]
    assert [f.name for f in fields(kind)] == expected
    assert all(f.type for f in fields(kind))
    page = entry(kind)._repr_markdown_()
    assert re.findall(r"^    (\w+): ", page.split("```python")[1].split("```")[0], re.M) == expected or not expected
    assert not re.search(r"\(\s*\*args,\s*\*\*kwargs\s*\)", page)


def test_settings_show_what_help_says():
    for kind in (k for k in CONFIGS.values() if k.__module__.startswith("isoreg.")):  # tests of sweeps add their own
        assert all(f.text for f in fields(kind))


@pytest.mark.parametrize(
    "given, plain", [("a|b", r"a\|b"), ("`x|y`", "`x|y`"), ("S* < $n$ `<z>`", r"S\* \< \$n\$ `<z>`")]
)
def test_text_has_no_meaning_in_markdown_but_code_has(given, plain):
    assert reference._plain(given) == plain


# ---- the commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_on_the_page(name):
    section = re.search(rf"^## isoreg {name}\n(.+?)(?=^## |\Z)", commands_page(), re.M | re.S)[1]
    help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    help_text, _, settings = help_text.partition("─ Task ─")  # these are on the page of options
    page = (NBS / "guides/options.ipynb").read_text()
    assert all(f"`{option}`" in page for option in re.findall(r"(?<=[│|] )\s*(--[\w-]+)", settings))
    options = set(re.findall(r"(?<=[│|] )\s*(--[\w-]+)", help_text)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[\w-]+)[^`]*` \|", section, re.M))
    for option, kind in re.findall(r"(--[\w-]+) +(<[^>]+>)", help_text):
        assert f"`{option} {re.sub(r' range|list.|]', '', kind)}`" in section
    headings = re.findall(r"[╭+]─? (\w[\w ,-]*?) ─", help_text)
    assert [h for h in headings if h and options] == re.findall(r"^\*\*(.+)\*\*$", section, re.M)[:-1]
    for argument in (p for p in COMMANDS[name].params if p.param_type_name == "argument"):
        assert re.search(rf"`\[?{re.escape(argument.metavar or argument.name.upper())}", section)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "search"):
        (tmp_path / folder).mkdir()
    lines = [line for line in EXAMPLES[name].splitlines() if line.startswith("isoreg ")]
    assert shlex.split(lines[-1])[1] == name and EXAMPLES[name] in commands_page()
    for line in lines:
        _, command, *arguments = shlex.split(line)
        COMMANDS[command].make_context(command, arguments)


# ---- the tutorials


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_installs_on_colab_and_nowhere_else(path):
    install = cells(path)[2]
    calls = []
    for shell, expected in (("<ipykernel.zmqshell.X>", 0), ("<google.colab._shell.Shell>", 1)):

        class Shell:
            def __repr__(self, shell=shell):
                return shell

            def run_line_magic(self, *said):
                calls.append(said)

        exec(text(install), {"get_ipython": Shell})
        assert len(calls) == expected
    assert calls[0][0] == "pip" and "install -q git+" in calls[0][1]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs_on_what_is_embedded(path):
    source = "\n".join(text(c) for c in cells(path) if c["cell_type"] == "code")
    assert "toy_model_path()" in source or '"toy-bert"' in source
    assert "nbs/" not in source and "results/" not in source
    assert all(len(text(c).splitlines()) <= 25 for c in cells(path) if c["cell_type"] == "code")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_takes_what_a_reader_has(path, tmp_path, monkeypatch):
    "What a page shows runs on fewer rows than dimensions in half precision, and on a decoder without token types."
    monkeypatch.chdir(tmp_path)
    np.save("vectors.npy", np.random.default_rng(0).normal(size=(50, 768)).astype("float16"))
    Path("texts.txt").write_text("\n".join(toy_corpus(50)))
    tokenizer = toy_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for part in (tokenizer, GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **words))):
        part.save_pretrained("gpt2")
    shown = [
        text(c) for c in cells(path) if c["cell_type"] == "code" and not re.search(r"#\| (?:hide|echo: false)", text(c))
    ]
    source = "\n".join(shown).replace("toy_model_path()", "'gpt2'").replace("MaskedLM", "CausalLM")
    source = source.replace("(300), tokenizer)", "(300), tokenizer, loss='clm')")
    source = re.sub(r'load_task\("toy-cola"[^)]*', 'load_task("toy-cola", max_train=1024, max_eval=200', source)
    exec(source, {"get_ipython": str})


def test_the_front_page_leads_to_each_tutorial():
    (doors,) = [text(c) for c in cells(NBS / "index.ipynb") if "## Where to go" in text(c)]
    assert {f"tutorials/{path.name}" for path in TUTORIALS} <= set(re.findall(r"\]\(([^)]+)\)", doors))
