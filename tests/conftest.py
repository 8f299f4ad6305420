"""The tests use one thread each, as in CI: of small models, more threads mostly wait for each other.
The files that take longest come first, so that no worker is left with one of them at the end."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, also by the processes that tests start

LONGEST = "results sweep finetune cli pretrain trainer fisher dropout report extending embeddings".split()


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A working folder in which the grids and the stored runs find their files."
    for name in ("data", "base-data"):
        (tmp_path / name).mkdir()
    (tmp_path / "nbs").symlink_to(Path(__file__).parents[1] / "nbs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_collection_modifyitems(items):
    place = lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST)
    items.sort(key=lambda item: place(item.path.stem.removeprefix("test_")))
