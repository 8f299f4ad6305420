"The files that take longest come first, so that no worker is left with one of them at the end."

LONGEST = ("test_sweep", "test_cli", "test_results", "test_istar", "test_run_dropout", "test_finetune", "test_pretrain")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
