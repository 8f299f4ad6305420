"""A run from configuration to record: what is refused, what is written, what must not depend on chance."""

import json
import os
import shutil
import warnings
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers as hf
from datasets import Dataset
from jsonschema import Draft202012Validator

from isoreg.experiments.config import RECIPES, GeometryConfig, RunConfig
from isoreg.experiments.data import encode, load_task, resample
from isoreg.files import pack, unpack
from isoreg.experiments.finetune import rerun, run, sentence_vectors, training_arguments
from isoreg.experiments.models import check_vocabulary, load_model, load_tokenizer
from isoreg.experiments.record import RunRecord, record_schema
from isoreg.istar import IStar
from isoreg.experiments.measure import load_body
from isoreg.report.records import load
from isoreg.experiments.tasks import get_task
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer
from isoreg.trainer import PenaltyTrainer, ReferenceRefresh

EYE = torch.eye(96)
SIZES = dict(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
T5 = hf.T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
SMALL = dict(max_train=64, max_eval=40, epochs=1)
DATA, MODELS = os.environ.get("ISOREG_DATA"), os.environ.get("ISOREG_MODELS")


def test_groups_by_length_train_as_the_whole_batch_does():
    "Without dropout the only difference is rounding; the key tells such runs apart."
    settings = dict(task="toy-rte", max_train=64, max_eval=32, epochs=2, dropout="constant", dropout_p=0.0)
    whole, groups = (RunConfig(**settings, length_groups=n) for n in (1, 4))
    assert whole.key != groups.key
    one, two = run(whole), run(groups)
    assert one.value == pytest.approx(two.value, abs=1 / 32)  # one row may lie on the edge
    assert one.isoscore["after"]["union"] == pytest.approx(two.isoscore["after"]["union"], rel=0.02)
    assert one.epochs[-1]["loss"] == pytest.approx(two.epochs[-1]["loss"], rel=0.01)


ON_GLUE = dict(task="mrpc", model="bert-base-uncased")


def test_settings_that_play_a_part_enter_the_key():
    given = [{}, dict(convention="text"), dict(zeta=0), dict(zeta=0, convention="text"), dict(seed=1), dict(lam=-1)]
    given += [ON_GLUE, dict(ON_GLUE, data_dir="."), dict(ON_GLUE, eval_split="validation_part")]
    given += [dict(recipe=name) for name in ("mosbach", "quick")]
    assert len({RunConfig(**one).key for one in given}) == len(given)


def test_the_released_recipe_takes_the_released_reference(monkeypatch):
    seen = []

    class Spy(ReferenceRefresh):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            seen.append(self.released)

    monkeypatch.setattr("isoreg.experiments.finetune.ReferenceRefresh", Spy)
    short = dict(lam=-1, epochs=1, max_train=32, max_eval=16, max_length=32)
    scores = [run(RunConfig(recipe=recipe, **short)) for recipe in ("istar-released", "istar-paper")]
    assert seen == [True, False] and [r.config["reference"] for r in scores] == ["released", "exact"]


def mnli(folder: Path, without: tuple = ()) -> str:
    "Made-up MNLI files: toy sentences, and labels that follow from their words."
    (folder / "glue" / "mnli").mkdir(parents=True)
    for split, n, seed in (("train", 96, 0), ("validation_matched", 30, 1), ("validation_mismatched", 25, 2)):
        if split in without:
            continue
        premise, hypothesis = toy_corpus(n, seed=seed), toy_corpus(n, seed=seed + 10)
        labels = [(len(p) + len(h)) % 3 for p, h in zip(premise, hypothesis)]
        rows = Dataset.from_dict({"premise": premise, "hypothesis": hypothesis, "label": labels})
        rows.to_parquet(folder / "glue" / "mnli" / f"{split}.parquet")
    return str(folder)


def test_mnli_is_scored_on_the_mismatched_rows_once_after_training(tmp_path):
    settings = dict(task="mnli", recipe="toy", regularizer="none", epochs=2, batch_size=16)
    record = run(RunConfig(**settings, data_dir=mnli(tmp_path / "a")), model_folder=tmp_path / "model")
    alone = run(RunConfig(**settings, data_dir=mnli(tmp_path / "b", without=("validation_mismatched",))))
    assert list(record.others) == ["mnli-mm"] and alone.others == {}
    for name in ("predictions", "resampled", "loss", "epochs"):
        assert getattr(record, name) == getattr(alone, name)
    noted = [any(n.startswith("not evaluated on mnli-mm") for n in r.data["notes"]) for r in (record, alone)]
    assert noted == [False, True]

    found, data = record.others["mnli-mm"], load_task("mnli-mm", tmp_path / "a")
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    rows = encode(data.evaluation, "mnli-mm", hf.AutoTokenizer.from_pretrained(tmp_path / "model"), 64)
    names = ("input_ids", "attention_mask", "token_type_ids")
    with torch.no_grad():
        guess = [int(model(**{k: torch.tensor([r[k]]) for k in names}).logits.argmax()) for r in rows]
    accuracy = np.mean(np.array(guess) == data.evaluation["label"])
    assert unpack(found["predictions"]).tolist() == guess and len(guess) == 25 == found["evaluation_rows"]
    assert found["value"] == found["metrics"]["accuracy"] == pytest.approx(accuracy)
    assert (found["fingerprint"], found["majority"]) == (data.fingerprint, data.majority)
    again = pack(resample(data.task, np.array(guess), data.evaluation["label"]))
    np.testing.assert_array_equal(unpack(found["resampled"]), unpack(again))

    Draft202012Validator(record_schema()).validate(json.loads(record.save(tmp_path / "done").read_text()))
    (row,) = load(tmp_path / "done").to_dict("records")
    assert (row["task"], row["value"], row["metrics"]["mnli-mm"]) == ("mnli", record.value, found["value"])


def test_recipes_are_those_of_their_papers():
    mosbach = [RECIPES["mosbach"][n] for n in ("lr", "epochs", "batch_size", "warmup", "weight_decay", "clip")]
    assert mosbach == [2e-5, 20, 16, 0.1, 0.01, 1.0]
    arguments = training_arguments(RunConfig(recipe="mosbach"), "unused", 1000, "classification")
    assert arguments.get_warmup_steps(1000) == 100 and arguments.lr_scheduler_type == "linear"
    assert arguments.max_grad_norm == 1.0 and RunConfig(recipe="guided-released").fixed()["split_protocol"] == "joined"
    for name in ("istar-released", "guided-released"):
        assert training_arguments(RunConfig(recipe=name), "unused", 10, "classification").adam_epsilon == 1e-6


@pytest.fixture(scope="module")
def records():
    configs = {"base": dict(regularizer="none"), "down": dict(lam=-1), "up": dict(lam=1)}
    return {name: run(RunConfig(max_train=320, max_eval=80, epochs=2, **c)) for name, c in configs.items()}


def test_record_holds_what_it_promises(records, tmp_path):
    record = records["up"]
    path = record.save(tmp_path)
    values = json.loads(path.read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert (values["status"], values["metric"]) == ("done", "matthews_correlation")
    assert values["value"] == record.epochs[-1]["matthews_correlation"] and len(values["epochs"]) == 2
    assert set(values["config"]) >= set(RunConfig.model_fields)
    for score in values["isoscore"].values():
        assert 0 < score["union"] <= 1 and all(0 <= v <= 1 for v in score["layers"])
    assert values["train_seconds"] > 0 and values["peak_memory_mib"] > 0
    assert values["data"]["train_rows"] == 320 and len(values["data"]["fingerprint"]) == 64
    assert {"task_loss", "istar", "isoscore", "step"} <= set(values["loss"][0])
    assert RunRecord.load(tmp_path).to_dict() == values


def test_lambda_turns_isotropy(records):
    after = {name: r.isoscore["after"]["union"] for name, r in records.items()}
    assert after["down"] < after["base"] < after["up"]
    assert after["down"] < records["down"].isoscore["before"]["union"] < after["up"]


def test_runs_of_one_seed_share_their_start(records):
    start = lambda r: (json.dumps(r.isoscore["before"]), r.data["fingerprint"], r.model["fingerprint"])
    assert len(set(map(start, records.values()))) == 1
    first = records["up"].loss[0]["task_loss"]  # same head, same first batch
    assert records["base"].loss[0]["loss"] == pytest.approx(first, abs=1e-4)


def test_a_diverged_run_has_no_number(tmp_path, monkeypatch):
    "Of NaN the first class would be the largest, and half of the answers right."

    def broken(config, task):
        model, *rest = load_model(config, task)
        torch.nn.init.constant_(model.classifier.bias, float("nan"))
        return model, *rest

    monkeypatch.setattr("isoreg.experiments.finetune.load_model", broken)
    config = RunConfig(task="toy-rte", regularizer="none", max_train=16, max_eval=16, epochs=1)
    record = run(config, tmp_path / "progress.json")
    strict = lambda path: json.loads(path.read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    values = strict(record.save(tmp_path / "run"))
    assert values["value"] is None and set(values["metrics"].values()) == {None} and values["resampled"] == {}
    assert not values["collapsed"] and values["epochs"][-1]["classes"] == 0
    assert any("diverged" in w for w in values["warnings"]) and len(unpack(values["predictions"])) == 16
    assert strict(tmp_path / "progress.json")["stage"] == "done"
    (row,) = load(tmp_path / "run").to_dict("records")
    assert (row["status"], row["error"]) == ("failed", "the metric is no finite number")


def test_layer_that_the_model_lacks_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="hidden states 0 to 4"):
        run(RunConfig(layers=9), progress_file=tmp_path / "progress.json")
    assert json.loads((tmp_path / "progress.json").read_text())["stage"] == "loading model"


# encoders -----------------------------------------------------------------------------------------------------------


N = len(toy_tokenizer())
BERT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BERT["max_position_embeddings"] = 70
ENCODERS = {
    "Roberta": BERT,
    "DistilBert": dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=70),
    "GPT2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=70, eos_token_id=3),
    "Bart": dict(d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_layers=1, decoder_layers=1)
    | dict(encoder_attention_heads=2, decoder_attention_heads=2, eos_token_id=2),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_any_encoder_runs(name, tmp_path):
    torch.manual_seed(0)
    padding = {} if name == "GPT2" else {"pad_token_id": 0}
    config = getattr(hf, f"{name}Config")(vocab_size=N, **padding, **ENCODERS[name])
    getattr(hf, f"{name}Model")(config).save_pretrained(tmp_path)
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = "[SEP]"  # Bart's head reads it
    tokenizer.save_pretrained(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    lam = dict(regularizer="none") if name == "Bart" else dict(lam=1)
    record = run(RunConfig(task="toy-rte", model=str(tmp_path), recipe="toy", **lam, **SMALL))
    assert record.geometry["after"]["texts"] == 40 and set(record.inputs) == {"model", "tokenizer"}
    if name != "Bart":
        assert record.isoscore["after"]["union"] > record.isoscore["before"]["union"]
    assert {p.name for p in tmp_path.iterdir()} == before


def test_untrained_pooler_is_redrawn_and_noted(tmp_path):
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(vocab_size=N, **BERT))
    toy_tokenizer().save_pretrained(tmp_path)
    for bias, redrawn in ((0.0, True), (0.01, False)):
        torch.nn.init.constant_(model.pooler.dense.bias, bias)
        torch.nn.init.normal_(model.pooler.dense.weight, std=0.5)
        model.save_pretrained(tmp_path)
        loaded, _, notes = load_model(RunConfig(task="toy-rte", model=str(tmp_path)))
        assert (loaded.bert.pooler.dense.weight.std().item() < 0.03) == redrawn == any("untrained" in n for n in notes)
    loaded, _, notes = load_model(RunConfig())
    assert loaded.config.id2label == {0: "unacceptable", 1: "acceptable"} and loaded.config.label2id["acceptable"] == 1
    assert any("absent" in n for n in notes) and 0.015 < loaded.bert.pooler.dense.weight.std().item() < 0.025


def test_segment_ids_are_kept_unless_asked_otherwise(monkeypatch):
    ids, step = [], PenaltyTrainer.training_step
    look = lambda self, model, inputs, *a: ids.append(inputs.get("token_type_ids")) or step(self, model, inputs, *a)
    monkeypatch.setattr(PenaltyTrainer, "training_step", look)
    for keep in (True, False):
        run(RunConfig(task="toy-rte", segment_ids=keep, regularizer="none", max_train=8, max_eval=8, epochs=1))
    assert bool(ids[0].any()) and ids[1] is None


# real data ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA and MODELS), reason="needs the data and model folders (ISOREG_DATA, ISOREG_MODELS)")
@pytest.mark.parametrize(
    "task, metrics", [("mrpc", {"accuracy", "f1"}), ("stsb", {"pearson", "spearman"}), ("squad", {"f1", "exact_match"})]
)
def test_real_task_and_encoder(task, metrics):
    rows = dict(data_dir=DATA, max_train=8, max_eval=8, epochs=1, batch_size=4)
    record = run(RunConfig(task=task, model=f"{MODELS}/minilm-l6-h384", lam=1, precision="bf16", **rows))
    assert set(record.metrics) == metrics
    if task != "squad":
        assert any("untrained" in n for n in record.model["notes"])


@pytest.mark.parametrize("model", ["models/nix", "runs/a/model", "models/deep/nix"])
def test_a_folder_that_is_not_there_is_told_before_anything_is_read(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isoreg.experiments.finetune.load_task", lambda *a: pytest.fail("the data were read"))
    config = RunConfig(model=model)  # a record from elsewhere can be read
    for call in (run, load_model):
        with pytest.raises(ValueError, match=f"model: no folder '{model}' here, and a name on the hub is owner/name"):
            call(config)


def _toy_folder(folder: Path, change=lambda weights: weights, tokenizer=True) -> str:
    "The embedded model as a checkpoint of its own, its weights changed."
    shutil.copytree(toy_model_path(), folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})
    if not tokenizer:
        for path in folder.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
    return str(folder)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: {k: v for k, v in w.items() if "layer.1." not in k}, r"lacks .* weights .*layer\.1\..*complete"),
        (lambda w: {f"wrapped.{k}": v for k, v in w.items()}, "lacks .* weights .*embeddings"),
        (lambda w: w | {QUERY: w[QUERY] / 0}, "has NaN or infinity in 1 of its weights"),
    ],
)  # fmt: skip
def test_a_checkpoint_with_weights_that_are_none_is_refused(tmp_path, change, message):
    model = _toy_folder(tmp_path / "model", change)
    with pytest.raises(ValueError, match=message):
        run(RunConfig(model=model, recipe="toy", **SMALL))


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    model = _toy_folder(tmp_path / "model", tokenizer=False)
    hf.T5Model(T5).save_pretrained(tmp_path / "t5")
    hf.DebertaV2Model(hf.DebertaV2Config(**SIZES)).save_pretrained(tmp_path / "deberta")
    for call in (
        lambda: run(RunConfig(model=model, recipe="toy", **SMALL)),
        lambda: load_body(GeometryConfig(model=model)),
        lambda: load_tokenizer(str(tmp_path / "t5")),
        lambda: load_tokenizer(str(tmp_path / "deberta")),
    ):
        with pytest.raises(ValueError, match="model: .* has no tokenizer"):
            call()


def test_a_tokenizer_of_another_model_is_a_warning_in_the_record(tmp_path):
    model, tokenizer, _ = load_model(RunConfig())
    texts = load_task("toy-cola").train["sentence"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_vocabulary(tokenizer, model, texts) == []
    with pytest.warns(UserWarning, match="unknown to the tokenizer"):
        check_vocabulary(tokenizer, model, ["Der Zug hält in Göttingen."])
    model.resize_token_embeddings(len(tokenizer) - 1)
    with pytest.raises(ValueError, match="model: its tokenizer has the id"):
        check_vocabulary(tokenizer, model, texts)
    model.resize_token_embeddings(len(tokenizer) * 2)
    with pytest.warns(UserWarning, match="embedding rows"):
        check_vocabulary(tokenizer, model, texts)
    model.save_pretrained(tmp_path / "wide"), tokenizer.save_pretrained(tmp_path / "wide")
    record = run(RunConfig(model=str(tmp_path / "wide"), recipe="toy", **SMALL))
    assert any("embedding rows" in w for w in record.warnings)


def _padding_seen(monkeypatch, **settings) -> float:
    "Share of padding in the batches that training really reads."
    seen = []  # the model is not needed, its batches are
    look = lambda self, model, inputs, *args: seen.append(inputs["attention_mask"]) or torch.tensor(0.0)
    monkeypatch.setattr(PenaltyTrainer, "training_step", look)
    run(RunConfig(**settings))
    return 1 - sum(int(m.sum()) for m in seen) / sum(m.numel() for m in seen)


def test_batches_are_random_unless_asked_otherwise(monkeypatch):
    "The share of padding that training sees is that of random batches, counted here from the lengths alone."
    data = dict(task="toy-rte", regularizer="none", max_train=640, max_eval=32, epochs=1)
    random, sorted_, full = (
        _padding_seen(monkeypatch, **data, **more)
        for more in ({}, {"batches": "by-length"}, {"recipe": "guided-released", "batch_size": 32, "max_length": 40})
    )
    random_rows, joined = (load_task("toy-rte", max_train=640, split_protocol=p).train for p in ("official", "joined"))
    lengths, of_joined = (
        torch.tensor([len(ids) for ids in toy_tokenizer()(list(d["sentence1"]), list(d["sentence2"]))["input_ids"]])
        for d in (random_rows, joined)
    )
    draws = [lengths[torch.randperm(640, generator=torch.Generator().manual_seed(k))].view(-1, 32) for k in range(50)]
    expected = torch.tensor([1 - float(d.sum() / (32 * d.amax(1)).sum()) for d in draws])
    assert abs(random - float(expected.mean())) < 4 * float(expected.std())
    assert sorted_ < random / 2
    assert full == pytest.approx(1 - float(of_joined.clamp(max=40).sum()) / (640 * 40))  # as its recipe splits


@pytest.mark.skipif(not (DATA and MODELS), reason="needs ISOREG_DATA and ISOREG_MODELS")
@pytest.mark.slow
@pytest.mark.parametrize("task, share", [("cola", 0.51), ("mrpc", 0.34), ("rte", 0.61), ("stsb", 0.60)])
def test_padding_of_real_batches_is_that_of_the_released_code(task, share, monkeypatch):
    "One forward a batch of an epoch: the model is not needed, its batches are."
    released = dict(recipe="istar-released", regularizer="none", epochs=1, max_eval=8)
    seen = _padding_seen(monkeypatch, task=task, data_dir=DATA, model=f"{MODELS}/minilm-l6-h384", **released)
    assert seen == pytest.approx(share, abs=0.03)


def test_resampled_questions_are_scored_one_by_one():
    said = [{"prediction_text": "a b" if i % 2 else "c"} for i in range(200)]
    of = lambda answer: resample(get_task("squad"), said, [{"answers": {"text": [answer]}}] * 200)
    assert of("x").max() == 0 and of("b").mean() == pytest.approx(0.5, abs=0.01)


def test_run_notebook_takes_any_penalty_and_writes_the_record_before_it_draws(tmp_path):
    "The guide's penalty, known to the notebook's process; then a figure that fails must not lose the record."
    notebook = nbformat.read(Path(__file__).parents[1] / "nbs" / "runs" / "finetune.ipynb", 4)
    cells = notebook.cells
    at = next(i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", []))
    penalty = "__main__:LengthPenalty"
    given = f"regularizer, lam, max_train, max_eval, epochs, out = {penalty!r}, 0.1, 64, 40, 1, {str(tmp_path)!r}"
    own = (Path(__file__).parent / "plugin/isoreg_example.py").read_text()
    cells[at + 1 : at + 1] = [nbformat.v4.new_code_cell(given), nbformat.v4.new_code_cell(own)]
    cells.insert(at + 3, nbformat.v4.new_code_cell("import matplotlib.pyplot as plt\nplt.subplots = None"))
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (path,) = tmp_path.glob("*/record.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["config"]["regularizer"]) == ("done", penalty)


def test_a_record_outlives_a_model_that_cannot_be_saved(monkeypatch, tmp_path):
    def full(*args):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("isoreg.experiments.finetune.save_model", full)
    record = run(RunConfig(**SMALL), model_folder=tmp_path / "model")
    assert record.status == "done" and any("No space left" in w for w in record.warnings)


def test_t5_may_have_a_new_head_for_questions_and_no_new_encoder(tmp_path):
    hf.T5Model(T5).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    config, file = RunConfig(task="squad", recipe="quick", model=str(tmp_path)), tmp_path / "model.safetensors"
    assert any("qa_outputs absent" in n for n in load_model(config)[2])
    part = {k: v for k, v in safetensors.torch.load_file(file).items() if not k.startswith("encoder.block")}
    safetensors.torch.save_file(part, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks .* weights"):
        load_model(config)


def test_windows_of_questions_are_padded_on_the_right(tmp_path):
    "The places of an answer count from the first token of its window."
    hf.AutoModelForMaskedLM.from_pretrained(toy_model_path()).save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(toy_model_path(), padding_side="left").save_pretrained(tmp_path)
    for task, side in (("squad", "right"), ("toy-cola", "left")):
        assert load_model(RunConfig(task=task, recipe="quick", model=str(tmp_path)))[1].padding_side == side


def test_the_record_has_the_threads_of_the_training():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        record = run(RunConfig(task="toy-cola", max_train=8, max_eval=8, epochs=1))
        assert record.hardware["threads"] == 1 and torch.get_num_threads() == 2  # the model is small
    finally:
        torch.set_num_threads(before)


HEADS = {
    "bert": (hf.BertConfig(**SIZES), "classifier.weight", 0.02),
    "roberta": (hf.RobertaConfig(**SIZES), "classifier.out_proj.weight", 0.02),
    "modernbert": (hf.ModernBertConfig(**SIZES, pad_token_id=0), "classifier.weight", 16**-0.5),  # drawn by its parent
}


@pytest.mark.parametrize("name, labels", [*((name, 2) for name in HEADS), ("bert", 3)])
def test_the_head_of_an_earlier_task_is_not_used(tmp_path, name, labels):
    (config, weight, spread), draws = HEADS[name], []
    config.num_labels = labels
    model = hf.AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.constant_(model.get_parameter(weight), 0.5)
    model.save_pretrained(tmp_path), toy_tokenizer().save_pretrained(tmp_path)
    for seed in (0, 1, 0):
        new, _, notes = load_model(RunConfig(model=str(tmp_path), seed=seed, regularizer="none"))
        draws.append(new.get_parameter(weight))
        assert any("of the checkpoint not used" in n for n in notes)
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
    assert draws[0].shape == (2, 16) and draws[0].std().item() == pytest.approx(spread, rel=0.5)


def test_a_pretrained_part_of_the_head_is_kept(tmp_path):
    model = hf.ModernBertForMaskedLM(hf.ModernBertConfig(**SIZES, pad_token_id=0))
    torch.nn.init.constant_(model.head.dense.weight, 0.5)
    model.save_pretrained(tmp_path), toy_tokenizer().save_pretrained(tmp_path)
    loaded, _, notes = load_model(RunConfig(model=str(tmp_path), regularizer="none"))
    assert (loaded.head.dense.weight == 0.5).all() and any("classifier absent" in n for n in notes)


def test_sentence_vectors_of_a_half_precision_model_are_summed_in_single_precision():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.weight = hf.BertConfig(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))

        def forward(self, input_ids, attention_mask=None, output_hidden_states=None, return_dict=None):
            states = torch.full((*input_ids.shape, 3), 200.0, dtype=torch.float16) + self.weight
            return {"hidden_states": (states, states)}

    batch = {"input_ids": torch.ones(2, 512, dtype=torch.long), "attention_mask": torch.ones(2, 512, dtype=torch.long)}
    vectors = sentence_vectors(Wide(), [batch])
    assert all((v == 200).all() for v in vectors.values())


def test_a_penalty_that_a_record_could_not_tell_is_refused():
    with pytest.raises(ValueError, match="penalty: reference_cov of IStar"):
        run(RunConfig(**SMALL), penalty=IStar(-0.1, reference_cov=EYE))


def test_a_given_reference_stays():
    class Kept(IStar):
        def __init__(self, lam: float = 1.0, reference_cov=None):
            super().__init__(lam, reference_cov=reference_cov)
            self.lam = torch.nn.Parameter(torch.tensor(lam))  # which no record can hold

    penalty = Kept(-0.1, EYE)
    record = run(RunConfig(**SMALL), penalty=penalty)
    assert torch.equal(penalty.reference_cov, EYE) and record.config["regularizer"].endswith("Kept")


def test_two_runs_that_diverged_alike_are_equal(records, monkeypatch):
    record = RunRecord(**records["base"].to_dict() | {"predictions": pack(np.array([np.nan, 1.0])), "value": None})
    monkeypatch.setattr("isoreg.experiments.finetune.run", lambda config: record)
    assert rerun(record.to_dict())["equal"]


def test_the_precision_of_an_earlier_training_is_not_that_of_the_next(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    config = RunConfig(task="toy-cola", max_train=64, max_eval=64, epochs=1, regularizer="none", precision="fp32")
    wanted = run(config).to_dict()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as TrainingArguments(bf16=True) of transformers 4 does
    found = run(config).to_dict()
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"  # whoever set it may want it
    assert found["isoscore"] == wanted["isoscore"] and found["predictions"] == wanted["predictions"]
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    half = run(config.model_copy(update={"precision": "bf16"})).to_dict()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ and half["isoscore"] != wanted["isoscore"]
