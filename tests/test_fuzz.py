"""Random command lines, grids, parameters, vectors and numbers: always an exit code, and nothing outside of the folder.

320 inputs; 6,400 with ISOREG_FUZZ=20.
"""

import ast
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import RECORD, ends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from papermill.translators import translate_parameters
from safetensors.torch import save

import isoreg.cli
import isoreg.experiments.finetune
import isoreg.experiments.sweep
from isoreg.experiments.config import RunConfig
from isoreg.isoscore import isoscore

COMMANDS = "demo run rerun sweep select status score report tasks".split()
SIZES = {"command_lines": 60, "grids": 60, "parameters": 60, "vectors": 60, "numbers": 80}
TIMES = int(os.environ.get("ISOREG_FUZZ", 1))


def examples(name, **strategies):
    "Decorator: try a property on its share of 320 inputs, times ISOREG_FUZZ."
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    many = settings(max_examples=TIMES * SIZES[name], deadline=None, database=None, suppress_health_check=quiet)
    return lambda check: many(given(**strategies)(check))


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
    monkeypatch.setattr(isoreg.experiments.sweep.Sweep, "work", lambda s, waiting, on_progress: None)
    yield home
    assert {p.name for p in tmp_path.iterdir()} == {"home", "beside"} and (tmp_path / "beside").read_text() == "stays"


def fresh():
    "Empty the folder: hypothesis calls a test often, its fixtures once."
    for path in Path().iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


ODD = ["", "-", "--", "[/red]", "[bold]", "{seed}", "a" * 300, "9" * 5000, "../x", "nan", "1e999", "\x00", "é\n"]
assignments = st.from_regex(r"[a-z_]{1,8}=[\[\]{}&*!:,.\-0-9a-z ]{0,12}", fullmatch=True)
odd_texts = st.one_of(st.text(max_size=12), st.sampled_from(ODD), assignments)
names = [f"--{name.replace('_', '-')}" for name in RunConfig.model_fields]
flags = st.sampled_from([*names, "--set", "--only", "--dry-run", "--json", "--model", "--array", "--seeds"])
places = st.sampled_from(["here", "r.jsonl", "x.npy", "t.txt", "g.yaml", "nowhere", ".", "toy", "demo", "x.npy/below"])
words = st.lists(st.one_of(flags, places, odd_texts), max_size=6)


@examples("command_lines", command=st.sampled_from(COMMANDS), more=words)
def test_command_lines(command, more):
    fresh()
    Path("here").mkdir()
    Path("r.jsonl").write_text(json.dumps(RECORD))
    Path("t.txt").write_text("a b\n" * 3)
    Path("g.yaml").write_text("axes: {seed: 0..1}")
    np.save("x.npy", np.eye(4))
    if "--out" in more or "--data-dir" in more or command == "demo":
        more = [w for w in more if not w.startswith(("/", ".."))]
    more = [w for w in more if "toy-bert" not in w and ".." not in w and not w.startswith("/")]
    ends((0, 1, 2), command, *more)
    if "--json" not in more:
        ends((0, 1, 2), *more, command)


WORDS = ["0..3", "0..99999999", "3..0", "istar", "toy-cola", "guided"]
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), odd_texts, st.sampled_from(WORDS))
nested = st.recursive(
    scalars,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.one_of(odd_texts, st.integers()), x, max_size=4),
    max_leaves=12,
)
settings_of = st.dictionaries(st.sampled_from([*RunConfig.model_fields, "lamm"]), nested, max_size=3)
parts = st.one_of(nested, settings_of, st.lists(settings_of, max_size=2))
heads = st.sampled_from(["fixed", "axes", "exclude", "blocks", "notebook", "description", "name", "odd"])
tables = st.dictionaries(heads, parts, max_size=4)
PIECES = (
    "&a ¦*a¦!!timestamp ¦!!bool ¦!!python/object:os.system ¦[¦]¦{¦}¦: ¦- ¦\n¦  ¦x¦axes¦fixed¦seed¦0..9¦<<: ¦? ¦|¦>¦'"
)
pieces = [*PIECES.split("¦"), "<<: [*a, *a]\n", '"', "9" * 5000, "!!int ", "!!set ", "\t", "#", "~"]
raw = st.lists(st.sampled_from(pieces), max_size=25).map("".join)


@examples("grids", text=st.one_of(raw, tables.map(json.dumps), nested.map(json.dumps)))
def test_grids(text):
    fresh()
    Path("g.yaml").write_text(text, encoding="utf-8", errors="replace")
    ends((0, 2), "sweep", "g.yaml", "--dry-run", "--out", "o")
    assert not Path("o").exists()


CODE = ["'); import os; os._exit(1) #", '"""\nimport os\nos._exit(1)\n"""']
CODE += ["\\", "\\'", "%run x", "!touch x", "{0}", "\r\n", "\u2028"]
hostile = st.text(max_size=12) | st.sampled_from(CODE)
values = st.one_of(scalars, hostile, st.lists(scalars | hostile, max_size=3))
odd_settings = st.dictionaries(st.sampled_from([*RunConfig.model_fields, *CODE, "__class__"]), values, max_size=2)
free = {name: hostile for name in ("model", "train_split", "eval_split")}  # whatever they say is looked up by the run
free |= {"seed": st.integers(0, 2**31), "lam": st.floats(-9, 9), "layers": st.sampled_from(["mean", 3])}


@examples("parameters", given=st.fixed_dictionaries({}, optional=free), odd=odd_settings | st.just({}))
def test_parameters(given, odd):
    "What a run is given is refused, or comes out of the cell that papermill makes of it, which holds values alone."
    given |= odd
    try:
        config = RunConfig(**given)
    except (ValueError, OSError):  # a path that cannot be
        return
    parameters = config.to_dict()
    cell = translate_parameters("python3", "python", parameters, "Parameters")
    assigned = ast.parse(cell).body
    assert all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) for s in assigned), cell
    found = {s.targets[0].id: ast.literal_eval(s.value) for s in assigned}
    assert RunConfig(**found).key == config.key, cell


shapes = st.lists(st.integers(0, 7), max_size=3)
kinds = st.sampled_from(["f2", "f4", "f8", ">f8", "i1", "u2", "c8", "?", "U3", "O", "M8[s]", "S2", "V4"])


suffixes = st.sampled_from(["npy", "npz", "safetensors", "parquet", "txt", ""])
damage = dict(cut=st.integers(0, 200), junk=st.binary(max_size=20), whole=st.booleans())


@examples("vectors", shape=shapes, kind=kinds, suffix=suffixes, **damage)
def test_vectors(shape, kind, suffix, cut, junk, whole):
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
    result = ends((0, 1, 2), "score", file, "--json")
    assert file.read_bytes() == before and os.listdir() == [file.name]
    if result.exit_code == 0:
        ((said,),) = json.loads(result.stdout)["scores"].values()
        assert -1e-6 <= said["plain"] <= 1 + 1e-6
        if whole:
            assert said["plain"] == pytest.approx(float(isoscore(values.astype(float))), abs=1e-3)


numbers = st.one_of(st.floats(width=64), st.sampled_from([0.0, 1.0, -1.0, 1e300, -1e300, 1e-300, math.nan, math.inf]))
clouds = st.integers(1, 5).flatmap(lambda d: st.lists(st.lists(numbers, min_size=d, max_size=d), max_size=6))


dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@examples("numbers", cloud=clouds, correction=st.sampled_from([None, "gaussian", "ustat"]), dtype=dtypes)
def test_numbers(cloud, correction, dtype):
    points = torch.tensor(cloud, dtype=torch.float64).to(dtype)
    before = points.clone()
    try:
        score = isoscore(points, correction=correction)
    except ValueError as error:
        assert ": " in str(error)
    else:
        assert torch.isfinite(score) and (correction or -1e-4 <= score <= 1 + 1e-4)
    assert torch.equal(points.nan_to_num(), before.nan_to_num()) and points.dtype == dtype
