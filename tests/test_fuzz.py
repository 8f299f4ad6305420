"""Random command lines, grids, parameters, vectors, records, numbers and damaged checkpoints: always an exit code, and
nothing outside of the folder.

500 inputs; 10,000 with `pytest -m fuzz tests/test_fuzz.py`.
"""

import ast
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from papermill.translators import translate_parameters
from safetensors.torch import save
from typer.testing import CliRunner

import isoreg.cli
import isoreg.experiments.finetune
import isoreg.experiments.sweep
from isoreg.cli import app
from isoreg.experiments.config import PENALTIES, RunConfig, parse_set
from isoreg.files import from_yaml
from isoreg.experiments.grid import Run, expand, load_grid
from isoreg.isoscore import isoscore
from isoreg.experiments.notebook import read_progress
from isoreg.experiments.toy import toy_model_path

RUN = expand(load_grid("demo")).runs[0]
RECORD = {"key": RUN.key, "status": "done", "config": RUN.config, "metric": "m", "value": 0.5}
COMMANDS = "demo run rerun sweep select status score report tasks".split()
SIZES = {
    "command_lines": 80,
    "grids": 80,
    "parameters": 80,
    "vectors": 60,
    "files": 40,
    "records": 40,
    "numbers": 80,
    "checkpoints": 40,
}


def both(name):
    "Decorator of a property: a test of its share of 500 inputs, and one of 20 times as many that has to be asked for."

    def decorate(strategies):
        def wrap(check):
            def with_examples(n):
                quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
                return settings(max_examples=n, deadline=None, database=None, suppress_health_check=quiet)(
                    given(**strategies)(check)
                )

            globals()[f"test_{name}"] = with_examples(SIZES[name])
            globals()[f"test_many_{name}"] = pytest.mark.slow(pytest.mark.fuzz(with_examples(20 * SIZES[name])))
            return check

        return wrap

    return decorate


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    "A folder to work in, beside which nothing may change; no run starts."
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "beside").write_text("stays")
    monkeypatch.chdir(home)
    monkeypatch.setattr(isoreg.cli, "_execute", lambda *a: (_ for _ in ()).throw(OSError("no run here")))
    monkeypatch.setattr(
        isoreg.experiments.finetune, "run", lambda *a, **k: (_ for _ in ()).throw(ValueError("run: not here"))
    )
    monkeypatch.setattr(isoreg.experiments.sweep.Sweep, "work", lambda s, on_progress: None)
    yield home
    assert {p.name for p in tmp_path.iterdir()} == {"home", "beside"} and (tmp_path / "beside").read_text() == "stays"


def ends(*arguments):
    "A command ends with 0, 1 or 2, without a traceback, and nothing in it is a mistake of isoreg."
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, repr(result.exception))
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output, (arguments, result.output)
    assert "mistake of isoreg" not in result.output, (arguments, result.output, _report())
    return result


def _report():
    return "".join(f.read_text() for f in Path().glob("isoreg-error-*.txt"))


def fresh():
    "Empty the folder: hypothesis calls a test often, its fixtures once."
    for path in Path().iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


odd_texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "-", "--", "[/red]", "[bold]", "{seed}", "a" * 300, "9" * 5000, "../x", "nan", "1e999", "\x00", "é\n"]
    ),
    st.from_regex(r"[a-z_]{1,8}=[\[\]{}&*!:,.\-0-9a-z ]{0,12}", fullmatch=True),
)
names = [f"--{name.replace('_', '-')}" for name in RunConfig.model_fields]
flags = st.sampled_from([*names, "--set", "--only", "--dry-run", "--json", "--model", "--array", "--seeds"])
places = st.sampled_from(["here", "r.jsonl", "x.npy", "t.txt", "g.yaml", "nowhere", ".", "toy", "demo", "x.npy/below"])
words = st.lists(st.one_of(flags, places, odd_texts), max_size=6)


@both("command_lines")(dict(command=st.sampled_from(COMMANDS), more=words))
def _command_lines(command, more):
    fresh()
    Path("here").mkdir()
    Path("r.jsonl").write_text(json.dumps(RECORD))
    Path("t.txt").write_text("a b\n" * 3)
    Path("g.yaml").write_text("axes: {seed: 0..1}")
    np.save("x.npy", np.eye(4))
    if "--out" in more or "--data-dir" in more or command == "demo":
        more = [w for w in more if not w.startswith(("/", ".."))]
    more = [w for w in more if "toy-bert" not in w and ".." not in w and not w.startswith("/")]
    ends(command, *more)
    if "--json" not in more:
        ends(*more, command)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    odd_texts,
    st.sampled_from(["0..3", "0..99999999", "3..0", "istar", "toy-cola", "guided"]),
)
nested = st.recursive(
    scalars,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.one_of(odd_texts, st.integers()), x, max_size=4),
    max_leaves=12,
)
settings_of = st.dictionaries(st.sampled_from([*RunConfig.model_fields, "lamm"]), nested, max_size=3)
parts = st.one_of(nested, settings_of, st.lists(settings_of, max_size=2))
heads = st.sampled_from(["fixed", "axes", "include", "exclude", "blocks", "notebook", "description", "name", "odd"])
tables = st.dictionaries(heads, parts, max_size=4)
pieces = [
    "&a ",
    "*a",
    "!!timestamp ",
    "!!bool ",
    "!!python/object:os.system ",
    "[",
    "]",
    "{",
    "}",
    ": ",
    "- ",
    "\n",
    "  ",
    "x",
]
pieces += [
    "axes",
    "fixed",
    "seed",
    "0..9",
    "<<: ",
    "<<: [*a, *a]\n",
    "? ",
    "|",
    ">",
    "'",
    '"',
    "9" * 5000,
    "!!int ",
    "!!set ",
    "\t",
    "#",
    "~",
]
raw = st.lists(st.sampled_from(pieces), max_size=25).map("".join)


@both("grids")(dict(text=st.one_of(raw, tables.map(json.dumps), nested.map(json.dumps))))
def _grids(text):
    fresh()
    Path("g.yaml").write_text(text, encoding="utf-8", errors="replace")
    result = ends("sweep", "g.yaml", "--dry-run", "--out", "o")
    assert result.exit_code in (0, 2) and not Path("o").exists()
    try:
        parse_set([f"x={text}"])
    except ValueError as error:
        assert str(error).startswith("set: ")
    try:
        assert _plain(from_yaml(text))
    except ValueError:
        pass


CODE = [
    "'); import os; os._exit(1) #",
    '"""\nimport os\nos._exit(1)\n"""',
    *("\\", "\\'", "%run x", "!touch x", "{0}", "\r\n", "\u2028"),
]
hostile = st.text(max_size=12) | st.sampled_from(CODE)
values = st.one_of(scalars, hostile, st.lists(scalars | hostile, max_size=3))
odd_settings = st.dictionaries(st.sampled_from([*RunConfig.model_fields, *CODE, "__class__"]), values, max_size=2)
free = {name: hostile for name in ("model", "train_split", "eval_split")}  # whatever they say is looked up by the run
free |= {"seed": st.integers(0, 2**31), "regularizer": st.just("fuzzed"), "lam": st.floats(-9, 9)}
free["penalty_settings"] = st.dictionaries(st.sampled_from(["one", "two"]), values, max_size=2)


class Fuzzed:
    def __init__(self, lam=0.1, one=None, two=None): ...


@both("parameters")(dict(given=st.fixed_dictionaries({}, optional=free), odd=odd_settings | st.just({})))
def _parameters(given, odd):
    "What a run is given is refused, or comes out of the cell that papermill makes of it, which holds values alone."
    PENALTIES["fuzzed"] = Fuzzed
    given |= odd
    try:
        config = RunConfig.from_dict(given)
    except (ValueError, OSError):  # a path that cannot be
        return
    parameters = Run(config.key, "finetune", config.to_dict()).parameters
    cell = translate_parameters("python3", "python", parameters, "Parameters")
    assigned = ast.parse(cell).body
    assert all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) for s in assigned), cell
    found = {s.targets[0].id: ast.literal_eval(s.value) for s in assigned}
    assert RunConfig.from_dict(found).key == config.key, cell


def _plain(x):
    "YAML makes plain values only; nothing that runs."
    if isinstance(x, dict):
        return all(map(_plain, [*x, *x.values()]))
    if isinstance(x, (list, tuple, set)):
        return all(map(_plain, x))
    return x is None or type(x).__module__ in ("builtins", "datetime")


COLUMNS = {
    "bytes": [b"1.5"] * 9,
    "lists": [[1.0, 2.0, float(i**2)] for i in range(9)],
    "none": [None] * 9,
    "numbers": [float(i % 4) for i in range(9)],
    "ragged": [[1.0] * i for i in range(9)],
    "some": [None if i == 3 else [1.0, float(i)] for i in range(9)],
    "whole": list(range(9)),
    "words": ["1.5"] * 9,
}


@both("files")(
    dict(names=st.lists(st.sampled_from(sorted(COLUMNS)), max_size=4), asked=st.sampled_from([None, "lists"]))
)
@pytest.mark.filterwarnings("ignore")
def _files(names, asked):
    fresh()
    pd.DataFrame({name: COLUMNS[name] for name in names}).to_parquet("x.parquet")
    ends("score", "x.parquet", "--json", *(["--array", asked] if asked else []))
    assert os.listdir() == ["x.parquet"]


shapes = st.lists(st.integers(0, 7), max_size=3)
kinds = st.sampled_from(["f2", "f4", "f8", ">f8", "i1", "u2", "c8", "?", "U3", "O", "M8[s]", "S2", "V4"])


@both("vectors")(
    dict(
        shape=shapes,
        kind=kinds,
        suffix=st.sampled_from(["npy", "npz", "safetensors", "parquet", "txt", ""]),
        cut=st.integers(0, 200),
        junk=st.binary(max_size=20),
        whole=st.booleans(),
    )
)
def _vectors(shape, kind, suffix, cut, junk, whole):
    fresh()
    values = np.random.default_rng(0).integers(0, 9, shape)
    file = Path("x." + suffix)
    if suffix == "safetensors":
        file.write_bytes(save({"x": torch.as_tensor(values)}))
    else:
        values = values.astype(kind)
        with file.open("wb") as f:
            (np.savez if suffix == "npz" else np.save)(f, values)
    if not whole:
        content = file.read_bytes()
        file.write_bytes(content[:cut] + junk + content[cut + len(junk) :])
    before = file.read_bytes()
    result = ends("score", str(file), "--json")
    assert file.read_bytes() == before and os.listdir() == [file.name]
    if result.exit_code == 0:
        said = json.loads(result.stdout)
        assert -1e-6 <= said["isoscore"] <= 1 + 1e-6
        if whole:
            assert said["isoscore"] == pytest.approx(float(isoscore(values.astype(float))), abs=1e-3)


fields = st.sampled_from(
    [*RECORD, "isoscore", "metrics", "predictions", "resampled", "data", "loss", "others", "hardware"]
)
lines = st.one_of(
    st.dictionaries(fields, nested, max_size=4).map(lambda d: RECORD | d),
    settings_of.map(lambda d: RECORD | {"config": RUN.config | d}),
    nested,
)


@both("records")(dict(record=lines, cut=st.integers(0, 400), whole=st.booleans()))
def _records(record, cut, whole):
    fresh()
    text = json.dumps(record)
    text = text if whole else text[:cut]
    Path("r.jsonl").write_text(text + "\n")
    home = Path("runs") / RUN.key
    home.mkdir(parents=True)
    for name in ("record.json", "failed.json", "progress.json"):
        (home / name).write_text(text)
    Path("runs/.sweep").mkdir()
    Path("runs/.sweep/demo-1.json").write_text(text)
    read_progress(home / "progress.json")
    for command in (["status", "runs"], ["sweep", "demo", "--out", "runs", "--dry-run"], ["rerun", str(home)]):
        ends(*command)
    ends("select", "demo", "r.jsonl")
    assert (home / "record.json").read_text() == text and Path("r.jsonl").read_text() == text + "\n"


numbers = st.one_of(st.floats(width=64), st.sampled_from([0.0, 1.0, -1.0, 1e300, -1e300, 1e-300, math.nan, math.inf]))
clouds = st.integers(1, 5).flatmap(lambda d: st.lists(st.lists(numbers, min_size=d, max_size=d), max_size=6))


@both("numbers")(
    dict(
        cloud=clouds,
        correction=st.sampled_from([None, "gaussian", "ustat"]),
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    )
)
def _numbers(cloud, correction, dtype):
    points = torch.tensor(cloud, dtype=torch.float64).to(dtype)
    before = points.clone()
    try:
        score = isoscore(points, correction=correction)
    except ValueError as error:
        assert ": " in str(error)
    else:
        assert torch.isfinite(score) and (correction or -1e-4 <= score <= 1 + 1e-4)
    assert torch.equal(points.nan_to_num(), before.nan_to_num()) and points.dtype == dtype


odd_values = nested | st.sampled_from([0, 1, -5, 10**9, 2.5, "x", True, False, None])
SETTINGS = {
    "config.json": "architectures hidden_size num_attention_heads num_hidden_layers intermediate_size vocab_size "
    "hidden_act dtype model_type max_position_embeddings pad_token_id is_decoder is_encoder_decoder return_dict "
    "quantization_config auto_map torch_dtype torchscript output_hidden_states type_vocab_size layer_norm_eps",
    "tokenizer_config.json": "model_max_length pad_token eos_token unk_token padding_side truncation_side "
    "model_input_names tokenizer_class auto_map do_lower_case added_tokens_decoder",
}
settings_of_a_file = st.sampled_from(sorted(SETTINGS)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.dictionaries(st.sampled_from(SETTINGS[name].split()), odd_values, min_size=1, max_size=2)
    )
)
parts_of_a_model = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "idx": odd_values,
            "path": odd_values,
            "type": st.sampled_from(
                ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", "os.system", 5]
            ),
        },
    ),
    max_size=3,
)
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("bytes"), st.floats(0, 1), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("head"), st.integers(0, 200), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("text"), st.one_of(nested.map(json.dumps), odd_texts)),
    st.tuples(st.just("settings"), settings_of_a_file),
    st.tuples(st.just("ids"), st.integers(1, 10**12)),
    st.tuples(st.just("modules"), st.one_of(parts_of_a_model.map(json.dumps), odd_texts, st.just("[" * 10**5))),
    st.tuples(st.just("gone")),
)


def _further(tokenizer, step):
    "The file of a tokenizer, the later half of whose words have ids that many further on."
    words = tokenizer["model"]["vocab"]
    for word in list(words)[len(words) // 2 :]:
        words[word] += step
    return json.dumps(tokenizer)


@both("checkpoints")(dict(name=st.sampled_from(sorted(os.listdir(toy_model_path()))), damage=damages))
def _checkpoints(name, damage):
    fresh()
    shutil.copytree(toy_model_path(), "model")
    Path("t.txt").write_text("the cat sat\n" * 10)
    file = Path(f"model/{name}")
    content = file.read_bytes()
    match damage:
        case "cut", share:
            file.write_bytes(content[: int(share * len(content))])
        case "bytes", share, junk:
            at = int(share * len(content))
            file.write_bytes(content[:at] + junk + content[at + len(junk) :])
        case "head", at, junk:
            file.write_bytes(content[:at] + junk + content[at + len(junk) :])
        case "text", text:
            file.write_text(text, encoding="utf-8", errors="replace")
        case "settings", (name, changed):
            file = Path(f"model/{name}")
            file.write_text(json.dumps(json.loads(file.read_bytes()) | changed))
        case "ids", step:
            file = Path("model/tokenizer.json")
            file.write_text(_further(json.loads(file.read_bytes()), step))
        case "modules", text:
            Path("model/modules.json").write_text(text, encoding="utf-8", errors="replace")
        case _:
            file.unlink()
    before = {f.name: f.read_bytes() for f in Path("model").iterdir()}
    result = ends("score", "t.txt", "--model", "model", "--json")
    assert {f.name: f.read_bytes() for f in Path("model").iterdir()} == before
    if result.exit_code == 0:
        said = json.loads(result.stdout)
        assert all(-1e-6 <= row["isoscore"] <= 1 + 1e-6 for row in said)
