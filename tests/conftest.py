"""The tests use one thread each, as in CI: of small models, more threads mostly wait for each other.
The files that take longest come first, so that no worker is left with one of them at the end."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, also by the processes that tests start

LONGEST = "results sweep finetune cli pretrain trainer fisher dropout report extending embeddings".split()


def pytest_collection_modifyitems(items):
    place = lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST)
    items.sort(key=lambda item: place(item.path.stem.removeprefix("test_")))
