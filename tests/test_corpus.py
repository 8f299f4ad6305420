"""Samples that stay the same from pass to pass, and losses against the models' own."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fisher import LOSS, MODELS, batch_of, model_of, one_loss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from isoreg.corpus import (
    TextBatches,
    corrupt_spans,
    load_texts,
    mask_tokens,
    model_losses,
    predicted_logits,
    sample_losses,
)
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
    shards = [again.shard(r, 3) for r in range(3)]
    assert set.union(*map(rows, shards)) == whole and sum(len(s.numbers) for s in shards) == 60


def test_seed_epoch_and_resuming():
    corpus = TextBatches(TEXTS, tokenizer(), batch_size=4)
    a, tail = list(corpus), list(corpus.iterate(9))
    assert len(tail) == 6 and all(torch.equal(x[k], y[k]) for x, y in zip(a[9:], tail) for k in x)
    assert rows(a) != rows(TextBatches(TEXTS, tokenizer(), seed=1))
    before = corpus.describe()
    corpus.epoch = 1
    assert rows(a) != rows(corpus) and corpus.describe() != before and json.loads(json.dumps(before)) == before
    assert (
        corpus.describe()["fingerprint"]
        == before["fingerprint"]
        != TextBatches(TEXTS[:-1], tokenizer()).describe()["fingerprint"]
    )


def test_packed_pieces_lose_no_token():
    t = tokenizer()
    packed = TextBatches(TEXTS, t, max_length=32, packed=True)
    assert {len(s) for s in packed.samples} == {32} and all(
        s[0] == t.cls_token_id and s[-1] == t.sep_token_id for s in packed.samples
    )
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
    ids, labels = mask_tokens(
        np.arange(500), special, np.random.default_rng(0), mask_id=-1, vocabulary=np.array([-2]), probability=0.9
    )
    assert (labels[special] == -100).all() and (ids[special] == np.arange(500)[special]).all()
    one, labels = mask_tokens(
        np.arange(3), np.array([True, False, True]), np.random.default_rng(0), -1, np.array([-2]), 0.001
    )
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
    assert model_losses(type("FarForCausalLM", (torch.nn.Module,), {})()) == ["clm"]  # one that came with its own code
    bart = BartConfig(
        vocab_size=9,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
    )
    assert model_losses(BartForConditionalGeneration(bart)) == ["seq2seq", "mlm"]
    assert model_losses(BartForCausalLM(bart)) == ["clm"]
    for name, loss, words in (
        ("gpt2", "mlm", "a causal .*; use 'clm'"),
        ("bert", "clm", "a masked .*; use 'mlm'"),
        ("gpt2", "seq2seq", "no encoder-decoder; use 'clm'"),
        ("t5", "clm", "an encoder-decoder; use 'seq2seq'"),
    ):
        with pytest.raises(ValueError, match=f"loss: '{loss}', but .* is {words}"):
            sample_losses(model_of(name), batch_of(loss), loss)


def test_bad_corpora_and_tokenizers():
    t = tokenizer()
    for texts in ([], ["", "  \n"]):
        with pytest.raises(ValueError, match="texts: the corpus 'x' is empty"):
            TextBatches(texts, t, name="x")
    with pytest.raises(ValueError, match="one string"):
        TextBatches("a text", t)
    with pytest.raises(ValueError, match="no mask token"):
        TextBatches(TEXTS, plain_tokenizer())
    with pytest.raises(ValueError, match="a token that mlm can predict"):
        TextBatches(["[SEP] [CLS]", "[PAD]"], t)
    with pytest.raises(ValueError, match="a token that clm can predict"):
        TextBatches(["a"], plain_tokenizer(), "clm")
    with pytest.raises(ValueError, match="no sentinel tokens"):
        TextBatches(TEXTS, t, "seq2seq")
    with pytest.raises(ValueError, match="loss: 'mse'"):
        TextBatches(TEXTS, t, "mse")
    for wrong in (
        dict(batch_size=0),
        dict(max_length=2),
        dict(probability=0),
        dict(probability=1.5),
        dict(loss="seq2seq", span=0.5),
    ):
        with pytest.raises(ValueError):
            TextBatches(["a b c d"], plain_tokenizer() if "loss" in wrong else t, **wrong)
    with pytest.raises(ValueError, match="share"):
        TextBatches(TEXTS, t).draw(0)
    with pytest.raises(ValueError, match="rank"):
        TextBatches(TEXTS, t).shard(3, 3)
    with pytest.raises(ValueError, match="rank, parts.*60 samples"):
        TextBatches(TEXTS, t).shard(0, 100)
    batch = next(iter(TextBatches([" ".join("abcdefghijklmnopqrstuvwxyz"), "f g h"], plain_tokenizer(), "seq2seq")))
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
    words = ["NA", "None", "nan", "true", "007", "1e3"]
    for name, mark in (("words.csv", ","), ("words.tsv", "\t")):
        (tmp_path / name).write_text("".join(f"{n}{mark}{w}\n" for n, w in enumerate(["text", *words, ""])))
        assert load_texts(tmp_path / name) == words
    for code in ("latin-1", "utf-16"):
        (tmp_path / "e.txt").write_bytes("une élève\n".encode(code))
        with pytest.raises(ValueError, match=r"source: .*e.txt' is no UTF-8 text \(byte \d+\); .* iconv"):
            load_texts(tmp_path / "e.txt")
    (tmp_path / "d.txt").write_text("\n = x = \n")
    with pytest.raises(ValueError, match="holds no text"):
        load_texts(tmp_path / "d.txt")


def test_lines_end_at_line_feeds_alone_and_marks_are_no_text(tmp_path):
    (tmp_path / "a.TXT").write_bytes("\ufeffone\r\ntwo\u2028two\x85two\x0ctwo\nthr\u00e9e".encode())
    assert load_texts(tmp_path / "a.TXT") == ["one", "two\u2028two\x85two\x0ctwo", "thr\u00e9e"]
    for name in ("b.md", "b"):
        (tmp_path / name).write_text("one\n")
        with pytest.raises(
            ValueError, match=r"source: .* of unknown kind; known are \.txt, \.parquet, \.json, \.jsonl, \.csv"
        ):
            load_texts(tmp_path / name)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(batch_size=2.5), "batch_size: 2.5"),
        (dict(batch_size=True), "batch_size: True"),
        (dict(max_length=16.0), "max_length: 16.0"),
        (dict(seed=-1), "seed: -1"),
        (dict(seed=0.5), "seed: 0.5"),
    ],
)
def test_bad_sizes_and_seeds_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        TextBatches(TEXTS, tokenizer(), **wrong)
    two = np.int64(2)
    corpus = TextBatches(TEXTS, tokenizer(), batch_size=15 * two, max_length=15 * two, seed=two)
    assert len(corpus) == 2
    corpus = TextBatches(TEXTS, tokenizer(), batch_size=5, probability=np.float32(0.2), span=np.float32(3))
    part = corpus.draw(np.float32(0.5), two).shard(two, 2 * two)
    assert json.loads(json.dumps(part.describe())) == part.describe()


def test_what_is_no_text_is_named():
    t, table = tokenizer(), pd.DataFrame({"text": TEXTS})
    for texts, words in (
        ([*TEXTS, None], "texts: number 60 .* NoneType; leave out"),
        (pd.Series([*TEXTS, float("nan")]), "texts: number 60 .* float; leave out"),
        (Dataset.from_pandas(table), r"texts: number 0 .* dict; give the column .* data\['text'\]"),
        (table, "texts: is a DataFrame; give a list of texts"),
        ({"text": TEXTS}, "texts: is a dict"),
        (None, "texts: is a NoneType"),
        ([b"a dog sleeps."], "texts: number 0 .* bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            TextBatches(texts, t)
    for texts in (table["text"], Dataset.from_pandas(table)["text"], np.array(TEXTS), iter(TEXTS)):
        assert rows(TextBatches(texts, t)) == rows(TextBatches(TEXTS, t))
    with pytest.raises(ValueError, match="tokenizer: is a list; the texts come first"):
        TextBatches(t, TEXTS)
    with pytest.raises(ValueError, match="tokenizer: is a str; .*AutoTokenizer.from_pretrained"):
        TextBatches(TEXTS, "bert-base-uncased")
