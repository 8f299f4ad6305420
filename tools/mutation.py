"""Change one place of a module at a time, as cosmic-ray does, and see whether the module's own tests notice:
python tools/mutation.py [MODULE ...] [--sample N] [--seed N]. The changes are a random sample; each is tried against
the tests that enter the function it is in, and those that start a process. The result goes into the record of trust,
every survivor with its line and, where somebody has looked at it, with what was found."""

import argparse
import ast
import contextlib
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from trust import ROOT, enter, recorded, today


def place(module: str) -> Path:
    "Return the file of a module below the package, wherever it lies."
    return next((ROOT / "isoreg").rglob(f"{module}.py")).relative_to(ROOT)


MODULES = {  # module: its tests, and which of them
    "isoscore": (["test_isoscore.py"], "not ranks"),
    "fisher": (["test_fisher.py"], "not loop_over_samples and not ten_batches"),
    "schedules": (["test_schedules.py"], ""),
    "statistics": (["test_statistics.py"], ""),
    "config": (["test_config.py", "test_grid.py", "test_records.py", "test_extending.py"], ""),
}


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
    if not found:
        sys.exit("cosmic-ray shows no operators: install it with its metadata")
    return found


class Reaches:
    "Notes for each test how long it takes, which functions of a module it enters, and whether it starts a process."

    def __init__(self, file: str):
        self.file, self.test, self.found = file, "", {"": {"seconds": 0.0, "enters": set(), "starts": False}}

    def __call__(self, frame, event, _):
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename == self.file:
            self.found[self.test]["enters"].add(code.co_firstlineno)
        elif code.co_filename.endswith(("/subprocess.py", "/multiprocessing/process.py")):
            self.found[self.test]["starts"] |= code.co_name in ("__init__", "start")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test, begun = item.nodeid, time.monotonic()
        self.found[self.test] = {"seconds": 0.0, "enters": set(), "starts": False}
        try:
            return (yield)
        finally:
            self.found[self.test]["seconds"], self.test = time.monotonic() - begun, ""


class Only:
    "Leaves the tests that are named, in that order, and gives each the same random numbers whatever came before."

    def __init__(self, names: list[str] | None):
        self.names = names

    def pytest_collection_modifyitems(self, items):
        if self.names is not None:
            place = {name: i for i, name in enumerate(self.names)}
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        import torch

        torch.manual_seed(0)


def reaching(module: str) -> dict[str, dict]:
    "Run the tests of a module without any change, and return what each of them enters; exit if one fails."
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "reaches.pickle")
        if tested(module, None, 3600, None, out) != "survived":
            sys.exit(f"{module}: its tests fail without any change")
        reached, modules = pickle.loads(out.read_bytes())
    for name in modules:  # once here and not in each fork
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return reached


def tests_of(line: int, source: str, reached: dict[str, dict]) -> list[str]:
    "Return the tests that enter the function of a line, the quickest first; all, of a line that an import runs."
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    around = [f for f in functions if f.body[0].lineno <= line <= f.end_lineno]
    its = set()
    if around:
        whole = min(around, key=lambda f: f.lineno)
        first = min([whole.lineno, *(d.lineno for d in whole.decorator_list)])
        its = set(range(first, whole.end_lineno + 1))
    every = not around or bool(its & reached[""]["enters"])
    names = [n for n, r in reached.items() if n and (every or r["starts"] or its & r["enters"])]
    return sorted(names, key=lambda n: reached[n]["seconds"])


def tested(module: str, code: str | None, limit: float, names: list[str] | None, out: Path | None = None) -> str:
    "Run tests of a module in a fork of this process: survived, killed, or killed by the time that they take."
    if names == []:
        return "survived"
    with tempfile.TemporaryDirectory() as folder:
        # A copy of the package with the change, first on the path, so that processes that a test starts have it too.
        shutil.copytree(ROOT / "isoreg", f"{folder}/isoreg", ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, "nbs").symlink_to(ROOT / "nbs")  # the grids are found beside the package
        if code is not None:
            Path(folder, place(module)).write_text(code)
        pid = os.fork()
        if pid == 0:
            _test(module, folder, names, out)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return "killed" if status else "survived"
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "killed by time"


def _test(module: str, folder: str, names: list[str] | None, out: Path | None):
    "Run tests of a module with the package in a folder, write what they enter where that is asked, end the process."
    files, words = MODULES[module]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0"]
    chosen = [*(str(ROOT / "tests" / f) for f in files), "-m", "not slow", *(["-k", words] if words else [])]
    reaches, plugins = Reaches(f"{folder}/{place(module)}"), [Only(names)]
    if out is not None:
        plugins.append(reaches)
        threading.setprofile(reaches), sys.setprofile(reaches)
    try:
        ended = int(pytest.main([*options, *chosen], plugins=plugins))
        sys.setprofile(None)
        if out is not None:
            others = [n for n, m in sys.modules.items() if "site-packages" in (getattr(m, "__file__", None) or "")]
            out.write_bytes(pickle.dumps((reaches.found, others)))
        os._exit(ended)
    except BaseException:
        os._exit(3)


def examine(module: str, size: int, seed: int, verdicts: dict[tuple[str, str], str]) -> dict:
    "Return what became of a random sample of the changes of a module, with what is known of those that survive."
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / place(module)).read_text()
    every, lines = mutants(source), source.splitlines()
    drawn = random.Random(seed).sample(range(len(every)), min(size, len(every)))
    reached, survivors = reaching(module), []
    for n, i in enumerate(drawn):
        operator, occurrence, line = every[i]
        code = mutate_code(source, get_operator(operator)(), occurrence)
        names = tests_of(line, source, reached)
        print(f"{module} {n + 1}/{len(drawn)}: {len(names)} tests", flush=True)
        limit = 120 + 10 * sum(reached[n]["seconds"] for n in names)
        if tested(module, code, limit, names) == "survived":
            old, new = lines[line - 1].strip(), code.splitlines()[line - 1].strip()
            verdict = verdicts.get((old, new), "not looked at")
            survivors.append({"operator": operator, "before": old, "after": new, "verdict": verdict})
            print(f"{module} {n + 1}/{len(drawn)}: {operator}\n  - {old}\n  + {new}", flush=True)
    print(f"{module}: {len(survivors)} of {len(drawn)} survive", flush=True)
    return {
        "date": today(),
        "seed": seed,
        "changes": len(every),
        "tried": len(drawn),
        "survived": len(survivors),
        "survivors": survivors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []])
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import scipy.stats  # noqa: F401  what all tests import, once
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    for module in arguments.modules or MODULES:
        earlier = recorded("mutation").get(module, {})
        verdicts = {(s["before"], s["after"]): s["verdict"] for s in earlier.get("survivors", [])}
        found = examine(module, arguments.sample, arguments.seed, verdicts)
        enter("mutation", recorded("mutation") | {module: found})


if __name__ == "__main__":
    main()
