"""The package as its users meet it: what an import costs, what is declared, what the files say of each other."""

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from reference import rooms as chapters
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted((ROOT / "isoreg").rglob("*.py"))
DISTRIBUTION = {
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "IsoScore": "isoscore",
    "skdim": "scikit-dimension",
    "PIL": "pillow",
}


def requirements(*groups: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(req.name): req for group in groups for req in map(Requirement, group)}


RUNTIME = requirements(PROJECT["dependencies"])
OPTIONAL = requirements(*[group for name, group in PROJECT["optional-dependencies"].items() if name != "dev"])
EVERYTHING = requirements(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")
PINS = {canonicalize_name(name): version for name, version in PINS.items()}


def tracked_files() -> list[Path]:
    "What git tracks, and what it would track if it were added now."
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def imported_packages(module: Path) -> set[str]:
    "The packages that a module imports anywhere, functions included."
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"isoreg"}


def test_importing_the_package_is_light():
    heavy = "torch transformers numpy pandas datasets matplotlib evaluate papermill nbdev fastcore".split()
    code = f"import isoreg, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_every_import_is_declared(module):
    needed = {canonicalize_name(DISTRIBUTION.get(name, name)) for name in imported_packages(module)}
    assert needed <= RUNTIME.keys() | OPTIONAL.keys()


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_the_pin_satisfies_the_declaration(name):
    assert name in PINS, f"constraints.txt does not pin {name}"
    assert EVERYTHING[name].specifier.contains(PINS[name], prereleases=True)


def test_one_version_everywhere():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini")
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "isoreg/__init__.py").read_text(), re.MULTILINE)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert settings["DEFAULT"]["version"] == version == citation["version"]
    assert settings["DEFAULT"]["min_python"] in PROJECT["requires-python"]
    assert settings["DEFAULT"]["description"] == PROJECT["description"]
    assert set(settings["DEFAULT"]["keywords"].split()) == set(PROJECT["keywords"])


def test_no_path_of_a_machine():
    folders = "|".join(["home", "work", "tmp", "root", "Users", "var/folders", "opt/pypi", "opt/wheels"])
    machine = re.compile(rf"(?:(?<![\w.:/~-])|(?<=file://))/(?:{folders})/[\w.]+|[A-Z]:\\+Users\\")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits = machine.findall(text.replace("\\n", " ").replace("\\t", " "))
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in sorted(set(hits))]
    assert not found, "\n".join(found)


def test_citation_is_well_formed():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert reference["type"] in ("article", "conference-paper", "data") and 2000 < reference["year"] < 2100
        assert all({"given-names", "family-names"} == author.keys() for author in reference["authors"])
        for identifier in reference.get("identifiers", []):
            assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", identifier["value"])


def test_the_readme_gives_the_test_command():
    "The continuous integration takes the command from README.md and runs it, so it has to be there, once."
    (line,) = re.findall(r"^python3 -m venv .*pytest.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert ".venv/bin/pip install -c constraints.txt -e '.[dev]' && .venv/bin/python -m pytest -n 2" in line


def test_rooms_import_from_lower_numbers_and_lower_packages_only():
    "At the top of a module: the science, then the experiments, then the report, then the front."
    rooms = {room: int(Path(file).name[:2]) for room, file, _ in chapters(ROOT / "nbs")}
    files = {file: file.relative_to(ROOT / "isoreg") for file in (ROOT / "isoreg").rglob("[!_]*.py")}
    modules = {".".join(file.with_suffix("").parts): file for file in files.values()}
    assert set(rooms) == set(modules) and len(set(rooms.values())) == len(rooms)
    level = lambda room: (
        3 if room in ("embeddings", "cli") else {"experiments": 1, "report": 2}.get(room.split(".")[0], 0)
    )
    for room, file in modules.items():
        tree = ast.parse((ROOT / "isoreg" / file).read_text())
        for node in [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level and n.module]:
            other = ".".join([*file.parts[: len(file.parts) - node.level], node.module])
            assert rooms[other] < rooms[room] and level(other) <= level(room), f"{room} imports {other}"
