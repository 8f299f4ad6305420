"""Change one place of a module at a time, as cosmic-ray does, and see whether the module's own tests notice:
python .ci/mutation.py [MODULE ...] [--sample N]. The changes are a random sample with seed 0; the result goes into the
record of trust, every survivor with its line."""

import argparse
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "trust.json"
MODULES = {  # module: its tests, and which of them
    "isoscore": (["test_isoscore.py"], "not ranks and not time"),
    "fisher": (["test_fisher.py"], "not ranks and not loop_over_samples and not ten_batches and not memory"),
    "schedules": (["test_schedules.py"], ""),
    "statistics": (["test_statistics.py"], ""),
    "config": (["test_config.py", "test_grid.py"], ""),
}


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Load one module from changed code."

    def __init__(self, name: str, code: str):
        self.name, self.code = name, code

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module) -> None:
        module.__file__ = str(ROOT / "isoreg" / f"{self.name.rpartition('.')[2]}.py")
        exec(compile(self.code, module.__file__, "exec"), module.__dict__)


def mutants(source: str) -> list[tuple[str, int, int]]:
    "Return operator, occurrence and line of each change that cosmic-ray knows of, in the order of its operators."
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, lines, found = list(ast_nodes(get_ast(source))), source.splitlines(), []
    for name in sorted(operator_names()):
        if "variable" in name.lower():  # these need to be told which variables
            continue
        operator = get_operator(name)()
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [(name, i, line) for i, (line, _) in enumerate(starts) if "__all__" not in lines[line - 1]]
    return found


def tested(module: str, code: str | None, limit: float) -> str:
    "Run the tests of a module in a fork of this process: survived, killed, or killed by the time that they take."
    files, words = MODULES[module]
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        import pytest

        if code is not None:
            sys.meta_path.insert(0, Changed(f"isoreg.{module}", code))
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0"]
        chosen = [str(ROOT / "tests" / f) for f in files] + (["-k", words] if words else [])
        try:
            os._exit(int(pytest.main([*options, *chosen])))
        except BaseException:
            os._exit(3)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "killed" if status else "survived"
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "killed by time"


def examine(module: str, size: int) -> dict:
    "Return what became of a random sample of the changes of a module."
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / "isoreg" / f"{module}.py").read_text()
    every, lines = mutants(source), source.splitlines()
    drawn = random.Random(0).sample(range(len(every)), min(size, len(every)))
    begun = time.monotonic()
    if tested(module, None, 1200) != "survived":
        sys.exit(f"{module}: its tests fail without any change")
    limit, survivors = 60 + 5 * (time.monotonic() - begun), []
    for n, i in enumerate(drawn):
        operator, occurrence, line = every[i]
        code = mutate_code(source, get_operator(operator)(), occurrence)
        if tested(module, code, limit) == "survived":
            now = code.splitlines()[line - 1].strip()
            survivors.append({"operator": operator, "before": lines[line - 1].strip(), "after": now})
            print(f"{module} {n + 1}/{len(drawn)}: {operator}\n  - {lines[line - 1].strip()}\n  + {now}", flush=True)
    print(f"{module}: {len(survivors)} of {len(drawn)} survive", flush=True)
    when = datetime.now(UTC).date().isoformat()
    return {
        "date": when,
        "changes": len(every),
        "tried": len(drawn),
        "survived": len(survivors),
        "survivors": survivors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []], default=list(MODULES))
    parser.add_argument("--sample", type=int, default=60)
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import scipy.stats  # noqa: F401  what all tests import, once
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    for module in arguments.modules or MODULES:
        found = examine(module, arguments.sample)
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kind": "trust"}
        record.setdefault("mutation", {})[module] = found
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
