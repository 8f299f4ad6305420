"""Embeddings: files, models and texts against plain loops, comparisons against the jackknife by hand, the page."""

import csv
import json
import re
import sys

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy import stats
from sklearn.metrics.pairwise import cosine_similarity
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2Model, PreTrainedTokenizerFast
from typer.testing import CliRunner

from isoreg import embeddings
from isoreg.cli import app
from isoreg.embeddings import (
    MEASURES,
    compare,
    compare_points,
    describe,
    draw_pairs,
    draw_texts,
    embed,
    embed_layers,
    measure_model,
    measure_points,
    read_points,
    report_page,
    score_points,
)
from isoreg.geometry import effective_rank
from isoreg.isoscore import isoscore, isoscore_with_error
from isoreg.sequences import draw_groups, isoscore_by_sequence
from isoreg.toy import toy_corpus, toy_model_path
from isoreg.vectors import alignment, dimensions_in_use


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def cloud(n=120, d=10, seed=0):
    g = np.random.default_rng(seed)
    return g.normal(size=(n, d)) * np.linspace(0.2, 2, d) + 0.3


@pytest.fixture(scope="module")
def texts():
    return toy_corpus(60, seed=5)


# ---- files


def test_every_kind_of_file_gives_the_same_vectors(tmp_path):
    x = cloud()
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(10)])
    frame.to_csv(tmp_path / "heads.csv", index=False)
    frame.to_csv(tmp_path / "bare.csv", index=False, header=False)
    frame.to_csv(tmp_path / "quoted.csv", index=False, header=False, quoting=csv.QUOTE_ALL)
    frame.to_csv(tmp_path / "tabs.tsv", index=False, sep="\t")
    pd.DataFrame(x).to_csv(tmp_path / "pandas.csv", index=False)
    pd.DataFrame(x).to_csv(tmp_path / "index.csv")
    frame.assign(id=range(120), text="a, b").to_csv(tmp_path / "beside.csv", index=False)
    frame.to_feather(tmp_path / "x.feather")
    table = pa.table({"vector": list(x), "id": range(120)})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as f, pa.ipc.new_file(f, table.schema) as out:
        out.write_table(table)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as out:
        out.write_table(table)
    torch.save(torch.tensor(x), tmp_path / "tensor.pt")
    torch.save([torch.tensor(row) for row in x], tmp_path / "rows.pt")
    torch.save({"emb": torch.tensor(x), "n": 3}, tmp_path / "dict.pth")
    with pytest.warns(UserWarning, match="10 columns are read as dimensions"):
        for name in (
            "heads.csv",
            "bare.csv",
            "quoted.csv",
            "pandas.csv",
            "index.csv",
            "tabs.tsv",
            "beside.csv",
            "x.feather",
        ):
            assert np.allclose(read_points(tmp_path / name), x, atol=1e-14), name
    for name in ("file.arrow", "stream.arrow", "tensor.pt", "rows.pt", "dict.pth"):
        assert np.allclose(read_points(tmp_path / name), x, atol=0), name


def test_whole_numbers_of_a_table_are_dimensions_where_no_column_has_a_name(tmp_path):
    x = cloud().clip(min=0).round(3)
    x[:, 3] = 0
    np.savetxt(tmp_path / "bare.csv", x, delimiter=",", fmt="%g")  # writes 0 and not 0.0
    pd.DataFrame(x).to_csv(tmp_path / "counted.csv", header=False, float_format="%g")  # the rows' numbers in front
    for name, number in (("bare.csv", 4), ("counted.csv", 5)):
        with (
            pytest.warns(UserWarning, match="10 columns are read as dimensions"),
            pytest.warns(
                UserWarning, match=f"columns of whole numbers are read as dimensions: {number} .from 1.; leave"
            ),
        ):
            assert np.allclose(read_points(tmp_path / name), x)
    pd.DataFrame(x, columns=list("abcdefghij")).to_csv(tmp_path / "heads.csv", index=False, float_format="%g")
    with pytest.warns(UserWarning, match="9 columns .* a, b, .*; left out are d; .* with a point"):
        assert np.allclose(read_points(tmp_path / "heads.csv"), np.delete(x, 3, 1))


def test_a_table_keeps_its_first_vector(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 8)).round(3)
    frame = pd.DataFrame(x)
    frame.insert(0, "word", [f"w{i}" for i in range(60)])
    frame.to_csv(tmp_path / "named.csv", index=False, header=False)
    frame.to_csv(tmp_path / "heads.csv", index=False)
    frame.to_csv(tmp_path / "index.csv")
    (tmp_path / "blank.csv").write_text("\n" + pd.DataFrame(x).to_csv(index=False, header=False))
    counted = pd.DataFrame(x, columns=range(1, 9), index=frame.word)  # heads that begin at one
    counted.to_csv(tmp_path / "one.csv")
    counted.rename_axis(None).to_csv(tmp_path / "empty.csv")
    for name in ("named.csv", "heads.csv", "index.csv", "blank.csv", "one.csv", "empty.csv"):
        with pytest.warns(UserWarning, match="8 columns are read as dimensions"):
            assert np.allclose(read_points(tmp_path / name), x)
    for heads in (range(1, 9), [3, 7, 9, 12, 20, 21, 30, 44]):  # whole numbers that rise, above others
        pd.DataFrame(x, columns=heads).to_csv(tmp_path / "rising.csv", index=False)
        with pytest.warns(UserWarning, match="8 columns are read as dimensions"):
            assert np.allclose(read_points(tmp_path / "rising.csv"), x)
    for second in ("-3,4,9", "3,,9", "3,nan,9", "3,0.5,9"):  # the first line is a vector
        (tmp_path / "whole.csv").write_text(f"1,2,5\n{second}\n7,0,-1\n")
        with pytest.warns(UserWarning, match="3 columns are read as dimensions"):
            assert read_points(tmp_path / "whole.csv").shape == (3, 3)
    words = frame.astype(str)
    words.iloc[5, 3] = "x"
    words.to_csv(tmp_path / "typo.csv", index=False, header=False)
    with pytest.warns(UserWarning, match="7 columns are read as dimensions: 1, 2, 4, .*; left out are 0, 3; leave out"):
        assert read_points(tmp_path / "typo.csv").shape == (60, 7)
    frame.drop(columns="word").iloc[1:].reindex(range(60)).to_csv(tmp_path / "gap.csv", index=False, header=False)
    with pytest.raises(ValueError, match="NaN"), pytest.warns(UserWarning):
        score_points(read_points(tmp_path / "gap.csv"))


def test_a_quotation_mark_is_a_word_of_a_table_with_tabs(tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 4)).round(3)
    for quotes in ([3], [3, 9], [3, 49], [0, 1]):
        lines = ["\t".join(['"' if i in quotes else f"w{i}", *map(str, row)]) for i, row in enumerate(x)]
        (tmp_path / "words.tsv").write_text("\n".join(lines))
        with pytest.warns(UserWarning, match="4 columns are read as dimensions: 1, 2, 3, 4; left out are 0"):
            assert np.allclose(read_points(tmp_path / "words.tsv"), x)
    for mark in "\t", "\n":  # marks in pairs stand around a text
        quoted = pd.DataFrame(x, columns=list("abcd"), index=[f"of{mark}{i}" for i in range(50)])
        quoted.to_csv(tmp_path / "quoted.tsv", sep="\t")
        with pytest.warns(UserWarning, match="4 columns are read as dimensions: a, b, c, d"):
            assert np.allclose(read_points(tmp_path / "quoted.tsv"), x)


def test_vectors_written_as_texts_are_named(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 4))
    for column in (x.tolist(), list(x), list(map(list, x)), [None, *x[1:].tolist()]):
        pd.DataFrame({"id": range(20), "vector": column}).to_csv(tmp_path / "lists.csv", index=False)
        with pytest.raises(ValueError, match="array: column 'vector' holds lists of numbers as text; .* .parquet"):
            read_points(tmp_path / "lists.csv")
    pd.DataFrame(x).assign(spans="[0, 12]").to_csv(tmp_path / "spans.csv", index=False)
    with pytest.warns(UserWarning, match="4 columns .* left out are spans"):
        assert np.allclose(read_points(tmp_path / "spans.csv"), x)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_named(kind, tmp_path):
    table = pa.Table.from_arrays([pa.array([1.0, 2, 3])] * 3, names=["a", "a", "b"])
    if kind == "parquet":
        pa.parquet.write_table(table, tmp_path / "x.parquet")
    else:
        with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write(table)
    for name in (None, "a"):
        with pytest.raises(ValueError, match="array: the file has several columns called 'a'; rename all but one"):
            read_points(tmp_path / f"x.{kind}", name)


def test_texts_that_the_model_has_no_room_for_are_refused():
    with pytest.raises(
        ValueError, match="max_length: 2 is out of range; need a whole number of at least 3; of them .* adds 2 to"
    ):
        embed("toy-bert", ["a dog."], max_length=2)
    assert embed("toy-bert", ["a dog."], max_length=3).shape == (1, 96)


def test_texts_that_are_cut_are_told(tmp_path):
    "And may be read whole: the vectors of a cut text are those of its first tokens."
    texts = [f"every dog {'sleeps ' * k}." for k in range(8)]
    with pytest.warns(UserWarning, match="max_length: 5 of 8 texts fill 8 tokens; what is longer is cut, unless more"):
        cut = embed("toy-bert", texts, max_length=8)
    whole = embed("toy-bert", texts, max_length=32)
    assert [torch.allclose(a, b, atol=1e-5) for a, b in zip(cut, whole)] == [True] * 4 + [False] * 4
    (tmp_path / "t.txt").write_text("\n".join(texts))
    told = CliRunner().invoke(app, ["score", str(tmp_path / "t.txt"), "--model", "toy-bert", "--max-length", "8"])
    assert told.exit_code == 0 and "5 of 8 texts fill 8 tokens" in told.stderr


@pytest.mark.parametrize("kind, first", [("Bert", 0), ("Roberta", 2)])
def test_a_tokenizer_that_names_no_length_has_that_of_the_model(tmp_path, kind, first):
    "RoBERTa counts its positions from behind the padding id."
    import transformers

    tokenizer = AutoTokenizer.from_pretrained(toy_model_path())
    tokenizer.model_max_length = int(1e30)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), max_position_embeddings=20, pad_token_id=1, **sizes
    )
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"max_length: 1 of 1 texts fill {20 - first} tokens; what is longer is cut$"):
        assert embed(str(tmp_path), ["every dog " + "sleeps " * 50]).shape == (1, 16)


def test_a_table_with_more_values_than_names_is_refused(tmp_path):
    for rows in ("1.5,2.5,3.5\n" * 9, "0,1.5,2.5\n1,2.5,3.5\n2,1.0,7\n"):
        (tmp_path / "x.csv").write_text("a,b\n" + rows)
        with pytest.raises(ValueError, match="file: x.csv .*more values than its first line has names"):
            read_points(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("a,b\n" + "1.5,2.5,\n" * 9)  # commas at the ends
    assert read_points(tmp_path / "x.csv").shape == (9, 2)
    (tmp_path / "t.csv").write_text("text\n" + "one,two\n" * 9)
    with pytest.raises(ValueError, match="more values than its first line has names"):
        draw_texts(tmp_path / "t.csv", 5, 0)


def test_points_may_be_a_data_frame_or_lists():
    x = cloud(60)
    want = measure_points(x)
    for points in (pd.DataFrame(x, columns=list("abcdefghij")), x.tolist(), [torch.tensor(row) for row in x]):
        found = measure_points(points, points)
        for name in ("isoscore", "corrected", "standard_error"):
            assert found.rows[0][name] == pytest.approx(want.rows[0][name], rel=1e-9)
        measures = want.details["measures"] | {"alignment": 0.0}
        assert found.details["measures"] == pytest.approx(measures, rel=1e-6, abs=1e-9)
    with pytest.raises(ValueError, match="points: this Series is no array of numbers"):
        score_points(pd.Series(list(x)))


def test_what_is_no_file_of_vectors_is_refused(tmp_path):
    torch.save({"a": np.random.default_rng(0)}, tmp_path / "object.pt")
    with pytest.raises(ValueError, match="file: object.pt holds Python objects, which only unpickling would read"):
        read_points(tmp_path / "object.pt")
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, tmp_path / "two.pt")
    with pytest.raises(ValueError, match="array: the file holds a, b; choose one"):
        read_points(tmp_path / "two.pt")
    pd.DataFrame({"text": ["a", "b"]}).to_csv(tmp_path / "words.csv", index=False)
    with pytest.raises(ValueError, match="array: no column of numbers"):
        read_points(tmp_path / "words.csv")
    (tmp_path / "broken.arrow").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="file: broken.arrow is damaged, or no .arrow file"):
        read_points(tmp_path / "broken.arrow")


def test_texts_of_a_table_are_drawn_too(tmp_path):
    rows = [f"text {i}" for i in range(300)]
    pd.DataFrame({"sentence": rows}).to_parquet(tmp_path / "t.parquet")
    drawn, total = draw_texts(tmp_path / "t.parquet", 50, 1, "sentence")
    assert total == 300 and len(set(drawn)) == 50 and set(drawn) < set(rows)
    assert sum(int(t.split()[1]) < 50 for t in drawn) < 25  # not the first ones
    pd.DataFrame({"id": range(300), "sentence": rows}).to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    assert draw_texts(tmp_path / "t.tsv", 50, 1, "sentence") == (drawn, total)
    with pytest.raises(ValueError, match="column: .* has no column 'other'; choose one of id, sentence"):
        draw_texts(tmp_path / "t.tsv", column="other")


# ---- a model on texts


@pytest.mark.parametrize("pooling", ["tokens", "mean", "cls", "last"])
def test_vectors_are_those_of_a_loop_over_texts(texts, pooling):
    tokenizer, model = AutoTokenizer.from_pretrained(toy_model_path()), AutoModel.from_pretrained(toy_model_path())
    pool = {"tokens": lambda h: h, "mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}[pooling]
    with torch.no_grad():
        one = lambda t, k: model.eval()(**tokenizer(t, return_tensors="pt"), output_hidden_states=True).hidden_states[k]
        for layer in (-1, 2):
            right = torch.cat([torch.atleast_2d(pool(one(t, layer)[0])) for t in texts])
            found = embed("toy-bert", texts, pooling, layer)
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
            unit = embed("toy-bert", texts, pooling, layer, normalize=True)
            torch.testing.assert_close(unit, right / right.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_few_texts_and_texts_of_any_sequence_have_vectors(texts):
    want = embed("toy-bert", texts)
    for given in (tuple(texts), np.array(texts), pd.Series(texts), iter(texts)):
        assert torch.equal(embed(toy_model_path(), given), want)
    for n in (1, 5):
        torch.testing.assert_close(embed("toy-bert", texts[:n]), want[:n], rtol=1e-4, atol=1e-5)
    for wrong, what in (
        ("a text", "'a text' is a str"),
        ([*texts, None], "None is a NoneType"),
        ([], "none has a token"),
    ):
        with pytest.raises(ValueError, match=f"texts: {what}"):
            embed("toy-bert", wrong)


def test_refusals_of_a_model(texts):
    with pytest.raises(ValueError, match="pooling: 'average' is unknown"):
        embed("toy-bert", texts, "average")
    with pytest.raises(ValueError, match="layers: not all among the hidden states 0 to 4"):
        embed("toy-bert", texts, "mean", 7)
    with pytest.raises(ValueError, match="layer: 9 is out of range"):
        measure_model("toy-bert", texts, pooling="tokens", layer=9)
    with pytest.raises(ValueError, match="pairs: belong to texts, not to tokens"):
        measure_model("toy-bert", texts, texts)


def gpt2(folder, tokenizer):
    "A small model of absolute positions, random but far from zero, beside a tokenizer."
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2)
    model = GPT2Model(config)
    for p in model.parameters():
        p.data.mul_(20 if p.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_on_the_left_moves_no_position(tmp_path, pooling):
    model = gpt2(tmp_path, AutoTokenizer.from_pretrained(toy_model_path(), padding_side="left"))
    texts = [*(f"every dog {'sleeps ' * k}." for k in range(9)), "a cat runs in every park ."]
    assert AutoTokenizer.from_pretrained(model).padding_side == "left"
    alone = torch.cat([embed(model, [t] * 6, pooling)[:1] for t in texts])
    torch.testing.assert_close(embed(model, texts, pooling), alone, rtol=1e-4, atol=1e-4)


def test_a_text_without_tokens_has_no_vector(tmp_path):
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    special = dict(pad_token="[PAD]", unk_token="[UNK]", eos_token="[PAD]")
    model = gpt2(tmp_path, PreTrainedTokenizerFast(tokenizer_object=words, **special))
    texts = ["a b", "", "c d", "e f", "g h", "a c", "b d", "e g"]
    for call in (embed, embed_layers):
        with pytest.raises(ValueError, match=r"texts: number 1 \(from 0\) has no token; leave it out, and its partner"):
            call(model, texts, "mean")
    assert embed(model, texts, "tokens").shape == (14, 16) and embed(model, texts[:1] + texts[2:], "mean").shape[0] == 7


def test_layers_of_a_model_are_scored_each(texts):
    numbers, points = embed_layers("toy-bert", texts, "mean")
    found = measure_model("toy-bert", texts, pooling="mean", layer=1)
    assert numbers == [r["layer"] for r in found.rows] == list(range(5)) and found.shown == 1
    for row, x in zip(found.rows, points):
        assert row["corrected"] == pytest.approx(float(isoscore(x, correction="ustat")), rel=1e-5)
        assert row["dimensions_in_use"] == dimensions_in_use(row["corrected"], 96)
    rank = found.details["measures"]["effective_rank"]
    assert rank == pytest.approx(effective_rank(points[1]), rel=1e-5)
    first = measure_model("toy-bert", texts, pooling="cls")  # before the first layer it is the same in all texts
    assert first.rows[0] == {"layer": 0} and "corrected" in first.rows[-1]


def test_tokens_of_length_one(texts):
    plain, unit = (measure_model("toy-bert", texts, normalize=n) for n in (False, True))
    tokens = embed("toy-bert", texts, "tokens", normalize=True)
    assert unit.rows[-1]["isoscore"] == pytest.approx(float(isoscore(tokens)), abs=1e-5)
    assert unit.rows[-1]["isoscore"] != pytest.approx(plain.rows[-1]["isoscore"], abs=1e-4)


@pytest.fixture
def sentence_model(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers import models

    body = models.Transformer(str(toy_model_path()))
    size = AutoModel.from_pretrained(toy_model_path()).config.hidden_size
    model = library.SentenceTransformer(modules=[body, models.Pooling(size, pooling_mode="cls"), models.Normalize()])
    model.save(str(tmp_path / "sentences"))
    return tmp_path / "sentences", model


def test_a_sentence_transformer_is_run_as_it_is(sentence_model, texts):
    folder, model = sentence_model
    right = model.encode(texts, convert_to_tensor=True).cpu()
    torch.testing.assert_close(embed(str(folder), texts), right)
    torch.testing.assert_close(right.norm(dim=1), torch.ones(60))  # its own modules: first token, length one
    found = measure_model(str(folder), texts)
    assert found.rows[0]["layer"] == "output"
    assert found.rows[0]["corrected"] == pytest.approx(float(isoscore(right, correction="ustat")), rel=1e-5)
    with pytest.raises(ValueError, match="longest, max_length: not for a SentenceTransformers model as it is"):
        embed(str(folder), texts, max_length=8, longest=8, normalize=True)
    for ask in (embed, measure_model):
        with pytest.raises(ValueError, match="layer: not for a SentenceTransformers model as it is"):
            ask(str(folder), texts, layer=0)
    inside = embed(str(folder), texts, "cls")  # a pooling that is named reads the encoder alone
    torch.testing.assert_close(torch.nn.functional.normalize(inside), right, rtol=1e-4, atol=1e-5)
    for half in (torch.bfloat16, torch.float16):
        model.to(half).save(str(folder))
        rounded = model.float().encode(texts, convert_to_tensor=True).cpu()
        torch.testing.assert_close(embed(str(folder), texts), rounded)  # also in type: float32


def test_a_sentence_transformer_without_its_library(tmp_path, texts, monkeypatch):
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"SentenceTransformers model; pip install 'isoreg\[integrations\]'"):
        embed(str(tmp_path), texts)


# ---- what else is measured


def test_what_is_described_is_defined_independently():
    x = cloud(300, 12)
    y = x + 0.2 * cloud(300, 12, 1)
    found = describe(x, y)
    upper = np.triu_indices(300, 1)
    assert found["measures"]["average_cosine"] == pytest.approx(cosine_similarity(x)[upper].mean())
    assert found["measures"]["mean_share"] == pytest.approx((x.mean(0) ** 2).sum() / (x**2).sum(1).mean())
    assert found["measures"]["alignment"] == pytest.approx(2 - 2 * np.diag(cosine_similarity(x, y)).mean())
    p = np.linalg.eigvalsh(np.cov(x.T))
    p /= p.sum()
    assert found["measures"]["rankme_eigen"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert set(found["measures"]) < set(MEASURES) and found["pairs_of"] == 300
    steps = {row["step"]: row for row in found["steps"]}
    assert steps["centred"]["average_cosine"] == pytest.approx(cosine_similarity(x - x.mean(0))[upper].mean(), abs=1e-9)
    assert steps["whitened"]["isoscore"] == pytest.approx(1)
    moved = alignment(x - x.mean(0), y - x.mean(0))  # partners go through the step of the points
    assert steps["centred"]["alignment"] == pytest.approx(moved)


def test_pairs_are_taken_of_rows_drawn_at_random():
    x = cloud(500, 6)
    x[:100] = x[:100] * 0.01 + 5  # a sorted file
    few, other, whole = describe(x, limit=100), describe(x, limit=100, seed=1), describe(x)
    assert few["pairs_of"] == 100 and few["measures"]["uniformity"] != other["measures"]["uniformity"]
    assert few["measures"]["uniformity"] == pytest.approx(whole["measures"]["uniformity"], abs=0.4)
    assert few["measures"]["effective_rank"] == whole["measures"]["effective_rank"]


def test_what_a_cloud_does_not_have_is_none():
    found = describe(np.r_[np.zeros((1, 4)), cloud(9, 4)])  # a row without direction, and few rows
    missing = ["average_cosine", "alpha_req", "uniformity", "hubness"]
    assert all(found["measures"][k] is None for k in missing) and found["measures"]["effective_rank"] > 1
    json.dumps(found, allow_nan=False)
    with pytest.raises(ValueError, match="pairs: 8 rows beside 9"):
        describe(cloud(9, 4), cloud(8, 4))


# ---- comparisons


def test_a_difference_is_the_jackknife_by_hand():
    x, y = cloud(40, 5), cloud(40, 5) * 0.9 + 0.2 * cloud(40, 5, 1)
    found = compare_points(x, y, groups=40)
    without = lambda a: np.array([float(isoscore(np.delete(a, i, 0), correction="ustat")) for i in range(40)])
    d = without(x) - without(y)
    stderr = np.sqrt(39 / 40 * ((d - d.mean()) ** 2).sum())
    assert found.stderr == pytest.approx(stderr) and found.paired
    assert found.difference == pytest.approx(isoscore(x, correction="ustat") - isoscore(y, correction="ustat"))
    assert found.high - found.difference == pytest.approx(stats.t.ppf(0.975, 39) * stderr)
    same = compare_points(x, x)
    assert same.difference == same.stderr == 0
    apart = compare_points(x, y[:-1])
    errors = [isoscore_with_error(a).stderr for a in (x, y[:-1])]
    assert not apart.paired and apart.stderr == pytest.approx(np.hypot(*errors)) and apart.stderr > found.stderr


def without_each(x, group):
    return [float(isoscore(x[group != g], correction="ustat")) for g in range(int(group.max()) + 1)]


@pytest.mark.parametrize("n, d, scale", [(60, 5, 1), (30, 80, 1), (2100, 6, 1), (60, 5, 1e40), (2100, 6, 1e-40)])
def test_scores_without_a_group_are_those_of_the_other_rows(n, d, scale):
    x, group = torch.from_numpy(scale * (10 + cloud(n, d))), draw_groups(n, 20)
    np.testing.assert_allclose(embeddings._scores_without_group(x, group), without_each(x, group), rtol=1e-9)


@pytest.mark.parametrize("n", [60, 2100])
@pytest.mark.parametrize("kind", ["outlier", "float16", "bfloat16", "parameter"])
def test_scores_without_a_group_of_odd_clouds(n, kind):
    x, group = torch.from_numpy(cloud(n, 6)).float(), draw_groups(n, 20)
    if kind == "outlier":
        x = x.double()
        x[7] *= 1e4  # it is most of every sum but those without its group
    elif kind == "parameter":
        x = torch.nn.Parameter(x)
    else:
        x = x.to(getattr(torch, kind))
    scores = embeddings._cloud_scores(x, 20)
    np.testing.assert_allclose(scores.left, without_each(x.detach(), group), rtol=1e-4)


@pytest.mark.parametrize("n", [60, 2100])
def test_groups_that_leave_no_cloud_are_told(n):
    with pytest.raises(ValueError, match="only 2 rows count"):
        compare_points(cloud(5, 3), cloud(5, 3, 1), groups=2)
    constant = np.ones((n, 3))
    constant[draw_groups(n, 50).numpy() == 3] = cloud(n, 3)[draw_groups(n, 50).numpy() == 3]
    if n > 60:  # with one row that differs the whole has no score
        with pytest.raises(ValueError, match="all rows of a cloud are equal"):
            compare_points(constant, cloud(n, 3))


def test_models_are_compared_by_the_same_groups_of_texts(texts):
    one, other = (measure_model("toy-bert", texts, layer=k) for k in (4, 1))
    found = compare(one, other)
    tokenizer, model = AutoTokenizer.from_pretrained(toy_model_path()), AutoModel.from_pretrained(toy_model_path())
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**batch, output_hidden_states=True).hidden_states
    mask, group = batch["attention_mask"], draw_groups(60, 20)
    left = [
        [float(isoscore_by_sequence(h[group != g].double(), mask[group != g])) for g in range(20)]
        for h in (states[4], states[1])
    ]
    d = np.subtract(*left)
    assert found.paired and found.stderr == pytest.approx(np.sqrt(19 / 20 * ((d - d.mean()) ** 2).sum()), rel=1e-3)


# ---- the command


def test_several_files_are_compared_by_row(tmp_path):
    x, y = cloud(), cloud() * 1.1 + 0.1 * cloud(seed=1)
    for name, values in {"x": x, "y": y, "few": x[:50]}.items():
        np.save(tmp_path / f"{name}.npy", values)
    files = [tmp_path / f"{n}.npy" for n in ("x", "y", "few")]
    result = invoke("score", *files, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["scores"][str(files[1])]["corrected"] == pytest.approx(float(isoscore(y, correction="ustat")))
    right = compare_points(y, x)._asdict()
    by = found["differences"]
    assert {k: by[0][k] for k in right} == pytest.approx(right) and [d["paired"] for d in by] == [True, False]
    shown = invoke("score", *files).stdout
    assert "paired by row" in shown and "not paired: different numbers of rows" in shown


def test_the_page_and_the_screen_say_the_same(tmp_path):
    np.save(tmp_path / "x.npy", cloud())
    np.save(tmp_path / "y.npy", cloud() + 0.1)
    page = tmp_path / "out" / "page.html"
    result = invoke("score", tmp_path / "x.npy", "--pairs", tmp_path / "y.npy", "--html", page)
    assert result.exit_code == 0, result.stderr
    text = page.read_text()
    assert not re.search(r"<script|<link|@import|url\(|href=|src=(?!\"data:)", text)
    used = score_points(cloud())["dimensions_in_use"]
    assert f"{used:.1f} of 10" in text and f"{used:.1f}" in result.stdout  # one definition
    value = describe(cloud(), cloud() + 0.1)["measures"]["alignment"]
    assert f"{value:.4g}" in text and f"{value:.4g}" in result.stdout
    for key in ("alpha_req", "rankme", "rankme_eigen", "uniformity", "hubness", "two_nn"):
        assert MEASURES[key].title in text and MEASURES[key].source in text
        assert MEASURES[key].title.split()[0] in result.stdout
    assert "skdim.id.TwoNN" in text and "whitened" in text and "whitened" in result.stdout


def test_names_on_the_page_are_text():
    found = measure_points(cloud(), name="<b>x</b>")
    text = report_page([found], [], "<i>")
    assert "<b>x" not in text and "<i>" not in text and "&lt;b&gt;x" in text


def test_the_page_says_the_level_of_its_intervals():
    one, other = (measure_points(cloud(), name=name) for name in "ab")
    page = lambda **how: report_page([one, other], [("a", "b", compare(one, other, **how))])
    assert "Intervals of 95 %" in page() and "Intervals of 99.9 %" in page(level=0.999)


def test_texts_are_announced_and_pairs_drawn_alike(tmp_path):
    lines = toy_corpus(200, seed=6)
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("\n".join(lines))
    given = ["score", "--model", "toy-bert", "--texts", tmp_path / "a.txt", "--pooling", "mean", "--max-lines", 50]
    result = invoke(*given, "--pairs", tmp_path / "b.txt")
    assert result.exit_code == 0, result.stderr
    assert "50 of 200 texts, drawn with seed 0" in result.stdout
    rows = json.loads(invoke(*given, "--pairs", tmp_path / "b.txt", "--json").stdout)
    assert rows[-1]["measures"]["alignment"] == pytest.approx(0, abs=1e-9)  # each text beside itself
    drawn, _ = draw_texts(tmp_path / "a.txt", 50, 0)
    right = isoscore(embed("toy-bert", drawn, "mean"), correction="ustat")
    assert rows[-1]["corrected"] == pytest.approx(float(right), rel=1e-5) and rows[-1]["texts"] == 200
    page = tmp_path / "page.html"
    result = invoke(*given, "--model", toy_model_path(), "--normalize", "--html", page)
    assert result.exit_code == 0 and "50 of 200 texts" in page.read_text() and "length one" in page.read_text()
    assert "+0.0000 [+0.0000, +0.0000], paired by row" in result.stdout  # the same model by two names


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "file: none given"),
        (["--texts", __file__], "texts: need a model"),
        (["x.npy", "--pooling", "mean"], "pooling: belongs to a model"),
        (["x.npy", "--layer", "2"], "layer: belongs to a model"),
        (["x.npy", "--max-lines", "500"], "max-lines: belongs to texts"),
        (["x.npy", "--column", "text"], "column: belongs to texts"),
        (["x.npy", "--pair-column", "b"], "pair-column: belongs to texts"),
        (["--model", "toy-bert"], "texts: 0 files given"),
        ([__file__, "--model", "toy-bert", "--texts", __file__], "texts: 2 files given"),
        ([__file__, "--model", "toy-bert", "--pooling", "avg"], "pooling: 'avg' is unknown"),
        ([__file__, "--model", "toy-bert", "--pooling", "mean", "--pairs", "few.txt"], "pairs: 2 texts beside"),
    ],
)
def test_what_the_command_refuses(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", cloud())
    (tmp_path / "few.txt").write_text("a\nb\n")
    result = invoke("score", *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_pairs_in_two_columns_stay_beside_each_other(tmp_path):
    turned = lambda text: " ".join(reversed(text.split()))
    lines = [f"{text} {i}" for i, text in enumerate(toy_corpus(100, seed=6))]
    rows = [{"one": t if i % 7 else "", "two": turned(t) if i % 5 else None} for i, t in enumerate(lines)]
    for file in ("p.csv", "p.jsonl", "p.parquet"):
        table, path = pd.DataFrame(rows), tmp_path / file
        {".csv": table.to_csv, ".parquet": table.to_parquet}.get(
            path.suffix, lambda p: p.write_text("\n".join(json.dumps(row) for row in rows))
        )(path)
        one, two, total = draw_pairs(path, path, 20, 3, ("one", "two"))
        whole = [row["one"] for row in rows if row["one"] and row["two"]]
        assert list(map(turned, one)) == two and len(set(one)) == 20 and total == len(whole)
        assert set(one) <= set(whole) and one != whole[:20]
    (tmp_path / "short.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="pairs: 2 texts beside 100"):
        draw_pairs(tmp_path / "p.csv", tmp_path / "short.txt", columns=("one", "text"))
    given = ["score", "--model", "toy-bert", "--texts", tmp_path / "p.csv", "--column", "one", "--pooling", "mean"]
    found = json.loads(invoke(*given, "--pairs", tmp_path / "p.csv", "--pair-column", "one", "--json").stdout)
    assert found[-1]["measures"]["alignment"] == pytest.approx(0, abs=1e-9)
    found = json.loads(invoke(*given, "--pairs", tmp_path / "p.csv", "--pair-column", "two", "--json").stdout)
    assert found[-1]["measures"]["alignment"] > 1e-3 and found[-1]["texts"] == total


def test_texts_of_a_data_set_by_its_name(monkeypatch):
    asked = []
    stored = datasets.Dataset.from_dict({"sentence": ["a", "", "b", "c"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or stored)
    assert draw_texts("some/set:part:test", column="sentence") == (["a", "b", "c"], 3)
    assert asked == [(("some/set", "part"), {"split": "test"})]


def test_a_basis_has_a_plain_score_and_no_corrected_one(tmp_path):
    x = np.eye(8)
    with pytest.warns(UserWarning, match="no corrected score: points: as even as so few rows can be"):
        found = embeddings.score_points(x)
    assert found["isoscore"] == pytest.approx(float(isoscore(x))) and "corrected" not in found
    assert found["dimensions_in_use"] == pytest.approx(7) and len(found["spectrum"]["share"]) == 8
    np.save(tmp_path / "basis.npy", x)
    done = CliRunner().invoke(app, ["score", str(tmp_path / "basis.npy")])
    assert done.exit_code == 0 and "no corrected score" in done.output and "0.8571" in done.output
    np.save(tmp_path / "other.npy", np.random.default_rng(0).normal(size=(20, 8)))
    done = CliRunner().invoke(app, ["score", str(tmp_path / "basis.npy"), str(tmp_path / "other.npy")])
    assert done.exit_code == 0 and "0.8571" in done.output and " minus " not in done.output


@pytest.mark.parametrize("shape, scale", [((40, 6), 1), ((6, 40), 1), ((40, 6), 1e200), ((6, 40), 1e-200)])
def test_the_spectrum_is_that_of_singular_values_at_any_scale(shape, scale):
    x = np.random.default_rng(0).normal(size=shape) + 3
    share = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    found = embeddings.spectrum(x * scale)
    np.testing.assert_allclose(found["share"], (share / share.sum())[:10], atol=1e-12)
    assert found["axes_for"]["90%"] == 1 + (np.cumsum(share / share.sum()) < 0.9).sum()


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: embeddings.spectrum(np.full((4, 3), np.nan)), "points"),
        (lambda: embeddings.spectrum(np.ones(4)), "points"),
        (lambda: embeddings.draw_texts(__file__, limit=0), "limit"),
        (lambda: embeddings.describe(np.eye(5), limit=-5), "limit"),
        (lambda: embeddings.describe(np.eye(5), seed=-1), "seed"),
        (lambda: embeddings.embed_layers("toy-bert", ["a dog."], limit=-5), "limit"),
        (lambda: embeddings.embed_layers("toy-bert", ["a dog."], layers=[]), "layers"),
        (lambda: embeddings.embed_layers("toy-bert", ["a dog."], layers=[1.0]), "layers"),
        (lambda: embeddings.embed_layers("toy-bert", ["a dog."], max_length=0), "max_length"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()


def test_a_name_in_capitals_and_other_separators(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(5))
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    assert read_points(tmp_path / "X.NPY").shape == (5, 5)
    for text in ("1;2\n3;4\n", "x\ty\n3\t4\n", "x|y\n3|4e-1\n"):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(ValueError, match="array: a single column of words, .*; columns end with a comma in .csv"):
            read_points(tmp_path / "x.csv")


def test_partners_of_another_width_are_refused():
    with pytest.raises(ValueError, match="pairs: vectors of 4 values beside 6; give those of one model"):
        embeddings.describe(np.random.default_rng(0).normal(size=(9, 6)), np.ones((9, 4)))


def test_a_column_of_words_is_no_table_of_another_separator(tmp_path):
    (tmp_path / "x.csv").write_text("text\nI paid 5;then left\n")
    with pytest.raises(ValueError, match="score text with --model"):
        read_points(tmp_path / "x.csv")


def test_layers_may_be_an_array(texts):
    numbers, points = embeddings.embed_layers("toy-bert", texts, layers=np.array([0, -1]))
    again = embeddings.embed_layers("toy-bert", texts, layers=torch.tensor([0, -1]))
    assert numbers == again[0] == [0, 4] and torch.equal(points, again[1])
    with pytest.raises(ValueError, match=r"layers: 1 is no list; give \[1\]"):
        embeddings.embed_layers("toy-bert", texts, layers=1)
