"""A head for an encoder: what is trained and what is not, what a kill leaves, what is refused before training."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn import functional as F

from isoreg.corpus import TextBatches
from isoreg.experiments.config import PretrainConfig
from isoreg.experiments.pretrain import LikelihoodTrainer, corpus_texts, heldout_loss, log_frequencies
from isoreg.experiments.pretrain import pretrain, toy_batches, toy_language_model, unigram_loss, with_mlm_head
from isoreg.experiments.sweep import status
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer

V, H = len(toy_tokenizer()), 16
BASE = dict(vocab_size=V, hidden_size=H, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
BASE |= dict(max_position_embeddings=70)
SPECIAL = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
ENCODERS = {
    "Bert": BASE,
    "Roberta": BASE | dict(pad_token_id=0),
    "Albert": BASE | dict(embedding_size=8),
    "DistilBert": dict(vocab_size=V, dim=H, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=70),
    "Electra": BASE | dict(embedding_size=H),
    "ModernBert": BASE | SPECIAL,
    "MPNet": BASE,
}


@pytest.fixture(scope="module")
def text():
    sentences, heldout = toy_corpus(700, seed=4), dict(batch_size=7, seed=1)
    return TextBatches(sentences[:600], toy_tokenizer()), TextBatches(sentences[600:], toy_tokenizer(), **heldout)


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
    t5_text, _ = toy_batches("t5")
    small = dict(d_model=H, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=len(t5_text.tokenizer), **small))
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=64))
    clm = TextBatches(toy_corpus(20), toy_tokenizer(), loss="clm")
    for model, corpus in ((hf.BertForMaskedLM(hf.BertConfig(**BASE)), text[0]), (gpt2, clm), (t5, t5_text)):
        trainer = LikelihoodTrainer(model.eval(), corpus, corpus, tmp_path, steps=1, lr=1e-3)
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
        train.batch_size = size
        settings = dict(gradient_accumulation_steps=accumulation, max_grad_norm=1e9, eval_on_start=False)
        trainer = LikelihoodTrainer(model, train, text[1], tmp_path, 2, 1e-6, **settings)
        trainer.train()
        logged.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
    assert len(logged[0]) == len(logged[1]) == 2
    np.testing.assert_allclose(logged[1], logged[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_architecture_gets_a_head_and_keeps_its_encoder(kind, text, tmp_path):
    torch.manual_seed(0)
    encoder = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**ENCODERS[kind]))
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.1 * torch.randn_like(p))
    encoder.save_pretrained(tmp_path / "encoder")
    model, notes = with_mlm_head(str(tmp_path / "encoder"), text[0])
    # the transform of ALBERT is not square
    assert notes[0].startswith("new: ") and any("identity" in n for n in notes) == (kind != "Albert")
    expected = torch.from_numpy(log_frequencies(text[0]))
    torch.testing.assert_close(model.get_output_embeddings().bias.detach().double(), expected, rtol=1e-6, atol=1e-6)
    model.base_model.requires_grad_(False)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert names and not any(n.startswith(model.base_model_prefix + ".") for n in names)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    LikelihoodTrainer(model, *text, tmp_path, steps=2, lr=1e-2).train()
    for n, p in model.named_parameters():
        assert torch.equal(before[n], p) == (n not in names), n
    kept = dict(model.base_model.named_parameters())
    assert all(torch.equal(p, kept[n]) for n, p in encoder.named_parameters() if "pooler" not in n)


def test_head_alone_is_learnt_back_below_the_baseline(tmp_path):
    config = PretrainConfig(limit=1500, steps=60)
    record = pretrain(config, tmp_path, evaluations=2)
    folder, after, unigram = tmp_path / config.key, record["heldout"]["after"], record["unigram"]
    assert after["loss"] < unigram["loss"] - 1 and after["accuracy"] > unigram["accuracy"]
    assert record["tokens_seen"] > 60 * 32 * 5
    assert [e["step"] for e in record["curve"]] == [0, 30, 60] and record["steps"] == 60
    model = folder / "toy-bert"  # the name of the model, which the keys of its runs will have
    assert sorted(folder.iterdir()) == [folder / n for n in ("record.json", "toy-bert")]
    assert status(tmp_path)["done"] == [config.key]
    load = lambda place: hf.AutoModel.from_pretrained(place, add_pooling_layer=False).state_dict()
    encoder, shipped = load(model), load(toy_model_path())
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
        def collate(self, numbers):
            batch = super().collate(numbers)
            for n in numbers:
                seen.setdefault(n, []).append(tuple(self.corpus.sample(n)[1]))
            return batch

        def evaluate(self, *args, **kwargs):
            fixed.append([tuple(self.heldout.sample(n)[1]) for n in self.heldout.numbers])
            return super().evaluate(*args, **kwargs)

    train.batch_size = 8
    Watched(hf.BertForMaskedLM(hf.BertConfig(**BASE)), train, heldout, tmp_path, 10, 1e-3, eval_steps=2).train()
    assert set(seen) == set(range(40)) and all(len(v) == 2 for v in seen.values())  # two epochs of five steps
    assert sum(a != b for a, b in seen.values()) > 30 and all(f == fixed[0] for f in fixed)


def test_a_run_is_repeated_when_it_was_killed_or_its_text_changed(tmp_path, monkeypatch):
    file, out, sentences = tmp_path / "c.txt", tmp_path / "out", toy_corpus(60)
    config, begun, train = PretrainConfig(corpus=str(file), steps=4, packed=False), [], hf.Trainer.train
    monkeypatch.setattr(LikelihoodTrainer, "train", lambda self: begun.append(1) or train(self))
    file.write_text("\n".join(sentences))
    with monkeypatch.context() as patch:
        patch.setattr("isoreg.experiments.pretrain.save_model", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(config, out, 1)
    for changed in (sentences, sentences[::-1]):
        file.write_text("\n".join(changed))
        assert pretrain(config, out, 1)["text"]["corpus"]["samples"] == 59
        assert pretrain(config, out, 1)["steps"] == 4  # not repeated
        assert sorted(p.name for p in (out / config.key).iterdir()) == ["record.json", "toy-bert"]
    assert len(begun) == 3


def test_bad_models_and_texts_are_named_before_training(text, tmp_path):
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
        (dict(model=str(gpt2)), "(?s)model.*gpt2.*AutoModelForMaskedLM"),
        (dict(model=str(other)), "tokenizer.*mask token"),
        (dict(corpus=str(empty)), "source.*no text"),
        (dict(corpus=str(tmp_path / "none.txt")), "source.*none.txt"),
        (dict(heldout="toy"), "corpus.*held out"),
    ]:
        with pytest.raises(ValueError, match=words):
            pretrain(PretrainConfig(limit=20, steps=1, **values), out)
        assert not out.exists()
    with pytest.raises(ValueError, match="lacks .* weights of its encoder"):
        with_mlm_head(str(other), text[0])
    with pytest.raises(ValueError, match="evaluations: 0"):
        pretrain(PretrainConfig(), out, evaluations=0)


def test_each_source_gives_its_share_and_nothing_is_in_both_parts(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.txt").write_text("\n".join(toy_corpus(50, seed=seed)))
    (tmp_path / "c.txt").write_text("\n".join(["the same line."] * 10))
    files = ", ".join(f"{tmp_path}/{name}.txt" for name in "abc")
    train, heldout = corpus_texts(PretrainConfig(corpus=files, heldout_share=0.1))
    assert heldout == toy_corpus(50, seed=1)[-5:] + toy_corpus(50, seed=2)[-5:] and not set(train) & set(heldout)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_toy_language_models_learn(kind):
    model, corpus, heldout = toy_language_model(kind, steps=50, seed=1)
    assert not model.training and heldout_loss(model, heldout)["loss"] < unigram_loss(corpus, heldout)["loss"] - 0.3
    with pytest.raises(ValueError, match="kind"):
        toy_language_model("bert")
