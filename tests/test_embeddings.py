"""Embeddings: files, models and texts against plain loops, comparisons against the jackknife by hand."""

import json
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2Model, PreTrainedTokenizerFast
from typer.testing import CliRunner

from isoreg import embeddings
from isoreg.cli import app
from isoreg.embeddings import (
    compare,
    dimensions_in_use,
    draw_texts,
    embed,
    measure_model,
    measure_points,
    read_points,
    score_points,
)
from isoreg.geometry import outlier_dimensions, stand_out
from isoreg.isoscore import isoscore, isoscore_with_error
from isoreg.tokens import draw_groups, isoscore_by_sequence
from isoreg.experiments.toy import toy_corpus, toy_model_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def cloud(n=120, d=10, seed=0):
    g = np.random.default_rng(seed)
    return g.normal(size=(n, d)) * np.linspace(0.2, 2, d) + 0.3


@pytest.fixture(scope="module")
def texts():
    return toy_corpus(60, seed=5)


# ---- files


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_kind_of_file_gives_the_same_vectors(tmp_path, dtype):
    x = cloud().astype(dtype)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    np.savez(tmp_path / "x.npz", x=x)
    save_file({"x": torch.tensor(x)}, tmp_path / "x.safetensors")
    pd.DataFrame({"v": list(x), "id": range(120), "word": "a"}).to_parquet(tmp_path / "lists.parquet")
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 10)
    pa.parquet.write_table(pa.table({"v": fixed}), tmp_path / "fixed.parquet")
    for name in ("X.NPY", "x.npz", "x.safetensors", "lists.parquet", "fixed.parquet"):
        assert torch.equal(read_points(tmp_path / name), torch.tensor(x)), name
    wide = pd.DataFrame(x, columns=[f"c{i}" for i in range(10)]).assign(id=range(120), raw=b"12", day=pd.Timestamp(0))
    wide.to_parquet(tmp_path / "wide.parquet")
    with pytest.warns(UserWarning, match="10 columns are read as dimensions, c0 to c9; 3 others are left out"):
        assert np.array_equal(read_points(tmp_path / "wide.parquet"), x)


@pytest.mark.parametrize("name", ["x.csv", "x.pt", "x.arrow", "x.feather", "x.html", "x", "x.txt"])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, name):
    (tmp_path / name).write_text("1,2\n3,4\n")
    done = invoke("score", tmp_path / name)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "file: " in done.stderr and "give .npy, .npz, .parquet or .safetensors" in done.stderr


def test_several_arrays_and_none_are_told_by_name(tmp_path):
    x = torch.tensor(cloud())
    save_file({"a": x, "b": 2 * x}, tmp_path / "two.safetensors")
    pd.DataFrame({"a": list(x.numpy()), "b": list(2 * x.numpy())}).to_parquet(tmp_path / "two.parquet")
    for kind in ("safetensors", "parquet"):
        for name in (None, "c"):
            given = repr(name) if name else "none given"
            with pytest.raises(ValueError, match=f"array: {given}, and two.{kind} holds a, b; choose one"):
                read_points(tmp_path / f"two.{kind}", name)
        assert torch.equal(read_points(tmp_path / f"two.{kind}", "b"), 2 * x)


def test_texts_that_are_cut_are_told(tmp_path):
    "And may be read whole: the vectors of a cut text are those of its first tokens."
    texts = [f"every dog {'sleeps ' * k}." for k in range(8)]
    with pytest.warns(UserWarning, match="max_length: 5 of 8 texts fill 8 tokens; what is longer is cut"):
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


def test_the_interval_is_students_about_the_corrected_score():
    x = cloud(30, 5)
    found, best = score_points(x), isoscore_with_error(x)
    half = stats.t.ppf(0.975, 29) * best.stderr
    assert found["interval"] == pytest.approx([best.score - half, best.score + half])
    assert found["dimensions_in_use"] == dimensions_in_use(best.score, 5)


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


def test_refusals_of_a_model(texts):
    with pytest.raises(ValueError, match="pooling: 'average' is unknown"):
        embed("toy-bert", texts, "average")
    with pytest.raises(ValueError, match="layers: not all among the hidden states 0 to 4"):
        embed("toy-bert", texts, "mean", 7)
    with pytest.raises(ValueError, match="layer: 9 is out of range"):
        measure_model("toy-bert", texts, pooling="tokens", layer=9)
    with pytest.raises(ValueError, match="texts: 5 given, but a score by sequence needs at least 6"):
        measure_model("toy-bert", texts[:5])


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
    for pooling in ("mean", "tokens"):
        with pytest.raises(ValueError, match=r"texts: number 1 \(from 0\) has no token"):
            embed(model, texts, pooling)
    some = texts[:1] + texts[2:]
    assert embed(model, some, "tokens").shape == (14, 16) and embed(model, some, "mean").shape[0] == 7


def test_layers_of_a_model_are_scored_each(texts):
    found = measure_model("toy-bert", texts, pooling="mean", layer=1)
    assert [r["layer"] for r in found.rows] == list(range(5)) and found.shown == 1
    for row in found.rows:
        x = embed("toy-bert", texts, "mean", row["layer"])
        assert row["corrected"] == pytest.approx(float(isoscore(x, correction="ustat")), rel=1e-5)
        assert row["dimensions_in_use"] == dimensions_in_use(row["corrected"], 96)
    first = measure_model("toy-bert", texts, pooling="cls")  # before the first layer it is the same in all texts
    assert first.rows[0] == {"layer": 0} and "corrected" in first.rows[-1]


def test_outlier_dimensions_of_tokens_are_those_of_all_their_vectors(texts, monkeypatch):
    monkeypatch.setattr(embeddings, "stand_out", lambda m: stand_out(m, sigmas=1, ratio=2))
    row = measure_model("toy-bert", texts).rows[2]
    whole = outlier_dimensions(embed("toy-bert", texts, "tokens", 2), sigmas=1, ratio=2)
    assert row["outliers"] == {"by_mean": whole.by_mean, "by_variance": whole.by_variance} and whole.by_variance


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
    for ask in (embed, measure_model):
        with pytest.raises(ValueError, match="layer: a SentenceTransformers model has one output"):
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
    with pytest.raises(ValueError, match=r"needs sentence-transformers; pip install 'isoreg\[integrations\]'"):
        embed(str(tmp_path), texts)


# ---- comparisons


def test_a_difference_is_the_jackknife_by_hand():
    x, y = cloud(40, 5), cloud(40, 5) * 0.9 + 0.2 * cloud(40, 5, 1)
    one, other = measure_points(x), measure_points(y)
    found, group = compare(one, other), draw_groups(40, 20).numpy()
    without = lambda a: np.array([float(isoscore(a[group != g], correction="ustat")) for g in range(20)])
    d = without(x) - without(y)
    stderr = np.sqrt(19 / 20 * ((d - d.mean()) ** 2).sum())
    assert found.stderr == pytest.approx(stderr) and found.paired
    assert found.difference == pytest.approx(isoscore(x, correction="ustat") - isoscore(y, correction="ustat"))
    assert found.high - found.difference == pytest.approx(stats.t.ppf(0.975, 19) * stderr)
    wide = compare(one, other, level=0.99)
    assert wide.high - wide.difference == pytest.approx(stats.t.ppf(0.995, 19) * stderr)
    same = compare(one, one)
    assert same.difference == same.stderr == 0
    apart = compare(one, measure_points(y[:-1]))
    errors = [isoscore_with_error(a).stderr for a in (x, y[:-1])]
    assert not apart.paired and apart.stderr == pytest.approx(np.hypot(*errors)) and apart.stderr > found.stderr


def test_a_cloud_without_a_corrected_score_is_not_compared():
    with pytest.warns(UserWarning, match="no corrected score: points: 4 rows"):
        few = measure_points(cloud(4, 3), "few")
    with pytest.raises(ValueError, match="few: has no corrected score to compare"):
        compare(measure_points(cloud(4 * 5, 3)), few)


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
    right, by = compare(measure_points(y), measure_points(x))._asdict(), found["differences"]
    assert {k: by[0][k] for k in right} == pytest.approx(right) and [d["paired"] for d in by] == [True, False]
    shown = invoke("score", *files).stdout
    assert "paired by row" in shown and "not paired: different numbers of rows" in shown
    unit = json.loads(invoke("score", files[0], "--normalize", "--json").stdout)
    assert unit["isoscore"] == pytest.approx(float(isoscore(x / np.linalg.norm(x, axis=1, keepdims=True))))


@pytest.mark.parametrize("kind, first", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_picture_is_of_the_kind_that_its_name_says(tmp_path, kind, first):
    np.save(tmp_path / "x.npy", cloud())
    done = invoke("score", tmp_path / "x.npy", "--picture", tmp_path / f"out/x.{kind}")
    assert done.exit_code == 0 and (tmp_path / f"out/x.{kind}").read_bytes().startswith(first)
    done = invoke("score", tmp_path / "x.npy", "--picture", tmp_path / "x.npy")
    assert done.exit_code == 2 and "picture: '.npy' is unknown" in done.stderr


def test_the_picture_shows_the_scores_and_the_spectra(texts):
    measured = [measure_model("toy-bert", texts, pooling="mean"), measure_points(cloud(), "mine")]
    left, right = embeddings.draw_scores(measured).axes
    for m, line in zip(measured, left.lines):
        assert line.get_ydata() == pytest.approx(100 * np.array(m.rows[m.shown]["spectrum"]["share"]))
    heights = [list(container[0].get_ydata()) for container in right.containers]
    assert heights == [[r["corrected"] for r in m.rows] for m in measured]
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["toy-bert", "mine"]


def test_texts_that_were_drawn_are_announced(tmp_path):
    lines = toy_corpus(200, seed=6)
    (tmp_path / "a.txt").write_text("\n".join(lines))
    given = ["score", "--model", "toy-bert", "--texts", tmp_path / "a.txt", "--pooling", "mean", "--max-lines", 50]
    assert "50 of 200 texts, drawn with seed 0" in invoke(*given).stdout
    rows = json.loads(invoke(*given, "--json").stdout)
    drawn, _ = draw_texts(tmp_path / "a.txt", 50, 0)
    assert drawn == [line for line in lines if line in drawn]  # in the order of the file
    right = isoscore(embed("toy-bert", drawn, "mean"), correction="ustat")
    assert rows[-1]["corrected"] == pytest.approx(float(right), rel=1e-5) and rows[-1]["texts"] == 200
    result = invoke(*given, "--model", toy_model_path())
    assert "+0.0000 [+0.0000, +0.0000], paired by row" in result.stdout  # the same model by two names


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "file: 0 given"),
        (["--texts", "few.txt"], "texts: belongs to a model"),
        (["x.npy", "--pooling", "mean"], "pooling: belongs to a model"),
        (["x.npy", "--layer", "2"], "layer: belongs to a model"),
        (["x.npy", "--max-lines", "500"], "max-lines: belongs to a model"),
        (["few.txt", "--model", "toy-bert", "--array", "a"], "array: belongs to vectors"),
        (["--model", "toy-bert"], "file: 0 given"),
        (["few.txt", "--model", "toy-bert", "--texts", "few.txt"], "file: 2 given"),
        (["few.txt", "--model", "toy-bert", "--pooling", "avg"], "pooling: 'avg' is unknown"),
    ],
)
def test_what_the_command_refuses(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", cloud())
    (tmp_path / "few.txt").write_text("a\nb\n")
    result = invoke("score", *arguments)
    assert result.exit_code == 2 and words in result.stderr


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


@pytest.mark.parametrize("shape, scale", [((40, 6), 1), ((6, 40), 1), ((40, 6), 1e30), ((6, 40), 1e-30)])
def test_the_spectrum_is_that_of_singular_values_at_any_scale(shape, scale):
    x = np.random.default_rng(0).normal(size=shape) + 3
    share = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    found = score_points(x * scale)["spectrum"]
    np.testing.assert_allclose(found["share"], (share / share.sum())[:10], atol=1e-12)
    assert found["axes_for"]["90%"] == 1 + (np.cumsum(share / share.sum()) < 0.9).sum()
