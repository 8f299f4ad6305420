"""A head for an encoder: what is trained and what is not, what a kill leaves, what is refused before training."""

import ast
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import papermill
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from isoreg.corpus import TextBatches
from isoreg.experiments.notebook import execute, run_notebook_path
from isoreg.experiments.config import PretrainConfig
from isoreg.experiments.pretrain import (
    LikelihoodTrainer,
    corpus_texts,
    freeze_encoder,
    heldout_loss,
    last_checkpoint,
    log_frequencies,
    pretrain,
    toy_batches,
    toy_language_model,
    training_arguments,
    unigram_loss,
    with_mlm_head,
)
from isoreg.experiments.grid import Block, Grid, expand
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer

DATA, MODELS = os.environ.get("ISOREG_DATA"), os.environ.get("ISOREG_MODELS")
V, H = len(toy_tokenizer()), 16
BASE = dict(vocab_size=V, hidden_size=H, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
BASE |= dict(max_position_embeddings=70)
SPECIAL = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
ENCODERS = {
    "Bert": BASE,
    "Bert untied": BASE | dict(tie_word_embeddings=False),
    "Roberta": BASE | dict(pad_token_id=0),
    "Albert": BASE | dict(embedding_size=8),
    "DistilBert": dict(vocab_size=V, dim=H, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=70),
    "Electra": BASE | dict(embedding_size=H),
    "ModernBert": BASE | SPECIAL,
    "MPNet": BASE,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text():
    sentences = toy_corpus(700, seed=4)
    return TextBatches(sentences[:600], toy_tokenizer()), TextBatches(
        sentences[600:], toy_tokenizer(), batch_size=7, seed=1
    )


def test_baseline_is_the_entropy_of_counted_tokens(text):
    train, heldout = text
    counts = np.ones(V)
    for i in train.numbers:
        for token in train.samples[i][1:-1]:
            counts[token] += 1  # [CLS] and [SEP] are never asked for
    wanted = [-np.log(counts[t] / counts.sum()) for i in heldout.numbers for t in heldout.sample(i)[1] if t >= 0]
    found = unigram_loss(train, heldout)
    assert found["loss"] == pytest.approx(np.mean(wanted)) and found["tokens"] == len(wanted)
    guesses = [t == counts.argmax() for i in heldout.numbers for t in heldout.sample(i)[1] if t >= 0]
    assert found["accuracy"] == pytest.approx(np.mean(guesses))
    assert np.exp(log_frequencies(train)).sum() == pytest.approx(1)


def test_heldout_loss_is_the_mean_over_tokens_and_leaves_the_mode(text):
    model = hf.AutoModelForMaskedLM.from_pretrained(toy_model_path()).train()
    found = heldout_loss(model, text[1])
    assert model.training
    model.eval()
    losses, correct = [], []
    for i in text[1].numbers:
        ids, labels = (torch.from_numpy(x) for x in text[1].sample(i))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0][labels >= 0]
        losses += F.cross_entropy(logits, labels[labels >= 0], reduction="none").tolist()
        correct += (logits.argmax(-1) == labels[labels >= 0]).tolist()
    assert found["tokens"] == len(losses) and found["accuracy"] == pytest.approx(np.mean(correct))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_trainer_loss_is_the_models_own(text, tmp_path):
    torch.manual_seed(0)
    tokenizer, t5_text, _ = toy_batches("t5")
    small = dict(d_model=H, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=len(tokenizer), **small))
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=64))
    clm = TextBatches(toy_corpus(20), toy_tokenizer(), loss="clm")
    for model, corpus in ((hf.BertForMaskedLM(hf.BertConfig(**BASE)), text[0]), (gpt2, clm), (t5, t5_text)):
        trainer = LikelihoodTrainer(model.eval(), training_arguments(tmp_path, 1, 1e-3, 8), corpus, corpus)
        batch = next(iter(corpus))
        padding = batch["attention_mask"] == 0  # the padding is not text
        labels = batch["labels"].masked_fill(padding, -100) if corpus.loss == "clm" else batch["labels"]
        torch.testing.assert_close(trainer.compute_loss(model, batch), model(**(batch | {"labels": labels})).loss)


def test_accumulated_steps_have_the_loss_and_gradient_of_one_batch(text, tmp_path):
    logged, train = [], copy.copy(text[0])
    train.epoch = 0
    one = [i for i in train.numbers if (train.sample(i)[1] >= 0).sum() == 1]  # a mean of means is then the mean
    train.numbers = np.array(one)
    assert len(one) >= 64
    for size, accumulation in ((32, 1), (8, 4)):
        torch.manual_seed(0)
        model = hf.BertForMaskedLM(hf.BertConfig(**BASE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        settings = dict(gradient_accumulation_steps=accumulation, max_grad_norm=1e9, eval_on_start=False)
        trainer = LikelihoodTrainer(model, training_arguments(tmp_path, 2, 1e-6, size, **settings), train, text[1])
        trainer.train()
        logged.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
    assert len(logged[0]) == len(logged[1]) == 2
    np.testing.assert_allclose(logged[1], logged[0], rtol=1e-4)


def test_a_configuration_with_its_own_heldout_text_comes_back():
    config = PretrainConfig(heldout="toy", steps=2)
    assert PretrainConfig(**config.to_dict()) == config and config.heldout_share == 0
    (run,) = expand(Grid(name="g", blocks=[Block(notebook="mlm_head", fixed={"heldout": "toy", "steps": 2})])).runs
    assert PretrainConfig(**run.parameters) == config and run.key == config.key
    with pytest.raises(ValueError, match="heldout_share: 0 leaves"):
        PretrainConfig(heldout_share=0.0)


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_architecture_gets_a_head_and_keeps_its_encoder(kind, text, tmp_path):
    torch.manual_seed(0)
    name = kind.split()[0]
    encoder = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**ENCODERS[kind]))
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.1 * torch.randn_like(p))
    encoder.save_pretrained(tmp_path / "encoder")
    model, notes = with_mlm_head(str(tmp_path / "encoder"), text[0])
    assert notes[0].startswith("absent from the checkpoint: ")
    assert any("identity" in n for n in notes) or (kind == "Albert" and any("another form" in n for n in notes))
    output = model.get_output_embeddings()
    if kind == "Bert untied":
        assert torch.equal(output.weight, model.get_input_embeddings().weight)
    expected = torch.from_numpy(log_frequencies(text[0]))
    torch.testing.assert_close(output.bias.detach().double(), expected, rtol=1e-6, atol=1e-6)
    names = freeze_encoder(model)
    assert names and not any(n.startswith(model.base_model_prefix + ".") for n in names)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    LikelihoodTrainer(model, training_arguments(tmp_path, 2, 1e-2, 8), *text).train()
    # transformers 5 keeps this one beside decoder.bias and never reads it
    unused = {"cls.predictions.bias"} if kind == "Bert untied" else set()
    for n, p in model.named_parameters():
        if n not in unused:
            assert torch.equal(before[n], p) == (n not in names), n
    for n, p in encoder.named_parameters():
        if "pooler" not in n:
            assert torch.equal(p, dict(model.base_model.named_parameters())[n]), n


def test_head_alone_is_learnt_back_below_the_baseline(tmp_path):
    config = PretrainConfig(limit=1500, steps=60)
    record = pretrain(config, tmp_path, evaluations=2)
    folder, after, unigram = tmp_path / config.key, record["heldout"]["after"], record["unigram"]
    assert after["loss"] < unigram["loss"] - 1 and after["accuracy"] > unigram["accuracy"]
    assert record["tokens_seen"] > 60 * 32 * 5
    assert [e["step"] for e in record["curve"]] == [0, 30, 60] and record["steps"] == 60
    model = folder / "toy-bert"  # the name of the model, which the keys of its runs will have
    assert sorted(folder.iterdir()) == [folder / n for n in ("record.json", "toy-bert")]
    encoder, shipped = (
        hf.AutoModel.from_pretrained(p, add_pooling_layer=False).state_dict() for p in (model, toy_model_path())
    )
    assert all(torch.equal(encoder[n], shipped[n]) for n in shipped if "pooler" not in n)
    # transformers 4 knows this name, and not the TokenizersBackend of transformers 5
    assert json.loads((model / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    said = [t("a dog sleeps.")["input_ids"] for t in (hf.AutoTokenizer.from_pretrained(model), toy_tokenizer())]
    assert said[0] == said[1]
    stamp = (folder / "record.json").stat().st_mtime_ns
    assert pretrain(config, tmp_path) == record and (folder / "record.json").stat().st_mtime_ns == stamp  # not repeated
    assert (record["text"]["heldout"]["samples"], record["text"]["corpus"]["samples"]) == (30, 1470)


def test_masks_change_with_the_epoch_and_the_heldout_ones_do_not(tmp_path):
    train, heldout = TextBatches(toy_corpus(40), toy_tokenizer()), TextBatches(toy_corpus(10, seed=2), toy_tokenizer())
    seen, fixed = {}, []

    class Watched(LikelihoodTrainer):
        def _collate(self, numbers):
            for n in numbers:
                seen.setdefault(n, []).append(tuple(self.corpus.sample(n)[1]))
            return super()._collate(numbers)

        def evaluate(self, *args, **kwargs):
            fixed.append([tuple(self.heldout.sample(n)[1]) for n in self.heldout.numbers])
            return super().evaluate(*args, **kwargs)

    model, arguments = (
        hf.BertForMaskedLM(hf.BertConfig(**BASE)),
        training_arguments(tmp_path, 10, 1e-3, 8, eval_steps=2),
    )
    Watched(model, arguments, train, heldout).train()
    assert set(seen) == set(range(40)) and all(len(v) == 2 for v in seen.values())  # two epochs of five steps
    assert sum(a != b for a, b in seen.values()) > 30 and all(f == fixed[0] for f in fixed)


KILLED = dict(steps=50, limit=400, train_encoder=True, seed=3)


def killed_at(out: Path, step: int) -> Path:
    "Start the run in another process, kill it as soon as it writes the checkpoint of this step, and return its folder."
    program = f"""import torch; torch.set_num_threads(1)
from isoreg.experiments.config import PretrainConfig
from isoreg.experiments.pretrain import pretrain
pretrain(PretrainConfig(**{KILLED!r}), {str(out)!r}, 2, 5)"""
    place = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=place
    )
    folder = out / PretrainConfig(**KILLED).key
    while process.poll() is None and not (folder / f"checkpoint-{step}").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()[-2000:]
    return folder


def assert_equal_runs(tmp_path, config, evaluations, checkpoint_steps):
    "The killed run goes on to the same end as one that is left alone."
    records = [pretrain(config, tmp_path / n, evaluations, checkpoint_steps) for n in ("killed", "alone")]
    folders = [tmp_path / n / config.key / "toy-bert" for n in ("killed", "alone")]
    resumed, alone = (hf.AutoModelForMaskedLM.from_pretrained(f).state_dict() for f in folders)
    assert all(torch.equal(resumed[n], alone[n]) for n in alone)
    for what in ("heldout", "curve", "loss", "tokens_seen", "unigram", "text", "config"):
        assert records[0][what] == records[1][what], what


def test_killed_and_resumed_is_the_run_left_alone(tmp_path):
    folder = killed_at(tmp_path / "killed", 30)  # in the third epoch of 13 steps, half a checkpoint written
    assert not (folder / "record.json").exists() and last_checkpoint(folder).name in ("checkpoint-25", "checkpoint-30")
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-99" / "trainer_state.json").write_text('{"global_step": 9')
    assert_equal_runs(tmp_path, PretrainConfig(**KILLED), 2, 5)


def die(*args):
    raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_with_its_own_texts_only(tmp_path, monkeypatch):
    file, out = tmp_path / "c.txt", tmp_path / "out"
    sentences = toy_corpus(60)
    file.write_text("\n".join(sentences))
    config = PretrainConfig(corpus=str(file), steps=4, packed=False)
    with monkeypatch.context() as patch:
        patch.setattr("isoreg.experiments.pretrain.save_model", die)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config, out, 1, 2)
    assert last_checkpoint(out / config.key, 4).name == "checkpoint-2"
    for changed in (sentences[::-1], [*sentences[:-1], "a dog sleeps."]):  # all of it, and the held-out part alone
        file.write_text("\n".join(changed))
        with pytest.raises(ValueError, match="out: .*interrupted run with other .*text; remove it"):
            pretrain(config, out, 1, 2)
    assert not (out / config.key / "record.json").exists()
    file.write_text("\n".join(sentences))
    assert pretrain(config, out, 1, 2)["steps"] == 4
    assert sorted(p.name for p in (out / config.key).iterdir()) == ["record.json", "toy-bert"]


def test_killed_after_the_last_step(tmp_path, monkeypatch):
    config = PretrainConfig(limit=200, steps=4)
    with monkeypatch.context() as patch:
        patch.setattr("isoreg.experiments.pretrain.save_model", die)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config, tmp_path / "killed", 2, 2)
    assert last_checkpoint(tmp_path / "killed" / config.key).name == "checkpoint-4"
    assert_equal_runs(tmp_path, config, 2, 2)


def test_bad_models_and_texts_are_named_before_training(tmp_path):
    gpt2, other, empty, out = tmp_path / "gpt2", tmp_path / "other", tmp_path / "empty.txt", tmp_path / "out"
    hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=64)).save_pretrained(gpt2)
    toy_tokenizer().save_pretrained(gpt2)
    hf.BertModel(hf.BertConfig(**BASE)).save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    maskless = toy_tokenizer()
    maskless.mask_token = None
    maskless.save_pretrained(other)
    empty.write_text("\n \n")
    for values, words in [
        (dict(model=str(gpt2)), ["model", "gpt2", "AutoModelForMaskedLM"]),
        (dict(model=str(other)), ["tokenizer", "mask token"]),
        (dict(corpus=str(empty)), ["source", "no text"]),
        (dict(model="models/nix"), ["model: no folder 'models/nix' here", "owner/name"]),
        (dict(corpus=str(tmp_path / "none.txt")), ["source", "none.txt"]),
        (dict(heldout="toy"), ["corpus", "held out"]),
        (dict(model="no/such-model-anywhere"), ["model", "no/such-model-anywhere"]),
    ]:
        with pytest.raises(ValueError) as error:
            pretrain(PretrainConfig(limit=20, steps=1, **values), out)
        for word in words:
            assert word in str(error.value), (values, str(error.value))
        assert not out.exists()
    with pytest.raises(ValueError, match="lacks .* weights of its encoder"):
        with_mlm_head(str(other))
    shutil.copytree(toy_model_path(), other, dirs_exist_ok=True)
    weights = load_file(other / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="NaN or infinity in 1 of its weights"):
        with_mlm_head(str(other))
    (other / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be read .*; give the folder of a complete checkpoint"):
        with_mlm_head(str(other))
    with pytest.raises(ValueError, match="evaluations: 0"):
        pretrain(PretrainConfig(), out, evaluations=0)


def test_each_source_gives_its_share_and_nothing_is_in_both_parts(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.txt").write_text("\n".join(toy_corpus(50, seed=seed)))
    (tmp_path / "c.txt").write_text("\n".join(["the same line."] * 10))
    train, heldout = corpus_texts(
        PretrainConfig(corpus=f"{tmp_path}/a.txt, {tmp_path}/b.txt, {tmp_path}/c.txt", heldout_share=0.1)
    )
    assert heldout == toy_corpus(50, seed=1)[-5:] + toy_corpus(50, seed=2)[-5:] and not set(train) & set(heldout)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_toy_language_models_learn_and_repeat(kind):
    learnt = toy_language_model(kind, steps=50, seed=1)
    assert not learnt.model.training and learnt.heldout < learnt.unigram - 0.3
    _, _, heldout = toy_batches(kind, 1)
    assert heldout_loss(learnt.model, heldout)["loss"] == learnt.heldout
    first, second = (toy_language_model(kind, steps=3, seed=1) for _ in range(2))
    pairs = zip(first.model.parameters(), second.model.parameters())
    assert first.heldout == second.heldout and all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match="kind"):
        toy_language_model("bert")


def test_notebook_writes_its_record(tmp_path):
    execute("mlm_head", tmp_path / "done.ipynb", dict(steps=4, limit=100, out=str(tmp_path / "runs"), evaluations=1))
    (record,) = (json.loads(p.read_text()) for p in (tmp_path / "runs").rglob("record.json"))
    assert (record["status"], record["steps"]) == ("done", 4)
    assert record["key"] == PretrainConfig(steps=4, limit=100).key


@pytest.mark.skipif(not (DATA and MODELS), reason="needs ISOREG_DATA and ISOREG_MODELS")
def test_a_real_encoder_starts_near_the_baseline():
    source = Path(MODELS) / "minilm-l6-h384"
    config = PretrainConfig(model=str(source), corpus=str(Path(DATA) / "text" / "wikipedia.parquet"), limit=150)
    tokenizer, (train, heldout) = hf.AutoTokenizer.from_pretrained(source), corpus_texts(config)
    corpus, held = (
        TextBatches(train, tokenizer, packed=True),
        TextBatches(heldout, tokenizer, packed=True, batch_size=8).draw(0.3),
    )
    model, notes = with_mlm_head(str(source), corpus)
    assert any("identity" in n for n in notes)
    assert abs(heldout_loss(model, held)["loss"] - unigram_loss(corpus, held)["loss"]) < 0.6


def toy_notebook(values: dict):
    "The cells of pretrain_toy in this process, with the parameters as papermill puts them."
    space, injected = {"In": []}, "# Parameters\n" + "".join(f"{k} = {v!r}\n" for k, v in values.items())
    for cell in json.loads(run_notebook_path("pretrain_toy").read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for source in (
            "".join(cell["source"]),
            *([injected] if "parameters" in cell["metadata"].get("tags", []) else []),
        ):
            space["In"].append(source)
            exec(source, space)


WRONG = {
    "stpes: unknown parameter; did you mean .steps": {"stpes": 4},
    "lr: Input should be a valid number": {"lr": "x"},
}


@pytest.mark.parametrize("message", WRONG)
def test_the_toy_notebook_refuses_wrong_parameters(message, tmp_path):
    with pytest.raises(ValueError, match=message):
        toy_notebook(WRONG[message] | {"out": str(tmp_path / "model")})
    assert not (tmp_path / "model").exists()


def test_the_toy_notebook_knows_its_parameters_and_ends_after_one_small_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    defaults = {
        k: ast.literal_eval(v["default"])
        for k, v in papermill.inspect_notebook(str(run_notebook_path("pretrain_toy"))).items()
    }
    toy_notebook(defaults | dict(steps=1, batch_size=2, texts=10, out=5))
    assert (tmp_path / "5" / "model.safetensors").is_file()
