"""The configurations: one line a setting, and all that is made from it."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import given, settings
from papermill import inspect_notebook

from isoreg.experiments import config as module
from isoreg.experiments.config import (
    RECIPES,
    FisherConfig,
    GeometryConfig,
    LandscapeConfig,
    PretrainConfig,
    RunConfig,
    choices,
    config_schema,
    groups,
    help_text,
    kinds,
    method_label,
    option,
    options_table,
    parameter_cell,
    parse_set,
)
from isoreg.experiments.notebook import run_notebook_path
from isoreg.experiments.tasks import Task

ROOT = Path(__file__).parents[1]
KINDS = (RunConfig, FisherConfig, LandscapeConfig, GeometryConfig, PretrainConfig)


def stored(*names):
    "Records of the project whose files are here."
    for name in names:
        for line in (ROOT / "nbs/results" / name).read_text().splitlines():
            yield json.loads(line)


def test_no_torch_is_imported():
    code = "import sys, isoreg.experiments.config as c; c.RunConfig; c.method_label({}); print('torch' in sys.modules, 'transformers' in sys.modules)"  # noqa: E501
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


class Longer(RunConfig):
    "A configuration with one setting more."

    group = "Dropout"
    burst: int = option(3, "sites that drop out together", ge=1, before=3, family="burst")


def test_a_new_setting_is_one_line_and_seen_everywhere():
    assert Longer().key == RunConfig().key and Longer(burst=4).key != RunConfig().key
    assert Longer.from_record(RunConfig().to_dict()).burst == 3
    assert config_schema(Longer)["properties"]["burst"] == {
        "type": "integer",
        "minimum": 1,
        "description": "sites that drop out together",
    }
    assert "| `--burst` | 3 | sites that drop out together (1 or more) |" in options_table(Longer)
    (line,) = [x for x in parameter_cell(Longer).splitlines() if x.startswith("burst")]
    assert line == "burst: int = 3".ljust(32) + "  # sites that drop out together"
    assert list(groups(Longer)["Dropout"])[-1] == "burst"
    from isoreg.cli import _takes_settings

    @_takes_settings(Longer)
    def command(given: dict):
        return given

    assert "burst" in inspect.signature(command).parameters and command(
        burst=5, **dict.fromkeys(n for n in inspect.signature(command).parameters if n != "burst")
    ) == {"burst": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_survive_json_the_parameter_cell_and_the_schema(kind):
    config = kind()
    assert kind.from_dict(json.loads(json.dumps(config.to_dict()))).key == config.key
    space = {}
    exec(parameter_cell(kind), space)
    assert kind(**{n: space[n] for n in kind.model_fields}) == config
    jsonschema.validate(
        config.to_dict(), config_schema(kind) | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    )


@pytest.mark.parametrize(
    "name, kind, beside",
    [
        ("finetune", RunConfig, {"save_model"}),
        ("fisher", FisherConfig, set()),
        ("landscape", LandscapeConfig, set()),
        ("geometry", GeometryConfig, set()),
        ("mlm_head", PretrainConfig, {"evaluations", "checkpoint_steps"}),
    ],
)
def test_a_run_notebook_has_the_settings_of_its_configuration_as_papermill_reads_them(name, kind, beside):
    given = {n: ast.literal_eval(p["default"]) for n, p in inspect_notebook(str(run_notebook_path(name))).items()}
    assert set(given) == set(kind.model_fields) | beside | {"out"}
    assert kind.from_dict({n: value for n, value in given.items() if n in kind.model_fields}) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_says_what_it_is(kind):
    for name, field in kind.model_fields.items():
        assert field.description and not field.description.endswith("."), name
        assert help_text(field).startswith(field.description)


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_takes_a_wrong_word_or_another_type(kind):
    for name, field in kind.model_fields.items():
        wrong = "zz" if choices(field) or str not in kinds(field) else True
        with pytest.raises(ValueError, match=f"^{name}: {wrong!r} is (unknown; use|not )"):
            kind(**{name: wrong})


@pytest.mark.parametrize(
    "kind, values, words",
    [
        (RunConfig, {"lamm": 1}, "lamm: unknown parameter; did you mean lam?"),
        (RunConfig, {"zzz": 1}, "zzz: unknown parameter; known are task"),
        (RunConfig, {"task": "colla"}, "task: 'colla' is unknown; did you mean 'cola'?"),
        (RunConfig, {"task": "squad"}, "model: the embedded model reads 64 words; give squad"),
        (RunConfig, {"model": " "}, "model: is empty"),
        (RunConfig, {"data_dir": "no/such/folder"}, "data_dir: no folder 'no/such/folder'"),
        (RunConfig, {"lam": "high"}, "lam: 'high' is not float; give a number"),
        (RunConfig, {"lam": float("nan")}, "lam: nan is not a finite number"),
        (RunConfig, {"clip": float("inf")}, "clip: inf is not a finite number"),
        (RunConfig, {"lr": 2}, "lr: 2 is out of range; need more than 0, less than 1; 1e-5"),
        (RunConfig, {"zeta": 1.5}, "zeta: 1.5 is out of range; need 0 to 1"),
        (RunConfig, {"regularizer": "cosreg", "zeta": 2.0}, "zeta: 2.0 is out of range"),  # though it plays no part
        (RunConfig, {"correction": "ustat", "reference_points": 1}, "reference_points: 1 is out of range"),
        (RunConfig, {"seed": True}, "seed: True is not int; give a whole number"),
        (RunConfig, {"seed": 1.0}, "seed: 1.0 is not int"),
        (RunConfig, {"batch_size": 2.5}, "batch_size: 2.5 is not int"),
        (RunConfig, {"padding": 1}, "padding: 1 is not bool; give True or False"),
        (RunConfig, {"layers": "middle"}, "layers: 'middle' is unknown"),
        (RunConfig, {"layers": 1.5}, "layers: 1.5 is not str or int; give text or a whole number"),
        (RunConfig, {"recipe": "quik"}, "recipe: 'quik' is unknown; did you mean quick?"),
        (RunConfig, {"regularizer": "istr"}, "regularizer: 'istr' is unknown; did you mean istar?"),
        (RunConfig, {"length_groups": 4, "padding": True}, "length_groups: 4 leaves padding out"),
        (RunConfig, {"length_groups": 4, "task": "squad", "model": "x"}, "length_groups: 4 with task squad"),
        (RunConfig, {"dropout": "nowhere.json"}, "schedule: nowhere.json"),
        (RunConfig, {"dropout": "constant"}, "dropout_p: constant needs a rate"),
        (RunConfig, {"dropout_p": 0.1}, "dropout_p: has no meaning"),
        (RunConfig, {"dropout": "guided", "p_min": 0.2}, "p_min: 0.2 is above p_max 0.1"),
        (RunConfig, {"dropout": "guided", "p_max": -0.1}, "p_max: -0.1 is out of range"),
        (RunConfig, {"scores": "x.json"}, "scores: has no meaning for dropout 'standard'"),
        (RunConfig, {"dropout": "guided", "scores": "x.json"}, "scores: 'x.json' cannot be read"),
        (FisherConfig, {"share": 0.1}, "share: unknown parameter; did you mean shares?"),
        (FisherConfig, {"span": 0.5}, "span: 0.5 is out of range"),
        (LandscapeConfig, {"points": 4}, "points: 4 do not hold the origin"),
        (LandscapeConfig, {"fisher": "nowhere"}, "scores: 'nowhere'"),
        (GeometryConfig, {"layers": "first"}, "layers: 'first' is no list"),
        (GeometryConfig, {"layers": ""}, "layers: '' is no list"),
        (PretrainConfig, {"corpus": ""}, "corpus: is empty"),
        *((kind, {"model": "./nowhere"}, "model: no config.json in folder './nowhere'") for kind in KINDS),
    ],
)
def test_what_is_wrong_is_told_with_name_value_and_remedy(kind, values, words):
    with pytest.raises(ValueError) as error:
        kind(**values)
    assert str(error.value).startswith(words)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from([*RunConfig.model_fields, "other"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-3, 3),
            st.floats(),
            st.text(max_size=5),
            st.lists(st.integers(), max_size=2),
        ),
        max_size=3,
    )
)
def test_any_values_make_a_configuration_or_an_error_in_words(values):
    try:
        config = RunConfig(**values)
    except ValueError as error:
        assert type(error) is ValueError and ":" in str(error) and "validation error" not in str(error)
    else:
        assert RunConfig(**config.to_dict()) == config and RunConfig(**config.to_dict()).key == config.key


def test_plain_values_are_taken_as_meant():
    import numpy as np

    assert RunConfig(lr=np.float64(1e-4)).lr == 1e-4 and type(RunConfig(seed=np.int64(3)).seed) is int
    assert (
        type(RunConfig(lam=1).lam) is float
        and RunConfig(layers="3").layers == 3
        and RunConfig(data_dir="").data_dir is None
    )
    with pytest.raises(ValueError, match="frozen|immutable"):
        RunConfig().seed = 3


def test_each_recipe_fills_all_that_is_open():
    for name, recipe in RECIPES.items():
        values = RunConfig(recipe=name, epochs=7, regularizer="istar").to_dict()
        assert {k: values[k] for k in recipe} == recipe | {"epochs": 7}
        assert set(recipe) == set(RECIPES["quick"])


def test_words_are_those_of_the_functions():
    from isoreg import corpus, dropout, isoscore, landscape, schedules
    from isoreg.experiments import data

    field = RunConfig.model_fields
    assert set(choices(field["dropout"])) == set(schedules.SCHEMES)
    assert (
        choices(field["aggregate"]) == dropout.AGGREGATES
        and (None, *choices(field["correction"])) == isoscore.CORRECTIONS
    )
    assert choices(field["convention"]) == isoscore.CONVENTIONS and choices(field["split_protocol"]) == data.PROTOCOLS
    field = LandscapeConfig.model_fields
    assert (
        choices(field["loss"]) == corpus.LOSSES
        and choices(field["one_d"]) == landscape.ONE_D
        and choices(field["norm"]) == landscape.NORMS
    )
    assert choices(field["subset"]) == ("all", *landscape.WHICH)
    assert set(module.GUIDED) == {"guided", *schedules.CONTROLS}


def test_method_labels_tell_the_stored_methods_apart():
    usual = {n: RunConfig.model_fields[n].default for n in module.METHOD}
    labels = {}
    for record in stored("runs.jsonl", "second.jsonl", "second_further.jsonl", "second_gpu.jsonl", "istar_first.jsonl"):
        method = usual | {k: v for k, v in record["config"].items() if k in usual}
        labels.setdefault(method_label(record["config"]), set()).add(str(method))
    assert "base" in labels and all(len(methods) == 1 for methods in labels.values()), labels
    assert (
        method_label({"regularizer": "none"}) == "base"
        and method_label({"regularizer": "mine", "lam": 2}) == "mine λ=2"
    )


@pytest.mark.parametrize(
    "pair, value",
    [
        ("lr=1e-5", {"lr": 1e-5}),
        ("a=[1, 2e-3]", {"a": [1, 2e-3]}),
        ("b=true", {"b": True}),
        ("c=by-length", {"c": "by-length"}),
        ("d=null", {"d": None}),
        ("f='a #1'", {"f": "a #1"}),
        ("e=a=b", {"e": "a=b"}),
    ],
)
def test_pairs_of_a_command_line(pair, value):
    assert parse_set([pair]) == value


@pytest.mark.parametrize(
    "pairs, message",
    [
        (["max_train="], "set: 'max_train=' is no name=value"),
        (["model=m/my model #1"], "what follows # would be lost as a comment"),
        (["max-train=1", "max_train=2"], "max_train is given twice"),
    ],
)
def test_pairs_that_would_lose_something_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        parse_set(pairs)


def test_pair_without_a_name_is_refused():
    for pair in ("lr", "=3"):
        with pytest.raises(ValueError, match="no name=value"):
            parse_set([pair])


@pytest.mark.parametrize(
    "kind, name, good, bad",
    [
        (PretrainConfig, "limit", (2, 3), (1, 0)),
        (LandscapeConfig, "points", (3, 21), (2, 20)),
        (RunConfig, "adam_epsilon", (1e-8, 1e-6), (0.0, -1e-8)),
        (RunConfig, "dropout_p", (0.0, 0.5), (-0.1, 1.0)),
        (RunConfig, "train_fraction", (0.1, 1.0), (0.0, 1.1)),
        (RunConfig, "warmup", (0.0, 0.06, 1.0), (-0.1, 1.1)),
        (PretrainConfig, "warmup", (0.0, 0.06, 1.0), (-0.1, 1.1)),
        (PretrainConfig, "batch_size", (1, 32), (0, -1)),
        (FisherConfig, "shares", ("99.9,0.1", ""), ("100,5", "200", "0", "-1", "1,x")),
        *((kind, "limit", (2,), (0,)) for kind in KINDS[1:]),
        *((kind, "batch_size", (1,), (0,)) for kind in KINDS),
        (RunConfig, "epochs", (1,), (0,)),
        (RunConfig, "length_groups", (1,), (0,)),
        (RunConfig, "lr", (1e-5,), (-1e-5, 0.0, 1.0)),
        (FisherConfig, "draws", (1,), (0,)),
        (LandscapeConfig, "share", (1.0,), (0.0,)),
        (GeometryConfig, "points", (3,), (2,)),
        (PretrainConfig, "steps", (1,), (0,)),
        (PretrainConfig, "lr", (1e-3,), (0.0, 2.0)),
        (PretrainConfig, "probability", (0.15,), (0.0, 1.0)),
        (PretrainConfig, "heldout_share", (0.5,), (1.0,)),
    ],
)
def test_bounds_are_where_they_are_said_to_be(kind, name, good, bad):
    for value in good:
        assert getattr(kind(**{name: value, **({"dropout": "constant"} if name == "dropout_p" else {})}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"{name}: "):
            kind(**{name: value, **({"dropout": "constant"} if name == "dropout_p" else {})})


def test_the_value_that_all_had_before_makes_no_other_key():
    assert RunConfig(adam_epsilon=1e-8).key == RunConfig().key != RunConfig(adam_epsilon=1e-6).key


# ---- what a change to the code showed that no test held


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_are_those_that_numpy_takes(kind):
    assert kind(seed=2**32 - 1).seed == 2**32 - 1 and kind(seed=0).seed == 0
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed: {seed} is out of range"):
            kind(seed=seed)


@pytest.mark.parametrize("name, settings_of_its_own", [("istar", {}), ("cosreg", {"layer": "cosreg_layer"})])
def test_a_run_makes_the_penalty_that_its_class_makes_by_default(name, settings_of_its_own):
    config = RunConfig(regularizer=name)
    its = inspect.signature(module.PENALTIES.find(name)).parameters
    shared = {n: settings_of_its_own.get(n, n) for n in its if settings_of_its_own.get(n, n) in RunConfig.model_fields}
    assert {"lam", *settings_of_its_own} <= set(shared)
    for n, setting in shared.items():
        if its[n].default is not inspect.Parameter.empty:
            assert getattr(config, setting) == its[n].default, n


def test_a_maker_has_the_settings_that_can_be_given_by_name_and_its_sites_are_none():
    def maker(sites, /, width=1.0, *rest, **more): ...

    assert list(module.reads(maker, "dropout")[1]) == ["width"]
    assert list(module.reads(lambda sites, depth=1: None, "dropout")[1]) == ["depth"]


@pytest.mark.parametrize("value, kept", [(0.5, {"width": 0.5}), (2.0, {"width": 2.0}), (1.0, {})])
def test_settings_of_a_plug_in_on_both_sides_of_the_default_are_kept(value, kept):
    assert module._own_settings("dropout", lambda sites, width=1.0: None, {"width": value}) == kept


@pytest.mark.parametrize(
    "config, label",
    [
        ({}, "I-STAR λ=?"),
        ({"lam": -1.0, "zeta": 0.5}, "I-STAR λ=-1, ζ=0.5"),
        ({"lam": 0.1234567}, "I-STAR λ=0.1234567"),
        ({"lam": 0.1 + 0.2, "zeta": 0.1234567}, "I-STAR λ=0.30000000000000004, ζ=0.1234567"),
        ({"lam": 1e-05}, "I-STAR λ=1e-05"),
        ({"lam": -1.0, "layers": "mean"}, "I-STAR λ=-1, mean of layers"),
        ({"lam": -1.0, "layers": 3}, "I-STAR λ=-1, layer 3"),
        ({"lam": 1.0, "correction": "gaussian", "zeta": 0.0}, "I-STAR λ=1, corrected score (gaussian)"),
        ({"lam": -5.0, "convention": "text"}, "I-STAR λ=-5, ζ weighs the sample"),
        ({"lam": -1.0, "reference_points": 1000}, "I-STAR λ=-1, 1000 reference points"),
        ({"lam": 1.0, "padding": True}, "I-STAR λ=1, padding counted"),
        ({"lam": 1.0, "padding": False}, "I-STAR λ=1"),
        ({"regularizer": "cosreg", "lam": 1.0, "cosreg_layer": 2, "zeta": 0.0}, "CosReg λ=1, layer 2"),
        ({"regularizer": "mine", "lam": 2.0, "penalty_settings": {"a": 2, "b": "c"}}, "mine λ=2, a 2, b c"),
        ({"regularizer": "mine", "lam": 1.0, "zeta": 0.8, "penalty_settings": {}}, "mine λ=1, ζ=0.8"),
        ({"regularizer": "none", "dropout": "guided"}, "guided dropout"),
        ({"regularizer": "none", "dropout": "guided", "p_max": 0.2}, "guided dropout p 0 to 0.2"),
        ({"regularizer": "none", "dropout": "guided", "p_min": 0.05}, "guided dropout p 0.05 to 0.1"),
        ({"regularizer": "none", "dropout": "constant", "dropout_p": 0.0}, "dropout p=0"),
        ({"regularizer": "none", "dropout": "reversed", "aggregate": "sum"}, "guided reversed sum of tensors"),
        ({"regularizer": "none", "dropout": "guided", "scores": "out/a/full/fisher.json"}, "guided dropout scores a"),
        ({"regularizer": "none", "dropout": "rates/mine.json"}, "schedule mine"),
        ({"regularizer": "none", "dropout": "mine", "dropout_settings": {"width": 2}}, "mine width 2"),
        ({"lam": -0.1, "dropout": "guided", "zeta": float("nan")}, "I-STAR λ=-0.1 + guided dropout"),
    ],
)
def test_a_method_is_named_by_what_is_not_the_default(config, label):
    assert method_label(config) == label


def test_scores_are_named_where_they_are_asked_for():
    config = {"regularizer": "none", "dropout": "guided", "scores": "a/b.json"}
    assert method_label(config).endswith("scores b") and method_label(config, scores=False) == "guided dropout"


@pytest.mark.parametrize("model, recipe", [("toy-bert", "toy"), ("abert", "quick"), ("zbert", "quick")])
def test_only_the_embedded_model_has_the_recipe_for_it(model, recipe):
    assert RunConfig(model=model, task="cola").recipe == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_question_answering_is_read_as_its_authors_read_it(recipe):
    config = RunConfig(task="squad", model="bert-base-cased", recipe="".join(recipe))
    released = {"segment_ids": True, "pad_to_max": True} if recipe == "istar-released" else {}
    assert {n: getattr(config, n) for n in RECIPES[recipe]} == RECIPES[recipe] | {"max_length": 384} | released
    assert RunConfig(task="cola", model="bert-base-cased", recipe=recipe).max_length == RECIPES[recipe]["max_length"]


@pytest.mark.parametrize(
    "given, filled",
    [
        ({}, {"new_head": True, "packed": False, "lr": 5e-3, "limit": 12_000, "epochs": 1, "heldout_share": 0.02}),
        ({"model": "x"}, {"new_head": False}),
        ({"model": "a"}, {"new_head": False}),
        ({"model": "x", "new_head": True}, {"new_head": True}),
        ({"new_head": False}, {"new_head": False}),
        ({"corpus": "x.txt"}, {"packed": True, "limit": None}),
        ({"corpus": "a.txt", "packed": False, "limit": 5}, {"packed": False, "limit": 5}),
        ({"packed": True}, {"packed": True}),
        ({"train_encoder": True}, {"lr": 4e-4}),
        ({"train_encoder": True, "lr": 1e-3}, {"lr": 1e-3}),
        ({"steps": 7, "epochs": 3}, {"steps": 7, "epochs": 1}),
        ({"epochs": 3}, {"steps": None, "epochs": 3}),
        ({"heldout": "toy"}, {"heldout_share": 0.0}),
        ({"heldout": "toy", "heldout_share": 0.0}, {"heldout_share": 0.0}),
        ({"heldout_share": 0.5}, {"heldout_share": 0.5}),
    ],
)
def test_what_a_pretraining_leaves_open_is_filled_in(given, filled):
    config = PretrainConfig(**given)
    assert {n: getattr(config, n) for n in filled} == filled


@pytest.mark.parametrize(
    "given, settled",
    [
        (
            {"regularizer": "none", "lam": 3.0, "zeta": 0.4, "layers": "mean"},
            {"lam": 0.0, "zeta": 0.0, "layers": "union"},
        ),
        ({"regularizer": "cosreg", "layers": 2, "zeta": 0.4}, {"layers": "union", "zeta": 0.0, "lam": 1.0}),
        ({"regularizer": "cosreg", "cosreg_layer": 2}, {"cosreg_layer": 2}),
        ({"regularizer": "istar", "cosreg_layer": 2}, {"cosreg_layer": -1, "lam": -0.1, "zeta": 0.2}),
        ({"regularizer": "istar", "zeta": 0.0, "reference_points": 2000}, {"zeta": 0.0, "reference_points": 250_000}),
        ({"regularizer": "istar", "zeta": 1.0, "reference_points": 2000}, {"zeta": 1.0, "reference_points": 2000}),
        ({"correction": "ustat", "reference": "released"}, {"correction": "ustat", "zeta": 0.0, "reference": "exact"}),
        ({"dropout": "standard", "p_max": 0.3, "aggregate": "sum"}, {"p_max": 0.1, "aggregate": "mean_of_means"}),
        ({"dropout": "guided", "p_max": 0.3, "p_min": 0.2, "aggregate": "sum"}, {"p_max": 0.3, "p_min": 0.2}),
        ({"dropout": "mixout", "dropout_p": 0.9, "p_min": 0.05}, {"dropout_p": 0.9, "p_min": 0.0}),
        ({"eval_split": "validation"}, {"eval_split": None}),
        ({"eval_split": "train"}, {"eval_split": "train"}),
    ],
)
def test_what_plays_no_part_has_one_value(given, settled):
    config = RunConfig(**given)
    assert {n: getattr(config, n) for n in settled} == settled


@pytest.mark.parametrize(
    "kind, name, text",
    [
        (RunConfig, "lam", "strength; without it -0.1 for istar, 1 for the others"),
        (RunConfig, "seed", "of head, order, dropout and masks (0 or more; default 0)"),
        (RunConfig, "zeta", "istar: weight of the reference covariance (0 to 1; default 0.2)"),
        (
            RunConfig,
            "correction",
            "istar: the score corrected for the number of tokens, without a reference (gaussian, ustat)",
        ),
        (RunConfig, "lr", "largest learning rate (more than 0, less than 1)"),
        (PretrainConfig, "heldout_share", "of the texts of each source (0 or more, less than 1; default 0.02)"),
        (LandscapeConfig, "hessian", "curvature by Hessian-vector products beside the fit (default true)"),
    ],
)
def test_help_gives_words_range_and_default(kind, name, text):
    assert help_text(kind.model_fields[name]) == text


def test_the_page_of_options_gives_flags_or_names():
    rows = options_table(GeometryConfig).splitlines()
    assert rows[:3] == ["| setting | default | meaning |", "|:--|:--|:--|", "| **Text** | | |"]
    assert "| `--set precision=` | fp32 | of the arithmetic (fp32, bf16) |" in rows
    assert "| `--max-length` | 128 | tokens of a sequence (4 or more) |" in rows
    assert "| `max_length` | 128 | tokens of a sequence (4 or more) |" in options_table(GeometryConfig, False)


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "--task toy-cola --model toy-bert --seed 0 --regularizer istar"),
        (
            dict(task="cola", model="b", lam=-1, layers="mean", epochs=2, pad_to_max=True),
            "--task cola --model b --seed 0 --regularizer istar --lam -1.0 --layers mean --epochs 2 "
            "--set pad_to_max=true",
        ),
        (
            dict(recipe="quick", lr=1e-3, seed=3),
            "--task toy-cola --model toy-bert --seed 3 --regularizer istar --recipe quick --lr 0.001",
        ),
        (
            dict(task="squad", model="b"),  # its length is filled in
            "--task squad --model b --seed 0 --regularizer istar",
        ),
        (
            dict(task="cola", model="b", recipe="toy"),
            "--task cola --model b --seed 0 --regularizer istar --recipe toy",
        ),
    ],
)
def test_a_run_is_the_shortest_command_that_makes_it(given, words):
    assert module.command(RunConfig(**given)) == "isoreg run " + words


@pytest.mark.parametrize(
    "config, key",
    [
        (RunConfig(), "toy-cola-toy-bert-istar-0.1-seed0-a9b8583106"),
        (FisherConfig(), "fisher-toy-bert-8c5bc57458"),
        (LandscapeConfig(), "landscape-toy-bert-29fa173f7f"),
        (GeometryConfig(), "geometry-toy-bert-92b1c5030d"),
        (PretrainConfig(), "toy-bert-head-seed0-3d1c131b64"),
    ],
)
def test_the_runs_of_earlier_versions_are_found_again(config, key):
    assert config.key == key


def test_a_text_on_the_hub_is_its_name_and_a_file_what_it_holds(tmp_path):
    hub = RunConfig(dropout="guided", scores="corpus:wikitext:wikitext-2-raw-v1:train")
    assert "scores_sha256" not in hub.identity() and hub.identity()["scores"].startswith("corpus:wikitext")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    read = lambda: RunConfig(dropout="guided", scores=f"corpus:{tmp_path}/a.txt")
    first, key = read().identity()["scores_sha256"], read().key
    (tmp_path / "a.txt").write_text("one\nthree\n")
    assert len(first) == 16 and read().identity()["scores_sha256"] != first and read().key != key


def test_a_plug_in_without_a_default_strength_has_one(monkeypatch):
    for maker, strength in ((lambda lam, width=2: None, 1.0), (lambda lam=0.3, width=2: None, 0.3)):
        monkeypatch.setitem(module.PENALTIES, "mine", maker)
        assert RunConfig(regularizer="mine").lam == strength
    monkeypatch.setitem(module.PENALTIES, "mine", lambda width=2: None)
    assert RunConfig(regularizer="mine").lam == 1.0
    monkeypatch.undo()
    assert RunConfig(regularizer="mine", penalty_settings={"width": 3}).lam == 1.0  # a record, without the plug-in


def test_a_penalty_is_made_whatever_its_name_and_none_is_none(monkeypatch):
    for name in ("amine", "zmine"):  # before and after none in the alphabet
        monkeypatch.setitem(module.PENALTIES, name, lambda lam=2.0: ("made", lam))
        assert module.made("regularizer", RunConfig(regularizer=name)) == ("made", 2.0)
    assert module.made("regularizer", RunConfig(regularizer="".join(["no", "ne"]))) is None


def test_a_penalty_of_an_installed_package_has_the_name_that_the_package_gives_it(monkeypatch):
    class Mine: ...

    class Other: ...

    Mine.__module__ = Other.__module__ = "pack.inner"
    entry = SimpleNamespace(name="mine", module="pack.penalties.all", load=lambda: Mine)
    foreign = SimpleNamespace(name="theirs", module="other.inner", load=lambda: pytest.fail("is not loaded"))
    monkeypatch.setattr(module, "entry_points", lambda **k: [foreign, entry])
    assert module.name_of(Mine) == "mine" and module.name_of(Other) == "Other"
    assert module.name_of(module.PENALTIES.find("istar")) == "istar"


@pytest.mark.parametrize("content", ['{"a": ', "\x00", "[1, 2"])
def test_scores_that_are_no_json_are_named(content, tmp_path):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match="^scores: .*s.json' cannot be read as JSON"):
        module.scores_source(tmp_path / "s.json")


@pytest.mark.parametrize("kind", [RunConfig, PretrainConfig])
def test_every_precision_but_fp16_is_for_a_processor_too(kind):
    for precision in ("auto", "fp32", "bf16"):
        assert kind(precision=precision).precision == precision


def test_a_folder_of_data_counts_for_a_task_of_ones_own_that_lies_in_one(tmp_path):
    own = dict(name="tone", label_names=("low", "high"), hub=("a/b", None))
    there, elsewhere = Task(**own, folder="tone"), Task(**own)
    place = lambda task: RunConfig(task=task, model="x", data_dir=str(tmp_path)).data_dir
    assert place(there) == str(tmp_path) and place(elsewhere) is None
    assert RunConfig(task="cola", model="x", data_dir=str(tmp_path)).data_dir == str(tmp_path)
    assert RunConfig(task="toy-cola", data_dir=str(tmp_path)).data_dir is None


def test_tables_of_a_command_are_read_as_they_were_written():
    table = {"eps": 1e-05, "label": "\N{GRINNING FACE}", "list": [2e-07]}
    assert module.parse_set([f"x={json.dumps(table, ensure_ascii=False)}"]) == {"x": table}


def test_a_command_is_told_of_a_run_whose_files_are_gone():
    own = {"data_dir": "/gone", "dropout_settings": {"label": "\N{GRINNING FACE}"}}
    gone = RunConfig(task="cola", model="toy-bert").to_dict() | own
    command = module.command(RunConfig.model_construct(**gone))
    assert "--data-dir /gone" in command and "\N{GRINNING FACE}" in command


def test_one_folder_has_one_key_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("data", "m", "toy-bert"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    keys = {RunConfig(task="cola", data_dir=d, model=m).key for d in ("data", "data/", "./data") for m in ("m", "m/")}
    assert len(keys) == 1
    assert RunConfig(task="cola", data_dir="~/data").key == RunConfig(task="cola", data_dir=str(tmp_path / "data")).key
    assert RunConfig(task="cola", model="org/name").model == "org/name"  # of the hub
    assert RunConfig(task="cola", model="./toy-bert").model == "./toy-bert"  # not the embedded one
    assert FisherConfig(model="m/").key == FisherConfig(model="m").key
    assert RunConfig(task="cola", model="./m/").model == "./m"  # elsewhere m could be a name of the hub


def test_a_negative_zero_is_zero():
    assert RunConfig(lam=-0.0, zeta=-0.0).key == RunConfig(lam=0.0, zeta=0.0).key
