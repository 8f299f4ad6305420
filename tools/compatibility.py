"""Run the quick selection of tests in this environment, and enter what came of it in the record of compatibility:
python tools/compatibility.py SET [PYTEST_OPTION ...]"""

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "compatibility.json"
PACKAGES = "torch transformers accelerate datasets tokenizers safetensors numpy scipy pandas pydantic papermill".split()
# What meets other packages: tensors and autocast, hooks, the Trainer, ranks, dropout, settings, and the command: a run
# from end to end in a kernel, scores of files and models, a grid, and what it says of bad input.
SELECTION = {
    "tests/test_isoscore.py": "",
    "tests/test_sites.py": "",
    "tests/test_schedules.py": "",
    "tests/test_config.py": "",
    "tests/test_fisher.py": "autocast",
    "tests/test_trainer.py": "two_ranks and ustat or accumulation or mixed_precision or resumed or encoder_and_decoder",
    "tests/test_finetune.py": "key or share_their_start or weights_that_are_none or takes_any_penalty",
    "tests/test_boundary.py": "",
    "tests/test_cli.py": "run_writes or not_repeated or bad_input or tasks_and_version or report or interrupted",
    "tests/test_sweep.py": "toy_grid or interrupt_ends",
}


class Outcomes:
    "Count what became of each test."

    def __init__(self):
        self.counts, self.failed = {"passed": 0, "failed": 0, "skipped": 0}, []

    def pytest_runtest_logreport(self, report) -> None:
        "Count a test by its call, or by the part before or after it that failed or was skipped."
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            self.failed += [report.nodeid] if report.failed else []


def run_selection(options: list[str]) -> tuple[Outcomes, bool]:
    "Run the selection, and return what was counted and whether pytest itself came to its end each time."
    outcomes, whole = Outcomes(), True
    for path, words in SELECTION.items():
        arguments = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *(["-k", words] if words else []), *options]
        whole &= pytest.main([str(ROOT / path), *arguments], plugins=[outcomes]) in (0, 1)
    return outcomes, whole


def write(name: str, outcomes: Outcomes, seconds: float) -> None:
    "Put the result of a set into the record; the other sets stay as they are."
    entry = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {package: version(package).partition("+")[0] for package in PACKAGES},
        **outcomes.counts,
        "failures": sorted(outcomes.failed),
        "seconds": round(seconds),
    }
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {"kind": "compatibility", "sets": {}}
    found["selection"], found["sets"][name] = SELECTION, entry
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    begun = datetime.now(UTC)
    outcomes, whole = run_selection(sys.argv[2:])
    if not whole:
        sys.exit("pytest did not come to its end; nothing is written")
    write(sys.argv[1], outcomes, (datetime.now(UTC) - begun).total_seconds())
    sys.exit(bool(outcomes.failed))
