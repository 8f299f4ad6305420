"""The configurations: one field a setting, and all that is made from it."""

import ast
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from papermill import inspect_notebook

from isoreg.experiments import config as module
from isoreg.experiments.config import FisherConfig, GeometryConfig, LandscapeConfig, PretrainConfig, RunConfig
from isoreg.experiments.config import RECIPES, choices, help_text, make_penalty, method_label, parse_set
from isoreg.experiments.notebook import shipped
from isoreg.experiments.tasks import Task
from isoreg.istar import PENALTY_CLASSES

ROOT = Path(__file__).parents[1]
KINDS = (RunConfig, FisherConfig, LandscapeConfig, GeometryConfig, PretrainConfig)


def stored():
    "Configuration and key of the stored runs."
    for name in ("runs", "second", "second_further", "second_gpu", "istar_first", "base"):
        for line in (ROOT / f"nbs/results/{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            yield record["config"], record["key"]


# ---- keys
def test_stored_runs_keep_their_keys_and_read_back(project):
    runs = list(stored())
    assert len(runs) > 700
    for config, key in runs:
        read = RunConfig.from_record(config)
        assert read.key == key == RunConfig.from_record(read.to_record()).key
        assert read.to_record().items() >= config.items()


def test_the_runs_of_earlier_versions_are_found_again():
    assert [kind().key for kind in KINDS] == [
        "toy-cola-toy-bert-istar-0.1-seed0-a9b8583106",
        "fisher-toy-bert-8c5bc57458",
        "landscape-toy-bert-29fa173f7f",
        "geometry-toy-bert-92b1c5030d",
        "toy-bert-head-seed0-3d1c131b64",
    ]
    assert RunConfig(recipe="quick", lr=5e-4, max_length=64).key == RunConfig().key  # the values of the toy recipe
    config = RunConfig(max_train=64, max_eval=32, epochs=1, dropout="guided", batches="by-length")
    assert config.key == "toy-cola-toy-bert-istar-0.1-guided-seed0-8c52f27328"


@pytest.mark.parametrize("name, value", [("cosreg_layer", 2), ("out_of_memory", "halve"), ("warmup", 0.5)])
def test_a_run_that_this_version_cannot_repeat_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}: the run had {value!r}, this version always has"):
        RunConfig.from_record(RunConfig().to_record() | {name: value})


def test_a_text_on_the_hub_is_its_name_and_a_file_what_it_holds(tmp_path):
    hub = RunConfig(dropout="guided", scores="corpus:wikitext:wikitext-2-raw-v1:train")
    assert "scores_sha256" not in hub.identity() and hub.identity()["scores"] == hub.scores
    for name, settings_of in {
        "a.txt": lambda file: {"dropout": "guided", "scores": f"corpus:{file}"},
        "s.json": lambda file: {"dropout": "guided", "scores": str(file)},
        "d.json": lambda file: {"dropout": str(file)},
    }.items():
        (tmp_path / name).write_text('{"a": 0.1}\n')
        before = RunConfig(**settings_of(tmp_path / name))
        assert [len(v) for n, v in before.identity().items() if n.endswith("sha256")] == [16]
        key = before.key
        (tmp_path / name).write_text('{"a": 0.2}\n')
        assert key != before.key == RunConfig(**settings_of(tmp_path / name)).key
    (tmp_path / "d.json").unlink()
    with pytest.raises(FileNotFoundError, match="d.json"):
        before.key


def test_one_folder_has_one_key_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("data", "m", "toy-bert"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    keys = {RunConfig(task="cola", data_dir=d, model=m).key for d in ("data", "data/", "./data") for m in ("m", "m/")}
    assert len(keys) == 1
    assert RunConfig(task="cola", data_dir="~/data").key == RunConfig(task="cola", data_dir=str(tmp_path / "data")).key
    assert RunConfig(task="cola", model="./toy-bert").model == "./toy-bert"  # not the embedded one
    assert FisherConfig(model="m/").key == FisherConfig(model="m").key
    (tmp_path / "plan.json").write_text('{"bert.x": 0.1}')  # a schedule and scores are alike in form
    for name in ("scores", "dropout"):
        given = [RunConfig(**{"dropout": "guided"} | {name: path}) for path in ("plan.json", ".//plan.json")]
        assert given[0].key == given[1].key


# ---- values
@pytest.mark.parametrize("kind", KINDS)
def test_defaults_survive_json_and_every_setting_has_its_line_of_help(kind):
    config = kind()
    assert kind(**json.loads(json.dumps(config.to_dict()))).key == config.key
    for field in kind.model_fields.values():
        assert field.description and not field.description.endswith(".")
        assert help_text(field).startswith(field.description)


@pytest.mark.parametrize("name", module.CONFIGS)
def test_a_run_notebook_has_the_settings_of_its_configuration(name):
    kind, given = module.CONFIGS[name], inspect_notebook(str(shipped("runs/*.ipynb")[name]))
    values = {n: ast.literal_eval(p["default"]) for n, p in given.items() if n in kind.model_fields}
    beside = {"finetune": {"save_model"}, "mlm_head": {"evaluations"}}.get(name, set()) | {"out"}
    assert set(given) == set(kind.model_fields) | beside and kind(**values) == kind()


@pytest.mark.parametrize(
    "kind, values, words",
    [
        (RunConfig, {"lamm": 1}, "lamm: unknown setting; did you mean 'lam'?"),
        (RunConfig, {"warmup": 0.5}, "warmup: unknown setting"),  # the recipe's
        (RunConfig, {"task": "squad"}, "model: the embedded model reads 64 words; give squad"),
        (RunConfig, {"data_dir": "no/such/folder"}, "data_dir: no folder 'no/such/folder'"),
        (RunConfig, {"lam": float("nan")}, "lam: Input should be a finite number (nan)"),
        (RunConfig, {"lr": 2}, "lr: Input should be less than 1 (2)"),
        (RunConfig, {"layers": "mid", "zeta": 2}, "layers: Input should be 'union' or 'mean' ('mid')\nzeta: Input"),
        (RunConfig, {"regularizer": "istr"}, "regularizer: 'istr' is unknown; did you mean 'istar'"),
        (RunConfig, {"regularizer": "no_such:Penalty"}, "regularizer: 'no_such:Penalty' cannot be imported"),
        (RunConfig, {"length_groups": 4, "padding": True}, "length_groups: 4 leaves padding out"),
        (RunConfig, {"dropout": "guide"}, "dropout: 'guide' is unknown; did you mean 'guided'"),
        (RunConfig, {"dropout": "nowhere.json"}, "schedule: nowhere.json"),
        (RunConfig, {"dropout": "constant"}, "dropout_p: constant needs a rate"),
        (RunConfig, {"dropout_p": 0.1}, "dropout_p: has no meaning"),
        (RunConfig, {"dropout": "guided", "scores": "x.json"}, "scores: 'x.json' cannot be read"),
        (RunConfig, {"dropout": "guided", "scores": "corpus:nowhere.txt"}, "source: no file 'nowhere.txt'"),
        (RunConfig, {"dropout": "guided", "scores": "corpus: ,"}, "scores: 'corpus: ,' cannot be read"),
        (FisherConfig, {"shares": "1,x"}, "shares: String should match pattern"),
        (FisherConfig, {"shares": "33, 100"}, "shares: '33, 100'; give per cent"),
        (FisherConfig, {"model": "toy-gpt2", "loss": "mlm"}, "loss: toy-gpt2 was made for 'clm'"),
        (LandscapeConfig, {"points": 4}, "points: 4 do not hold the origin"),
        (PretrainConfig, {"heldout_share": 0.0}, "heldout_share: 0 leaves no text"),
        *((kind, {"model": "./nowhere"}, "model: no config.json in folder './nowhere'") for kind in KINDS),
        *((kind, {"seed": 2**32}, "seed: Input should be less than 4294967296") for kind in KINDS),
    ],
)
def test_what_is_wrong_is_shown_with_name_and_value(kind, values, words):
    with pytest.raises(ValueError) as error:
        kind(**values)
    assert str(error.value).startswith(words)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5))


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from([*RunConfig.model_fields, "other"]), VALUES, max_size=3))
def test_any_values_make_a_configuration_or_an_error_in_words(values):
    try:
        config = RunConfig(**values)
    except ValueError as error:
        assert type(error) is ValueError and ":" in str(error) and "validation error" not in str(error)
    else:
        again = RunConfig(**config.to_dict())
        assert again == config and again.key == config.key == RunConfig.from_record(config.to_record()).key


def test_plain_values_are_taken_as_meant():
    assert RunConfig(lr=np.float64(1e-4)).lr == 1e-4 and type(RunConfig(seed=np.int64(3)).seed) is int
    assert type(RunConfig(lam=1).lam) is float and RunConfig(layers="3").layers == 3 == RunConfig(layers=3).layers
    assert FisherConfig(shares="33, 10").percentages == [33, 10] and GeometryConfig(layers="0, -1").numbers(5) == [0, 4]
    assert [FisherConfig(shares=s).percentages for s in ("", None)] == [[], []]
    assert GeometryConfig(layers=" all ").numbers(2) == [0, 1]
    assert module.scores_texts("corpus:a.txt, b.txt,") == ["a.txt", "b.txt"] and module.scores_texts("a.txt") == []
    assert RunConfig(lr="1e-5").lr == 1e-5 and RunConfig(model=7, task="cola").model == "7"
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3


def test_words_are_those_of_the_functions():
    from isoreg import corpus, isoscore, schedules

    field = RunConfig.model_fields
    assert set(choices(field["dropout"])) == set(schedules.SCHEMES)
    assert (None, *choices(field["correction"])) == isoscore.CORRECTIONS
    assert choices(field["convention"]) == isoscore.CONVENTIONS
    assert choices(LandscapeConfig.model_fields["loss"]) == corpus.LOSSES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_all_that_is_open(recipe):
    config = RunConfig(recipe=recipe, epochs=7, lam=1.0, task="cola", model="b")
    assert RECIPES[recipe] | {"epochs": 7} == {n: config.to_record()[n] for n in RECIPES["quick"]}
    assert not config.fixed().keys() & RunConfig.model_fields.keys()
    questions = RunConfig(recipe=recipe, task="squad", model="b").to_record()
    released = {"segment_ids": True, "pad_to_max": True} if recipe == "istar-released" else {}
    assert {n: questions[n] for n in RECIPES[recipe]} == RECIPES[recipe] | {"max_length": 384} | released


@pytest.mark.parametrize(
    "kind, given, filled",
    [
        (RunConfig, {}, {"recipe": "toy", "lam": -0.1, "zeta": 0.2}),
        (RunConfig, {"regularizer": "none", "lam": 3, "zeta": 0.4, "layers": "mean"}, {"lam": 0, "layers": "union"}),
        (RunConfig, {"regularizer": "cosreg", "layers": 2, "zeta": 0.4}, {"layers": "union", "zeta": 0, "lam": 1}),
        (RunConfig, {"regularizer": "cosreg", "correction": "ustat"}, {"correction": None}),
        (RunConfig, {"correction": "gaussian", "convention": "text"}, {"zeta": 0, "convention": "released"}),
        (RunConfig, {"zeta": 1.0, "convention": "text"}, {"zeta": 0, "convention": "released"}),
        (RunConfig, {"eval_split": "validation"}, {"eval_split": None}),
        (LandscapeConfig, {"subset": "all", "share": 0.3}, {"share": 1, "fisher": None}),
        (PretrainConfig, {}, {"new_head": True, "packed": False, "lr": 5e-3, "limit": 12_000, "epochs": 1}),
        (PretrainConfig, {"corpus": "x.txt", "train_encoder": True}, {"packed": True, "limit": None, "lr": 4e-4}),
        (PretrainConfig, {"steps": 7, "epochs": 3}, {"steps": 7, "epochs": 1}),
        (PretrainConfig, {"heldout": "toy"}, {"heldout_share": 0}),
    ],
)
def test_what_is_open_is_filled_in_and_what_plays_no_part_has_one_value(kind, given, filled):
    config = kind(**given)
    assert {n: getattr(config, n) for n in filled} == filled


def test_the_released_reference_counts_only_where_a_reference_is_read():
    released = lambda **given: RunConfig(recipe="istar-released", **given).fixed()["reference"]
    assert released() == "released" and released(zeta=0) == released(regularizer="cosreg") == "exact"


def test_a_folder_of_data_counts_for_a_task_of_ones_own_that_lies_in_one(tmp_path):
    own = dict(name="tone", labels=("low", "high"), hub=("a/b", None))
    place = lambda task: RunConfig(task=task, model="x", data_dir=str(tmp_path)).data_dir
    assert place(Task(**own, folder="tone")) == str(tmp_path) == place("cola")
    assert place(Task(**own)) is None is RunConfig(data_dir=str(tmp_path)).data_dir


@pytest.mark.parametrize("name", PENALTY_CLASSES)
def test_a_run_makes_the_penalty_that_its_class_makes_by_default(name):
    penalty, plain = make_penalty(RunConfig(regularizer=name)), PENALTY_CLASSES[name](lam=1.0)
    assert type(penalty) is type(plain)
    for n in module.PenaltySettings.model_fields.keys() - {"lam", "regularizer"}:
        assert getattr(penalty, n, None) == getattr(plain, n, None), n


# ---- names and pairs
def test_method_labels_tell_the_stored_methods_apart():
    usual = {n: RunConfig.model_fields[n].default for n in module.METHOD}
    labels = {}
    for config, _ in stored():
        method = usual | {k: v for k, v in config.items() if k in usual}
        labels.setdefault(method_label(config), set()).add(str(method))
    assert "baseline" in labels and all(len(methods) == 1 for methods in labels.values()), labels


@pytest.mark.parametrize(
    "config, label",
    [
        ({}, "I-STAR λ=?"),
        ({"regularizer": "none"}, "baseline"),
        ({"lam": -1.0, "zeta": 0.5}, "I-STAR λ=-1, ζ=0.5"),
        ({"lam": -1.0, "layers": 3}, "I-STAR λ=-1, layer 3"),
        ({"lam": 1.0, "correction": "gaussian", "zeta": 0.0}, "I-STAR λ=1, corrected score (gaussian)"),
        ({"regularizer": "cosreg", "lam": 1.0, "zeta": 0.0}, "CosReg λ=1"),
        ({"regularizer": "mine:Length", "lam": 2.0}, "Length λ=2"),
        ({"regularizer": "none", "dropout": "guided", "dropout_p": 0.2}, "guided dropout p=0.2"),
        ({"regularizer": "none", "dropout": "constant", "dropout_p": 0.0}, "no dropout"),
        ({"regularizer": "none", "dropout": "guided", "scores": "out/a/full/fisher.json"}, "guided dropout scores a"),
        ({"regularizer": "none", "dropout": "rates/mine.json"}, "schedule mine"),
        ({"lam": -0.1, "dropout": "guided", "zeta": float("nan")}, "I-STAR λ=-0.1 + guided dropout"),
    ],
)
def test_a_method_is_named_by_what_is_not_the_default(config, label):
    assert method_label(config) == label and "scores" not in method_label(config, scores=False)


def test_pairs_of_a_command_line():
    pairs = ["lr=1e-5", "a=[1, 2e-3]", "b=true", "max-train=3", "d=null", "e=a=b"]
    assert parse_set(pairs) == {"lr": "1e-5", "a": [1, "2e-3"], "b": True, "max_train": 3, "d": None, "e": "a=b"}
    for pair in ("lr", "=3"):
        with pytest.raises(ValueError, match=f"set: '{pair}' is no name=value"):
            parse_set([pair])
