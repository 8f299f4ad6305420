"""Vectors in files and of models against plain loops, comparisons against the jackknife by hand, and `isoreg score`."""

import hashlib
import json
import subprocess
import sys
import warnings
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
import transformers as hf
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2Model, PreTrainedTokenizerFast, T5Config
from transformers import BertModel, T5EncoderModel, T5Model
from command import invoke as isoreg

from isoreg import embeddings
from isoreg.embeddings import compare, draw_texts, embed, measure_model, measure_points
from isoreg.experiments.toy import toy_corpus, toy_model_path, toy_tokenizer
from isoreg.geometry import average_cosine, outlier_dimensions, two_nn
from isoreg.isoscore import isoscore, isoscore_with_error
from isoreg.tokens import draw_groups, isoscore_by_sequence
from isoreg.vectors import read_points


def invoke(*arguments):
    return isoreg("score", *arguments)


def scores(*arguments):
    "The rows of each that was measured, by name."
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["scores"]


def cloud(n=120, d=10, seed=0):
    g = np.random.default_rng(seed)
    return g.normal(size=(n, d)) * np.linspace(0.2, 2, d) + 0.3


def read(*sources, **options):
    return torch.cat([*read_points(*sources, **options).pieces()])


@pytest.fixture(scope="module")
def texts():
    return sorted(set(toy_corpus(80, seed=5)))[:60]


# ---- files


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_kind_of_file_gives_the_same_vectors(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("isoreg.vectors._height", lambda d: 50)  # three pieces
    x = cloud().astype(dtype)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    np.save(tmp_path / "columns.npy", np.asfortranarray(x))
    np.savez(tmp_path / "x.npz", x=x)
    np.savez_compressed(tmp_path / "small.npz", other=x[:, 0], x=x, word=np.array(["a"]))
    save_file({"x": torch.tensor(x)}, tmp_path / "x.safetensors")
    pd.DataFrame({"v": list(x), "id": range(120), "tags": [["a"]] * 120}).to_parquet(tmp_path / "lists.parquet")
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 10)
    pq.write_table(pa.table({"v": fixed}), tmp_path / "fixed.parquet", row_group_size=70)
    for name in ("X.NPY", "columns.npy", "x.npz", "x.safetensors", "lists.parquet", "fixed.parquet"):
        assert torch.equal(read(tmp_path / name), torch.tensor(x)), name
    assert torch.equal(read(tmp_path / "small.npz", array="x"), torch.tensor(x))
    assert torch.equal(read(tmp_path / "X.NPY", array="x"), torch.tensor(x))  # it has one, without a name


def test_any_byte_order_and_width_is_read(tmp_path):
    x = np.random.default_rng(0).integers(-100, 100, size=(40, 6))
    for kind in (">f8", ">f4", "<f2", ">i4", "i8", "u1", np.longdouble):
        values = (np.abs(x) if np.dtype(kind).kind == "u" else x).astype(kind)
        np.save(tmp_path / "x.npy", values)
        np.savez(tmp_path / "x.npz", x=values)
        for name in ("x.npy", "x.npz"):
            assert np.array_equal(read(tmp_path / name).double(), values.astype(float)), kind
    save_file({"x": torch.tensor(x)}, tmp_path / "x.safetensors")
    assert np.array_equal(read(tmp_path / "x.safetensors"), x)


def test_shards_folders_and_patterns_are_one_cloud_and_each_compares_them(tmp_path):
    x = cloud(100, 6)
    (tmp_path / "in/below").mkdir(parents=True)
    np.save(tmp_path / "in/a.npy", x[:30])
    save_file({"x": torch.tensor(x[30:])}, tmp_path / "in/below/b.safetensors")
    (tmp_path / "in/notes.txt").write_text("no vectors")
    np.save(tmp_path / "x.npy", x)
    one = scores(tmp_path / "x.npy")[str(tmp_path / "x.npy")]
    for sources in (["in"], ["in/a.npy", "in/below/b.safetensors"], ["in/*.npy", "in/*/*.safetensors"]):
        result = invoke(*(tmp_path / s for s in sources), "--json")
        ((row,),) = json.loads(result.stdout)["scores"].values()
        assert row["points"] == 100 and row["corrected"] == pytest.approx(one[0]["corrected"], rel=1e-12)
        assert "2 files, joined as one" in result.stdout
    apart = scores(tmp_path / "in/a.npy", tmp_path / "x.npy", "--each")
    assert [rows[0]["points"] for rows in apart.values()] == [30, 100]
    assert [rows[0]["points"] for rows in scores(tmp_path / "in", "--each").values()] == [30, 70]
    np.save(tmp_path / "wide.npy", cloud(30, 7))
    refused = invoke(tmp_path / "x.npy", tmp_path / "wide.npy")
    assert refused.exit_code == 2 and "x.npy has 6 dimensions, wide.npy 7; join files of one" in refused.stderr


BAD = {
    "x.csv": (b"1,2", "give .npy, .npz, .parquet or .safetensors"),
    "x.npz": (b"PK", "file: x.npz"),
    "x.safetensors": (b"xx", "file: x.safetensors"),
    "x.parquet": (b"PAR1", "file: x.parquet"),
    "x.npy": (b"", "file: x.npy"),
    "none.npy": (None, "none.npy"),
    "folder": (None, "no file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_line(tmp_path, name):
    content, words = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = invoke(tmp_path / name)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and words in done.stderr


def test_a_file_that_is_cut_and_lists_of_several_lengths_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", cloud())
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-100])
    pd.DataFrame({"v": [[1.0, 2.0], [3.0, 4.0, 5.0]]}).to_parquet(tmp_path / "x.parquet")
    # as many numbers as rows of equal length would have
    pd.DataFrame({"v": [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]}).to_parquet(tmp_path / "sum.parquet")
    pd.DataFrame({"v": [[1.0, 2.0], None]}).to_parquet(tmp_path / "gap.parquet")
    pq.write_table(pa.table({"v": pa.array([], pa.list_(pa.float32()))}), tmp_path / "none.parquet")
    pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}).to_parquet(tmp_path / "wide.parquet")
    np.save(tmp_path / "row.npy", cloud()[0])
    words = {
        "x.npy": "x.npy: ",
        "none.parquet": "none.parquet: it holds no rows",
        "x.parquet": "x.parquet: ",
        "wide.parquet": "no vectors",
        "row.npy": "(10,)",
    }
    words |= dict.fromkeys(("sum.parquet", "gap.parquet"), "lists of 'v' differ in length, or some are missing")
    for name, said in words.items():
        done = invoke(tmp_path / name)
        assert done.exit_code == 2 and said in done.stderr, name


def test_several_arrays_and_none_are_listed_by_name(tmp_path):
    x = torch.tensor(cloud())
    save_file({"a": x, "b": 2 * x}, tmp_path / "two.safetensors")
    pd.DataFrame({"a": list(x.numpy()), "b": list(2 * x.numpy())}).to_parquet(tmp_path / "two.parquet")
    for kind in ("safetensors", "parquet"):
        for name in (None, "c"):
            given = repr(name) if name else "none given"
            with pytest.raises(ValueError, match=f"array: {given}, and two.{kind} holds a, b; choose one"):
                read_points(tmp_path / f"two.{kind}", array=name)
        assert torch.equal(read(tmp_path / f"two.{kind}", array="b"), 2 * x)


def test_a_row_with_nan_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("isoreg.vectors._height", lambda d: 50)
    x = cloud()
    x[77, 3] = np.nan
    np.save(tmp_path / "a.npy", cloud())
    np.save(tmp_path / "holes.npy", x)
    done = invoke(tmp_path / "a.npy", tmp_path / "holes.npy")
    assert done.exit_code == 2 and "holes.npy: row 77 (from 0) holds NaN" in done.stderr
    with pytest.raises(ValueError, match=r"points: row 77 \(from 0\)"):
        measure_points(x)


PEAK = """
import os, resource, sys
from isoreg.embeddings import measure_points
from isoreg.vectors import read_points
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for small, large in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:  # a peak never falls: one process for each kind
        measure_points(read_points(small))
        before = peak()
        print(measure_points(read_points(large)).row["points"], peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_large_file_needs_a_fraction_of_its_size_in_memory(tmp_path):
    "300 MB of each kind, most of them zeros that take no room on the disk."
    n, d = 300_000, 256
    x = np.random.default_rng(0).normal(size=(20_000, d)).astype(np.float32)

    def write(kind, name, rows):
        path = tmp_path / f"{name}.{kind}"
        raw = path.with_suffix(".npy")
        if kind in ("npy", "npz"):
            np.lib.format.open_memmap(raw, "w+", np.float32, (rows, d))[: len(x)] = x[:rows]
        if kind == "npz":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                archive.write(raw, "x.npy")
        if kind == "safetensors":
            about = {"x": {"dtype": "F32", "shape": [rows, d], "data_offsets": [0, rows * d * 4]}}
            text = json.dumps(about).encode()
            with path.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text + x[:rows].tobytes())
                file.truncate(8 + len(text) + rows * d * 4)
        if kind == "parquet":
            with pq.ParquetWriter(path, pa.schema({"v": pa.list_(pa.float32(), d)})) as file:
                for first in range(0, rows, len(x)):
                    part = x if first == 0 else np.zeros_like(x)
                    values = pa.array(part[: rows - first].ravel())
                    file.write(pa.table({"v": pa.FixedSizeListArray.from_arrays(values, d)}))
        return path

    kinds = ["npy", "npz", "safetensors", "parquet"]
    files = [write(kind, *size) for kind in kinds for size in (("small", 10_000), ("large", n))]
    command = [sys.executable, "-W", "ignore", "-c", PEAK, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(zip(kinds, (tuple(map(int, line.split())) for line in done.stdout.splitlines()), strict=True))
    assert all(points == n and grown < 300 / 2 for points, grown in found.values()), found


def test_a_file_is_scored_without_the_libraries_of_models(tmp_path):
    np.save(tmp_path / "x.npy", cloud())
    heavy = "transformers datasets pandas matplotlib scipy.stats torchmetrics peft".split()
    script = f"import sys; sys.argv[1:] = ['score', {str(tmp_path / 'x.npy')!r}]\nfrom isoreg.cli import app\n"
    script += f"try: app()\nfinally: print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


# ---- scores of vectors


@pytest.mark.parametrize("shape", [(300, 20), (30, 60)])
@pytest.mark.parametrize("dtype, shift, scale", [("f4", 3, 1), ("f4", 0, 1e-12), ("f8", 1e4, 1), ("f8", 0, 1e30)])
def test_the_score_in_pieces_is_that_of_the_whole(monkeypatch, shape, dtype, shift, scale):
    monkeypatch.setattr("isoreg.vectors._height", lambda d: 17)
    x = ((cloud(*shape) + shift) * scale).astype(dtype)
    seen, best = [], isoscore_with_error(x.astype(float))
    m = measure_points(x, progress=seen.append)
    want = (best.score, best.stderr, float(isoscore(x.astype(float))))
    assert (m.row["corrected"], m.row["standard_error"], m.row["plain"]) == pytest.approx(want, rel=2e-4)
    half = stats.t.ppf(0.975, len(x) - 1) * m.row["standard_error"]
    assert m.row["interval"] == pytest.approx([m.row["corrected"] - half, m.row["corrected"] + half], rel=1e-9)
    assert m.row["dimensions_in_use"] == pytest.approx(1 + (shape[1] - 1) * m.row["corrected"])
    assert sum(seen) == 2 * len(x)
    assert m.without.shape == (len(x),) and m.row["repeated"] == 0
    left = isoscore(np.delete(x.astype(float), 7, 0), correction="ustat")
    assert m.without[7] == pytest.approx(float(left), rel=1e-4)


def test_repeated_rows_are_counted(tmp_path):
    x = cloud(600, 40).astype(np.float32)
    near = (x[:120] * (1 + 1e-6 * np.random.default_rng(1).normal(size=(120, 40)))).astype(np.float32)
    assert not np.array_equal(near, x[:120])
    for again, least in ((x[:120], 120), (near, 117)):
        np.save(tmp_path / "x.npy", np.concatenate([x, again]))
        done = invoke(tmp_path / "x.npy", "--json")
        ((row,),) = json.loads(done.stdout)["scores"].values()
        assert least <= row["repeated"] <= 120 and f"{row['repeated']} of 720 rows repeat another one" in done.stderr
    with pytest.warns(UserWarning, match="points: 240 of 720 rows have a near copy"):
        two_nn(np.concatenate([x, near]))
    assert measure_points(x).row["repeated"] == 0
    plane = torch.randn(50_000, 2, generator=torch.Generator().manual_seed(0))
    assert measure_points(plane).row["repeated"] == 0
    texts = toy_corpus(12, seed=5)
    with pytest.warns(UserWarning, match=f"toy-bert: {24 - len(set(texts))} of 24 texts repeat another one"):
        measure_model("toy-bert", texts * 2, "tokens")
    mostly = np.concatenate([np.zeros((900, 40)), x, -x])  # more than half lie at the mean
    assert measure_points(mostly).row["repeated"] == 899
    same = x.copy()
    same[:, 1:] *= 1e-2  # few axes hold nearly all of the variance: not repeated for that
    assert measure_points(same).row["repeated"] == 0


def test_other_measures_come_by_name(tmp_path):
    x = cloud()
    np.save(tmp_path / "x.npy", x)
    ((row,),) = scores(tmp_path / "x.npy", "--measure", "average_cosine", "--measure", "isoscore").values()
    assert row["average_cosine"] == pytest.approx(average_cosine(x)) and row["isoscore"] == pytest.approx(isoscore(x))
    shown = invoke(tmp_path / "x.npy", "--measure", "average_cosine").stdout
    assert f"{average_cosine(x):.3f}" in shown and f"{average_cosine(x):.3f}" not in invoke(tmp_path / "x.npy").stdout
    assert "measure: 'cosine' is unknown" in invoke(tmp_path / "x.npy", "--measure", "cosine").stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_spectrum_of_half_precision_is_that_of_its_values(tmp_path, dtype):
    "Far from the origin, where a mean in half precision is off, and with differences beyond the largest float16."
    x = torch.randn(500, 200, generator=torch.Generator().manual_seed(0)) + 200
    far = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.1, -6e4, 6e4)
    for points in (x.to(dtype), far.to(dtype)):
        save_file({"x": points}, tmp_path / "x.safetensors")
        ((row,),) = scores(tmp_path / "x.safetensors").values()
        want = measure_points(points.double()).row["spectrum"]
        assert row["spectrum"]["axes_for"] == want["axes_for"]
        assert row["spectrum"]["share"] == pytest.approx(want["share"], rel=1e-4)


@pytest.mark.parametrize("shape, scale", [((40, 6), 1), ((6, 40), 1), ((40, 6), 1e30), ((6, 40), 1e-30)])
def test_the_spectrum_is_that_of_singular_values_at_any_scale(shape, scale):
    x = np.random.default_rng(0).normal(size=shape) + 3
    share = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    found = measure_points(x * scale).row["spectrum"]
    np.testing.assert_allclose(
        found["share"], np.pad(share / share.sum(), (0, x.shape[1] - len(share)))[:10], atol=1e-12
    )
    assert found["axes_for"]["90%"] == 1 + (np.cumsum(share / share.sum()) < 0.9).sum()


def test_a_basis_has_a_plain_score_and_no_corrected_one(tmp_path):
    x = np.eye(8)
    with pytest.warns(UserWarning, match="points: no corrected score: points: the rows are as even as so few can be"):
        found = measure_points(x).row
    assert found["plain"] == pytest.approx(float(isoscore(x))) and "corrected" not in found
    assert found["dimensions_in_use"] == pytest.approx(7) and len(found["spectrum"]["share"]) == 8
    np.save(tmp_path / "basis.npy", x)
    np.save(tmp_path / "other.npy", np.random.default_rng(0).normal(size=(20, 8)))
    done = invoke(tmp_path / "basis.npy", tmp_path / "other.npy", "--each")
    assert done.exit_code == 0 and "0.8571" in done.stdout
    assert "no corrected score" in done.output and " minus " not in done.output
    np.save(tmp_path / "same.npy", np.ones((8, 6)) * 0.1)
    assert "all rows are equal: zero variance" in invoke(tmp_path / "same.npy").stderr


# ---- a model on texts


def test_lines_are_drawn_evenly(tmp_path):
    (tmp_path / "t.txt").write_text("\n\n".join(map(str, range(10))))
    drawn = [draw_texts(tmp_path / "t.txt", 4, seed) for seed in range(1000)]
    assert drawn[7] == draw_texts(tmp_path / "t.txt", 4, 7) != drawn[8]
    assert all(len(set(d)) == 4 and n == 10 for d, n in drawn)
    times = np.bincount([int(line) for d, _ in drawn for line in d])
    assert len(times) == 10 and abs(times - 400).max() < 5 * (1000 * 0.4 * 0.6) ** 0.5


def test_texts_of_a_table_are_drawn_too(tmp_path):
    rows = [f"text {i}" for i in range(300)]
    pd.DataFrame({"sentence": rows}).to_parquet(tmp_path / "t.parquet")
    drawn, total = draw_texts(tmp_path / "t.parquet", 50, 1, "sentence")
    assert total == 300 and len(set(drawn)) == 50 and set(drawn) < set(rows)
    assert sum(int(t.split()[1]) < 50 for t in drawn) < 25  # not the first ones
    (tmp_path / "t.txt").write_text("= a =\nb @-@ c\n\n")
    assert sorted(draw_texts(tmp_path / "t.txt")[0]) == ["= a =", "b @-@ c"]  # as they are


def test_texts_that_are_cut_are_told(tmp_path):
    "And may be read whole: the vectors of a cut text are those of its first tokens."
    texts = [f"every dog {'sleeps ' * k}." for k in range(8)]
    with pytest.warns(UserWarning, match="max_length: 5 of 8 texts fill 8 tokens; longer texts are cut"):
        cut = embed("toy-bert", texts, max_length=8)
    whole = embed("toy-bert", texts, max_length=32)
    assert [torch.allclose(a, b, atol=1e-5) for a, b in zip(cut, whole)] == [True] * 4 + [False] * 4
    (tmp_path / "t.txt").write_text("\n".join(texts))
    told = invoke("--model", "toy-bert", "--texts", tmp_path / "t.txt", "--max-length", 8)
    assert told.exit_code == 0 and "5 of 8 texts fill 8 tokens" in told.stderr


@pytest.mark.parametrize("kind, first", [("Bert", 0), ("Roberta", 2)])
def test_a_tokenizer_that_names_no_length_has_that_of_the_model(tmp_path, kind, first):
    "RoBERTa counts its positions from behind the padding id."
    tokenizer = AutoTokenizer.from_pretrained(toy_model_path())
    tokenizer.model_max_length = int(1e30)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=1)
    config = getattr(hf, f"{kind}Config")(vocab_size=len(tokenizer), max_position_embeddings=20, **sizes)
    getattr(hf, f"{kind}Model")(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"max_length: 1 of 1 texts fill {20 - first} tokens; longer texts are cut$"):
        assert embed(str(tmp_path), ["every dog " + "sleeps " * 50]).shape == (1, 16)


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
    for wrong in (texts[0], pd.DataFrame({"text": texts}), [], None):
        for call in (embed, measure_model):
            with pytest.raises(ValueError, match="texts: need a list of strings"):
                call("toy-bert", wrong)
    with pytest.raises(ValueError, match="max_length: 0 is out of range"):
        embed("toy-bert", texts, max_length=0)


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


def test_the_tokens_that_are_scored_are_those_of_embed(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(toy_model_path())  # it gives types, which this model would embed as words
    model = gpt2(tmp_path, tokenizer)
    texts = [f"every dog {'sleeps ' * k}." for k in range(30)]
    assert "token_type_ids" in tokenizer(texts[0])
    for row in measure_model(model, texts).rows:
        right = float(isoscore(embed(model, texts, "tokens", row["layer"])))
        assert row["plain"] == pytest.approx(right, rel=1e-4)


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
        assert row["dimensions_in_use"] == pytest.approx(1 + 95 * row["corrected"])
    first = measure_model("toy-bert", texts, pooling="cls")  # before the first layer it is the same in all texts
    assert first.rows[0] == {"layer": 0, "unit": "text"} and "corrected" in first.rows[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # before the first layer, the last token differs only in its position
        assert measure_model("toy-bert", list(dict.fromkeys(texts)), pooling="last").row["repeated"] == 0


def test_outlier_dimensions_of_tokens_are_those_of_all_their_vectors(texts):
    row, whole = measure_model("toy-bert", texts).rows[0], outlier_dimensions(embed("toy-bert", texts, "tokens", 0))
    assert row["outliers"] == {"by_mean": whole.by_mean, "by_variance": whole.by_variance}
    assert whole.by_mean or whole.by_variance


def test_tokens_of_length_one(texts):
    plain, unit = (measure_model("toy-bert", texts, normalize=n) for n in (False, True))
    tokens = embed("toy-bert", texts, "tokens", normalize=True)
    assert unit.rows[-1]["plain"] == pytest.approx(float(isoscore(tokens)), abs=1e-5)
    assert unit.rows[-1]["plain"] != pytest.approx(plain.rows[-1]["plain"], abs=1e-4)


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


@pytest.mark.parametrize("kind, says", [(T5Model, True), (T5EncoderModel, True), (T5EncoderModel, False)])
def test_score_of_an_encoder_decoder_model_is_its_encoders(tmp_path, texts, kind, says):
    "Also of a saved encoder, as of sentence-T5; older ones say that they are encoder and decoder."
    torch.manual_seed(0)
    tokenizer, lines = toy_tokenizer(), texts[:8]
    sizes = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    kind(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = T5EncoderModel.from_pretrained(tmp_path).eval()(**batch, output_hidden_states=True).hidden_states
    right = [float(isoscore(h[batch["attention_mask"].bool()])) for h in states]
    assert [r["plain"] for r in measure_model(str(tmp_path), lines).rows] == pytest.approx(right, abs=1e-6)
    whole = load_file(tmp_path / "model.safetensors")
    part = {k: v.clone() for k, v in whole.items() if ".block.1." not in k}
    save_file(part, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .* weights .*\(encoder\.block\.1\."):
        embed(str(tmp_path), lines, "mean")


@pytest.mark.parametrize("count", [6, 25, 60])
def test_streamed_scores_of_a_model_equal_those_of_all_states(texts, count):
    batch = toy_tokenizer()(texts[:count], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(toy_model_path()).eval()(**batch, output_hidden_states=True).hidden_states
    mask, rows = batch["attention_mask"], measure_model("toy-bert", texts[:count]).rows
    assert [r["layer"] for r in rows] == list(range(len(states)))
    for row, h in zip(rows, states):
        whole, exact = isoscore_by_sequence(h, mask), measure_points(h[mask.bool()]).row["spectrum"]
        assert row["plain"] == pytest.approx(float(isoscore(h.flatten(0, 1), mask.flatten())), abs=1e-6)
        assert (row["corrected"], row["standard_error"]) == pytest.approx((whole.score, whole.stderr), abs=1e-6)
        assert (row["points"], row["sequences"]) == (int(mask.sum()), count)
        assert row["spectrum"]["axes_for"] == exact["axes_for"]
        assert row["spectrum"]["share"] == pytest.approx(exact["share"], abs=1e-6)


@pytest.mark.parametrize("key", [len, str])
def test_score_of_a_sorted_file_is_that_of_a_draw_from_it(tmp_path, key):
    "By length, and by the first words: the first lines are unlike the rest."
    (tmp_path / "t.txt").write_text("\n".join(sorted(toy_corpus(1200, seed=3), key=key)))
    draws = [draw_texts(tmp_path / "t.txt", *draw) for draw in ((1200, 0), (200, 0), (200, 1))]
    assert [(len(texts), total) for texts, total in draws] == [(1200, 1200), (200, 1200), (200, 1200)]
    for a, b, c in zip(*(measure_model("toy-bert", texts).rows for texts, _ in draws)):
        assert abs(b["corrected"] - a["corrected"]) < 3 * b["standard_error"] and b["corrected"] != c["corrected"]
        assert 1 < b["standard_error"] / a["standard_error"] < 5  # a sixth of the texts: about 2.4


def test_states_of_one_batch_are_held_at_most(texts, monkeypatch):
    forward, states, held = BertModel.forward, [], []

    def spy(self, *args, **kwargs):
        held.append(sum(r() is not None for r in states))
        out = forward(self, *args, **kwargs)
        states.extend(weakref.ref(h) for h in out.hidden_states)
        return out

    monkeypatch.setattr(BertModel, "forward", spy)
    layers = len(measure_model("toy-bert", texts).rows)
    assert len(held) == 40 and len(states) == 40 * layers and max(held) <= layers  # 20 groups, seen twice


def test_the_texts_that_were_drawn_are_announced(tmp_path):
    lines = toy_corpus(200, seed=6)
    (tmp_path / "a.txt").write_text("\n".join(lines))
    given = ["--model", "toy-bert", "--texts", tmp_path / "a.txt", "--max-lines", 50]
    shown = invoke(*given).stdout
    assert "50 of 200, drawn with seed 0" in shown and "50 texts" in shown
    (rows,), drawn = scores(*given, "--pooling", "mean").values(), draw_texts(tmp_path / "a.txt", 50, 0)[0]
    assert drawn == [line for line in lines if line in drawn]  # in the order of the file
    right = isoscore(embed("toy-bert", drawn, "mean"), correction="ustat")
    assert rows[-1]["corrected"] == pytest.approx(float(right), rel=1e-5) and rows[-1]["unit"] == "text"
    (tmp_path / "empty.txt").write_text("\n")
    assert invoke("--model", "toy-bert", "--texts", tmp_path / "empty.txt").exit_code == 2


# ---- comparisons


def test_a_paired_difference_is_the_jackknife_by_hand():
    x, y = cloud(40, 5), cloud(40, 5) * 0.9 + 0.2 * cloud(40, 5, 1)
    one, other = measure_points(x), measure_points(y)
    without = lambda a: np.array([float(isoscore(np.delete(a, i, 0), correction="ustat")) for i in range(40)])
    d = without(x) - without(y)
    stderr = np.sqrt(39 / 40 * ((d - d.mean()) ** 2).sum())
    found = compare(one, other, paired=True)
    assert found.stderr == pytest.approx(stderr) and found.paired and found.measure == "IsoScore"
    assert found.difference == pytest.approx(isoscore(x, correction="ustat") - isoscore(y, correction="ustat"))
    assert found.high - found.difference == pytest.approx(stats.t.ppf(0.975, 39) * stderr)
    same = compare(one, one, paired=True)
    assert same.difference == same.stderr == 0
    apart, errors = compare(one, other), [isoscore_with_error(a).stderr for a in (x, y)]
    assert not apart.paired and apart.stderr == pytest.approx(np.hypot(*errors)) and apart.stderr > found.stderr
    assert apart.high - apart.difference == pytest.approx(stats.t.ppf(0.975, 39) * apart.stderr)


def test_of_different_dimensions_those_in_use_are_compared(tmp_path):
    "The smaller score can belong to the cloud that uses more."
    x, y = cloud(200, 6, 0), np.random.default_rng(1).normal(size=(200, 30)) * np.linspace(0, 2, 30) ** 2
    one, other = measure_points(y, "wide"), measure_points(x, "narrow")
    found = compare(one, other)
    assert found.measure == "dimensions in use" and one.row["corrected"] < other.row["corrected"]
    assert found.difference == pytest.approx(one.row["dimensions_in_use"] - other.row["dimensions_in_use"])
    assert found.stderr == pytest.approx(np.hypot(29 * one.row["standard_error"], 5 * other.row["standard_error"]))
    assert compare(one, other, paired=True).stderr > 0 and found.low > 0
    for name, values in {"wide": y, "narrow": x}.items():
        np.save(tmp_path / f"{name}.npy", values)
    shown = invoke(tmp_path / "narrow.npy", tmp_path / "wide.npy", "--each").stdout
    assert "dimensions in use of" in shown and "are not subtracted" in shown and "IsoScore of" not in shown


def test_unlike_things_are_not_compared(texts):
    tokens, vectors = (measure_model("toy-bert", texts, pooling=p) for p in ("tokens", "mean"))
    with pytest.raises(ValueError, match="unit: a point of toy-bert is a token, of toy-bert a text"):
        compare(tokens, vectors)
    with pytest.warns(UserWarning, match="no corrected score: 4 rows"):
        few = measure_points(cloud(4, 3), "few")
    with pytest.raises(ValueError, match="few: has no corrected score to compare"):
        compare(measure_points(cloud(20, 3)), few)
    with pytest.raises(ValueError, match="paired: 20 and 19 rows"):
        compare(measure_points(cloud(20, 3)), measure_points(cloud(19, 3)), paired=True)


def test_models_are_compared_by_the_same_groups_of_texts(texts):
    one, other = (measure_model("toy-bert", texts, layer=k) for k in (4, 1))
    found = compare(one, other, paired=True)
    tokenizer, model = AutoTokenizer.from_pretrained(toy_model_path()), AutoModel.from_pretrained(toy_model_path())
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**batch, output_hidden_states=True).hidden_states
    mask, group = batch["attention_mask"], draw_groups(60, 20)
    left = [
        [isoscore_by_sequence(h[group != g].double(), mask[group != g]).score for g in range(20)]
        for h in (states[4], states[1])
    ]
    d = np.subtract(*left)
    assert found.paired and found.stderr == pytest.approx(np.sqrt(19 / 20 * ((d - d.mean()) ** 2).sum()), rel=1e-3)


# ---- the command


def test_rows_are_paired_only_where_asked(tmp_path):
    x, y = cloud(), cloud() * 1.1 + 0.1 * cloud(seed=1)
    for name, values in {"x": x, "y": y, "few": x[:50]}.items():
        np.save(tmp_path / f"{name}.npy", values)
    pair = [tmp_path / "x.npy", tmp_path / "y.npy", "--each"]
    for more in ([], ["--paired"]):
        (found,) = json.loads(invoke(*pair, *more, "--json").stdout)["differences"]
        right = compare(measure_points(y), measure_points(x), paired=bool(more))._asdict()
        assert found == pytest.approx(right | {"one": str(pair[1]), "minus": str(pair[0])})
    assert "not paired" in invoke(*pair).stdout and "not paired" not in invoke(*pair, "--paired").stdout
    refused = invoke(tmp_path / "x.npy", tmp_path / "few.npy", "--each", "--paired")
    assert refused.exit_code == 2 and "paired: 50 and 120 rows" in refused.stderr
    ((unit,),) = scores(tmp_path / "x.npy", "--normalize").values()
    assert unit["plain"] == pytest.approx(float(isoscore(x / np.linalg.norm(x, axis=1, keepdims=True))))


def test_the_page_holds_the_scores_and_where_they_come_from(tmp_path):
    import isoreg

    names = [tmp_path / "a|b_c.npy", tmp_path / "other/a|b_c.npy"]  # both have a digest
    names[1].parent.mkdir()
    np.save(names[0], cloud())
    np.save(names[1], cloud(90) * 2)
    done = invoke(*names, "--each", "--out", tmp_path / "page")
    assert done.exit_code == 0 and str(tmp_path / "page/score.md") in done.stdout
    assert sorted(p.name for p in (tmp_path / "page").iterdir()) == ["score.md", "score.png"]
    assert (tmp_path / "page/score.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page/score.md").read_text()
    for name, n in zip(names, (120, 90)):
        row = measure_points(read(name)).row
        (line,) = [line for line in page.splitlines() if line.startswith("| ") and f" {n} rows " in line]
        assert f"{row['corrected']:.4f}" in line and "{:.4f} to {:.4f}".format(*row["interval"]) in line
        assert f" {row['dimensions_in_use']:.1f} of 10 " in line
        assert hashlib.sha256(name.read_bytes()).hexdigest() in page
    assert isoreg.__version__ in page and "date: 20" in page and "Read a score" in page
    assert r"a\|b\_c.npy" in page and "IsoScore of" in page and "(score.png)" in page and "participation" in page
    (tmp_path / "t.txt").write_text("\n".join(toy_corpus(40)))
    given = ["--model", "toy-bert", "--texts", tmp_path / "t.txt", "--max-lines", 20, "--seed", 3]
    assert invoke(*given, "--out", tmp_path / "model").exit_code == 0
    page = (tmp_path / "model/score.md").read_text()
    assert "20 of 40, drawn with seed 3" in page
    assert hashlib.sha256((tmp_path / "t.txt").read_bytes()).hexdigest() in page


def test_the_picture_shows_the_scores_and_the_spectra(texts):
    measured = [measure_model("toy-bert", texts, pooling="mean"), measure_points(cloud(), "mine")]
    left, right = embeddings.draw_scores(measured).axes
    for m, line in zip(measured, left.lines):
        assert line.get_ydata() == pytest.approx(100 * np.array(m.row["spectrum"]["share"]))
    heights = [list(container[0].get_ydata()) for container in right.containers]
    assert heights == [[r["corrected"] for r in m.rows] for m in measured]
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["toy-bert", "mine"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "give files of vectors, or --model and --texts"),
        ("x.npy --model toy-bert --texts few.txt", "give files of vectors, or --model and --texts"),
        ("--model toy-bert", "give files of vectors, or --model and --texts"),
        ("--texts few.txt", "give files of vectors, or --model and --texts"),
        ("--texts few.txt --model toy-bert --pooling avg", "pooling: 'avg' is unknown"),
        ("--texts few.txt --model toy-bert --max-lines 0", "--max-lines"),
    ],
)
def test_what_the_command_refuses(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", cloud())
    Path("few.txt").write_text("a\nb\n")
    result = invoke(*arguments.split())
    assert result.exit_code == 2 and words in result.stderr


def test_options_of_the_other_kind_are_refused_and_rows_of_equal_number_get_a_hint(tmp_path):
    x = cloud(60)
    np.savez(tmp_path / "x.npz", x=np.concatenate([x, x[:1]]), ids=np.arange(61))
    np.save(tmp_path / "y.npy", x)
    (tmp_path / "t.txt").write_text("\n".join(toy_corpus(9)))
    np.savez(tmp_path / "states.npz", states=np.zeros((9, 4, 3)), mask=np.ones((9, 4)))
    assert "choose one with --array" in invoke(tmp_path / "states.npz").stderr  # never the mask
    for given in (["--layer", 3], ["--column", "b"], ["--max-length", 7]):
        assert "are for --model" in invoke(tmp_path / "y.npy", *given).stderr
    given = ["--model", "toy-bert", "--texts", tmp_path / "t.txt"]
    assert "are for files" in invoke(*given, "--measure", "rankme").stderr
    done = invoke(tmp_path / "x.npz", "--out", tmp_path / "page")  # its one table
    assert "61 rows" in done.stdout and "1 rows repeat another one" in (tmp_path / "page/score.md").read_text()
    assert f"90 % of the variance: {measure_points(x).row['spectrum']['axes_for']['90%']}" in done.stdout
    np.save(tmp_path / "z.npy", 2 * x)
    compared = invoke(tmp_path / "y.npy", tmp_path / "z.npy", "--each")
    assert "--paired" in compared.stdout and "--paired" not in done.stdout
