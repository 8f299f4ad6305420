"The files that take longest come first, so that no worker is left with one of them at the end."

LONGEST = "cli sweep results finetune istar faults extending pretrain run_dropout".split()


def pytest_collection_modifyitems(items):
    place = lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST)
    items.sort(key=lambda item: place(item.path.stem.removeprefix("test_")))
