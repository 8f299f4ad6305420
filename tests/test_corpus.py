"""Samples that stay the same from pass to pass, and losses against the models' own."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from test_fisher import LOSS, MODELS, batch_of, model_of, one_loss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, BartConfig, BartForCausalLM, BartForConditionalGeneration
from transformers import PreTrainedTokenizerFast

from isoreg.corpus import TextBatches, corrupt_spans, load_texts, mask_tokens, model_losses, predicted_logits
from isoreg.corpus import sample_losses
from isoreg.experiments.toy import toy_corpus, toy_model_path

TEXTS = toy_corpus(60)


def tokenizer():
    return AutoTokenizer.from_pretrained(toy_model_path())


def plain_tokenizer(special=True):
    "Words a..z and nothing special but what is asked for."
    words = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")} | {"[UNK]": 26}
    words |= {f"<extra_id_{i}>": 27 + i for i in range(10)} | {"</s>": 37} if special else {}
    t = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="[UNK]", eos_token="</s>" if special else None)


def rows(batches):
    "Each sample without its padding, with its labels."
    return {
        (tuple(x[m.bool()].tolist()), tuple(y[y != -100].tolist()))
        for b in batches
        for x, m, y in zip(b["input_ids"], b["attention_mask"], b["labels"])
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 17), st.floats(0.02, 1), st.integers(0, 1000))
def test_a_sample_does_not_depend_on_its_batch(size, share, seed):
    corpus = TextBatches(TEXTS, tokenizer(), seed=seed % 3)
    whole = rows(corpus)
    again = TextBatches(TEXTS, tokenizer(), batch_size=size, seed=seed % 3)
    assert rows(again) == whole and len(list(again)) == len(again)
    part = again.draw(share, seed)
    assert rows(part) <= whole and len(part.numbers) == max(1, round(share * 60))
    assert part.draw(share, 1).describe()["drawn"] == [share, seed, share, 1]


def test_seed_and_epoch():
    corpus = TextBatches(TEXTS, tokenizer(), batch_size=4)
    a = list(corpus)
    assert rows(a) != rows(TextBatches(TEXTS, tokenizer(), seed=1))
    before, other = corpus.describe(), TextBatches(TEXTS[:-1], tokenizer()).describe()
    corpus.epoch = 1
    assert rows(a) != rows(corpus) and corpus.describe() != before and json.loads(json.dumps(before)) == before
    assert corpus.describe()["fingerprint"] == before["fingerprint"] != other["fingerprint"]


def test_packed_pieces_lose_no_token():
    t = tokenizer()
    packed = TextBatches(TEXTS, t, max_length=32, packed=True)
    assert {(len(s), s[0], s[-1]) for s in packed.samples} == {(32, t.cls_token_id, t.sep_token_id)}
    stream = [i for text in TEXTS for i in [*t(text, add_special_tokens=False)["input_ids"], t.sep_token_id]]
    inside = [i for s in packed.samples for i in s[1:-1]]
    assert inside == stream[: len(inside)] and len(stream) - len(inside) < 30


@given(st.integers(2, 80), st.floats(0.05, 0.6), st.floats(1, 5), st.integers(0, 99))
def test_cut_spans_can_be_put_back(n, density, span, seed):
    ids, sentinels, end = np.arange(1000, 1000 + n), list(range(50)), 99
    source, target = corrupt_spans(ids, np.random.default_rng(seed), sentinels, end, density, span)
    assert source[-1] == target[-1] == end
    spans, current = {}, None
    for i in target[:-1]:
        if i < 50:
            current = spans.setdefault(i, [])
        else:
            current.append(i)
    back = [x for i in source[:-1] for x in (spans[i] if i < 50 else [i])]
    assert back == ids.tolist() and list(spans) == sentinels[: len(spans)] and spans[len(spans) - 1] == []
    assert all(len(s) for s in list(spans.values())[:-1])
    assert sum(map(len, spans.values())) == min(max(round(n * density), 1), n - 1)


def test_who_shares_a_batch_is_drawn_at_random_when_asked():
    sorted_, random_ = (TextBatches(TEXTS, tokenizer(), batch_size=8, seed=2, by_length=b) for b in (True, False))
    assert rows(sorted_) == rows(random_) and [len(b["labels"]) for b in random_] == [8] * 7 + [4]
    padding = lambda batches: sum(int((b["attention_mask"] == 0).sum()) for b in batches)
    assert padding(random_) > 2 * padding(sorted_) > 0
    again = TextBatches(TEXTS, tokenizer(), batch_size=8, seed=2, by_length=False)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(random_, again, strict=True))
    assert random_.describe() == sorted_.describe() | {"by_length": False} and rows(random_.draw(0.5)) < rows(random_)


def test_masking_spares_special_tokens():
    special = np.zeros(500, bool)
    special[::7] = True
    rng, vocabulary = np.random.default_rng(0), np.array([-2])
    ids, labels = mask_tokens(np.arange(500), special, rng, mask_id=-1, vocabulary=vocabulary, probability=0.9)
    assert (labels[special] == -100).all() and (ids[special] == np.arange(500)[special]).all()
    labels = mask_tokens(np.arange(3), np.array([True, False, True]), rng, -1, vocabulary, 0.001)[1]
    assert labels.tolist() == [-100, 1, -100]


@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_the_model_on_each_sequence_alone(name):
    model, loss = model_of(name), LOSS.get(name, "mlm")
    batch = batch_of(loss)
    with torch.no_grad():
        for reduction in ("mean", "sum"):
            right = torch.stack([one_loss(model, batch, i, loss, reduction) for i in range(4)])
            torch.testing.assert_close(sample_losses(model, batch, loss, reduction), right, rtol=1e-9, atol=1e-12)
        alone = torch.stack([one_loss(model, batch, i, loss, "sum") for i in range(4)])
        logits, target, row = predicted_logits(model, batch, loss)
        torch.testing.assert_close(
            sample_losses(model, batch, loss, "batch"), (alone.sum() / len(row)).expand(4), rtol=1e-9, atol=1e-12
        )
    assert len(logits) == len(target) == len(row) and (row.diff() >= 0).all()
    assert not any(m._forward_hooks for m in model.modules())


def test_the_losses_of_a_class():
    own = type("Own", (type(model_of("gpt2")),), {})
    for name in MODELS:
        assert model_losses(model_of(name)) == [LOSS.get(name, "mlm")]
    assert model_losses(own(model_of("gpt2").config)) == ["clm"] and model_losses(torch.nn.Linear(2, 2)) == []
    size = dict(d_model=8, encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
    bart = BartConfig(vocab_size=9, encoder_layers=1, decoder_layers=1, **size)
    assert model_losses(BartForConditionalGeneration(bart)) == ["seq2seq"]
    assert model_losses(BartForCausalLM(bart)) == ["clm"]
    for name, loss in (("gpt2", "mlm"), ("bert", "clm"), ("gpt2", "seq2seq"), ("t5", "clm")):
        right = LOSS.get(name, "mlm")
        with pytest.raises(ValueError, match=f"loss: '{loss}', but .* was made for '{right}'"):
            sample_losses(model_of(name), batch_of(loss), loss)


ALPHABET = " ".join("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: TextBatches([], t), "texts: need a list of strings"),
        (lambda t: TextBatches(["", " \n"], t, name="x"), "texts: the corpus 'x' has no token"),
        (lambda t: TextBatches(["[SEP] [CLS]", "[PAD]"], t), "texts: .*has no token that mlm"),
        (lambda t: TextBatches(["a"], plain_tokenizer(), "clm"), "texts: .*has no token that clm"),
        (lambda t: TextBatches("a text", t), "texts: need a list of strings"),
        (lambda t: TextBatches([*TEXTS, None], t), "texts: need a list of strings"),
        (lambda t: TextBatches(pd.DataFrame({"text": TEXTS}), t), r"texts: .*data\['text'\]"),
        (lambda t: TextBatches({"text": TEXTS}, t), "texts: need"),
        (lambda t: TextBatches(TEXTS, plain_tokenizer()), "tokenizer: has no mask token"),
        (lambda t: TextBatches(TEXTS, t, "seq2seq"), "tokenizer: has no sentinel tokens"),
        (lambda t: TextBatches(TEXTS, t, "mse"), "loss: 'mse'"),
        (lambda t: TextBatches(TEXTS, t, batch_size=0), "batch_size: 0"),
        (lambda t: TextBatches(TEXTS, t, max_length=1), "max_length: 1"),
        (lambda t: TextBatches(TEXTS, t, seed=-1), "seed: -1"),
        (lambda t: TextBatches(TEXTS, t, probability=15), "probability: 15"),
        (lambda t: TextBatches(TEXTS, t, span=0.5), "span: 0.5"),
        (lambda t: TextBatches(TEXTS, t).draw(0), "share: 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match="^" + message):
        call(tokenizer())


def test_columns_of_tables_are_texts():
    table = pd.DataFrame({"text": TEXTS})
    for texts in (table["text"], Dataset.from_pandas(table)["text"], np.array(TEXTS)):
        assert rows(TextBatches(texts, tokenizer())) == rows(TextBatches(TEXTS, tokenizer()))


def test_a_short_text_of_t5_shares_a_batch():
    batch = next(iter(TextBatches([ALPHABET, "f g h"], plain_tokenizer(), "seq2seq")))
    assert batch["input_ids"].shape[0] == batch["labels"].shape[0] == 2 and (batch["labels"] == -100).any()


def test_texts_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n = Heading = \n two @-@ fold 1 @,@ 000 \n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"line": "three"}) + "\n" + json.dumps({"line": ""}) + "\n")
    assert load_texts(tmp_path / "a.txt") == ["one", "two-fold 1,000"]
    assert load_texts([tmp_path / "a.txt", tmp_path / "a.txt"], limit=3) == ["one", "two-fold 1,000", "one"]
    assert load_texts(tmp_path / "b.jsonl", "line") == ["three"]
    with pytest.raises(ValueError, match="column: .* has no column 'text'; choose one of line"):
        load_texts(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="source: no file"):
        load_texts(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="limit"):
        load_texts(tmp_path / "a.txt", limit=0)
    (tmp_path / "numbers.csv").write_text("text\n0\n13\n")
    assert load_texts(tmp_path / "numbers.csv") == ["0", "13"]
    (tmp_path / "e.txt").write_bytes("une élève\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"source: .*e.txt' cannot be read \('utf-8' codec"):
        load_texts(tmp_path / "e.txt")
    (tmp_path / "d.txt").write_text("\n = x = \n")
    with pytest.raises(ValueError, match="holds no text"):
        load_texts(tmp_path / "d.txt")


def test_lines_end_at_line_feeds_alone_and_marks_are_no_text(tmp_path):
    (tmp_path / "a.TXT").write_bytes("\ufeffone\r\ntwo\u2028two\x85two\x0ctwo\nthr\u00e9e".encode())
    assert load_texts(tmp_path / "a.TXT") == ["one", "two\u2028two\x85two\x0ctwo", "thr\u00e9e"]
    for name in ("b.md", "b"):
        (tmp_path / name).write_text("one\n")
        with pytest.raises(ValueError, match=r"source: .* of unknown kind; known are \.txt, \.parquet, \.json"):
            load_texts(tmp_path / name)
