"""Files that are whole or absent, and what is read from them."""

import json
import os
import stat

import numpy as np
import pandas as pd
import pytest

from isoreg.corpus import load_texts
from isoreg.files import from_yaml, load_rows, pack, read_table, record_files, unpack, write_atomically


def test_permissions_are_those_of_the_file_or_of_the_umask(tmp_path):
    def mode(name):
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "new", "first")
    assert mode("new") == mode("plain")
    for kept in (0o600, 0o664):
        (tmp_path / "new").chmod(kept)
        write_atomically(tmp_path / "new", "second")
        assert mode("new") == kept and (tmp_path / "new").read_text() == "second"
    (tmp_path / "link").symlink_to("new")
    write_atomically(tmp_path / "link", "third")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new").read_text() == "third"
    for place, error in ((tmp_path, ValueError), (os.devnull, ValueError), (tmp_path / "new" / "x", OSError)):
        with pytest.raises(error):
            write_atomically(place, "x")


def test_records_are_found_while_a_sweep_moves_its_folders(tmp_path, monkeypatch):
    names = ["a/record.json", "group/b/record.json", "group/moved/record.json", ".sweep/c/part-1/record.json"]
    for name in [*names, "a/failed.json"]:
        write_atomically(tmp_path / name, "{}")
    scan, seen = os.scandir, []

    def scandir(place):
        seen.append(os.path.basename(place))
        if seen[-1] in ("part-1", "moved"):
            raise FileNotFoundError(place)
        return scan(place)

    monkeypatch.setattr(os, "scandir", scandir)
    # the failure of a run counts, not the record of earlier files beside it
    assert record_files(tmp_path) == [tmp_path / "a/failed.json", tmp_path / names[1]]
    assert "moved" in seen and "c" not in seen


@pytest.mark.parametrize("kind, largest", [("int16", 2**15 - 1), ("int32", 2**15), ("int32", 2**31 - 1)])
def test_class_numbers_of_32_bits_come_back(kind, largest):
    packed = pack(np.array([0, largest, -1]))
    assert packed["kind"] == kind and unpack(packed).tolist() == [0, largest, -1]


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [ls]", "a: [", "[" * 5000])
def test_yaml_that_is_damaged_or_names_code_is_refused(text):
    with pytest.raises(ValueError, match="is no readable YAML"):
        from_yaml(text)


LONG = "word " * 400_000  # 2 MB


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.csv", 'text,label\n"twas so,0\nhe said "no,1\n', {"text": ['"twas so', 'he said "no'], "label": [0, 1]}),
        ("a.tsv", 'text\tlabel\n"twas so\t0\n5" wide\t1\n', {"text": ['"twas so', '5" wide'], "label": [0, 1]}),
        ("a.csv", 'text,label\n"two\nlines, ""so""",0.5\n007,\n',
         {"text": ['two\nlines, "so"', "007"], "label": [0.5, None]}),
        ("a.csv", 'text,label\n"Hello, world\nbye",x\n', {"text": ["Hello, world\nbye"], "label": ["x"]}),
        ("a.tsv", 'text\tlabel\n"he said\t1\nso ."\t0\n', {"text": ['"he said', 'so ."'], "label": [1, 0]}),
        ("a.csv", 'text\n"two\nlines"\n\nbye\n', {"text": ["two\nlines", "bye"]}),
        ("a.csv", "text,label\nNA,yes\nnull,no\n", {"text": ["NA", "null"], "label": ["yes", "no"]}),
        ("a.csv", f"text,label\n{LONG},1\n", {"text": [LONG], "label": [1]}),
        ("a.jsonl", '{"text": "2024-01-31T10:00:00"}\n{"text": "b", "label": 1}\n',
         {"text": ["2024-01-31T10:00:00", "b"], "label": [None, 1]}),
        ("a.jsonl", json.dumps({"text": LONG}), {"text": [LONG]}),
        ("a.json", '[{"text": "x"}, {"text": "y"}]', {"text": ["x", "y"]}),
    ],
)  # fmt: skip
def test_tables_keep_what_is_written(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_table(tmp_path / name, ["text"]).to_pydict() == expected


def test_texts_in_binary_columns_are_texts(tmp_path):
    pd.DataFrame({"text": [b"one text", "zwei Wörter".encode()], "n": [1, 2]}).to_parquet(tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet").to_pydict() == {"text": ["one text", "zwei Wörter"], "n": [1, 2]}
    assert load_texts(str(tmp_path / "a.parquet")) == ["one text", "zwei Wörter"]
    pd.DataFrame({"text": [b"\xff\xfe"]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError):
        read_table(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", "[1]\n"), ("a.jsonl", "{"), ("a.csv", "a,b\n1,2,3\n"), ("a.csv", "")]
)
def test_damaged_tables_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, TypeError)):
        read_table(tmp_path / name)


def test_no_count_of_uses_is_sent(monkeypatch):
    import datasets

    seen, note = [], lambda *names, **options: seen.append(datasets.config.HF_UPDATE_DOWNLOAD_COUNTS)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets, "load_dataset", note)
    load_rows("somebody/something")
    assert seen == [False]
