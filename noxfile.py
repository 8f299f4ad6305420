"""Checks that need environments of their own: `nox -s compat`, `mutation`, `audit` and others.

`pip install nox`, and `nox -l` lists them. Each set of `tools/pins` is a whole environment, every package pinned; its
first line names the Python that it is for. How the sets were made:

    uv pip compile --resolution lowest-direct --python-version 3.11 ...    # minimal: the bounds of pyproject.toml
    uv pip compile --python-version 3.13 ...                               # newest
"""

import os
import re
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PINS = ROOT / "tools" / "pins"
SETS = {path.stem: re.match(r"# Python (\S+):", path.read_text())[1] for path in sorted(PINS.glob("*.txt"))}
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True


@nox.session
@nox.parametrize("python,pins", [nox.param(python, name, id=name) for name, python in SETS.items()])
def compat(session: nox.Session, pins: str) -> None:
    """Run the quick selection of tests in a pinned environment, and enter the result in the record of
    compatibility. One set: nox -s "compat(minimal)"."""
    session.install("-r", str(PINS / f"{pins}.txt"))
    session.run("python", "tools/compatibility.py", pins, *session.posargs, env=QUIET)


@nox.session(python=False)
def mutation(session: nox.Session) -> None:
    "Change the code of five modules at sampled places, and count the changes that no test notices; -- MODULE ..."
    session.run("python", "tools/mutation.py", *session.posargs, env=QUIET)


@nox.session(python=False)
def fuzz(session: nox.Session) -> None:
    "Try 6,400 random inputs and enter the counts in the record of trust."
    session.run("python", "tools/fuzz.py", env=QUIET)


@nox.session(python=False)
def long(session: nox.Session) -> None:
    "Run what takes minutes: runs that are killed, clusters of Ray that lose a part, slow cells of notebooks."
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    session.run("python", "-m", "pytest", "-q", "-rs", "tools/test_faults.py", env=QUIET | {"PYTHONPATH": path})
    for place in ("nbs/experiments", "nbs/12_landscape.ipynb"):
        session.run("nbdev_test", "--path", place, "--flags", "slow", env=QUIET)


@nox.session
def audit(session: nox.Session) -> None:
    "Look up the pinned packages among known vulnerabilities. Needs a network that reaches the package index."
    session.install("pip-audit")
    session.run("pip-audit", "--no-deps", "--disable-pip", "-r", str(ROOT / "constraints.txt"))
