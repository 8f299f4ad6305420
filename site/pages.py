"""The filter of the site: what Quarto does to a notebook's cells. `python site/pages.py --all` filters all pages into a
store; without a word it filters one, from stdin to stdout, as Quarto asks for it."""

import ast
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
from pathlib import Path

from isoreg.files import write_atomically

_FOLDED, _LABEL = (f"code-{name}" for name in ("fold", "summary"))  # Quarto's names


def _given(options: list[str]) -> dict[str, str]:
    "Return name and value of the options that a cell has."
    parts = [line.removeprefix("#|").partition(":") for line in options]
    return {name.strip(): value.strip() for name, _, value in parts}


def _kind(tree: list[ast.stmt], given: dict[str, str], source: bool, lines: int) -> str:
    "Return what a cell holds: Source, Figure, Imports, Check or other Code."
    if source:
        return "Source"
    if "fig-cap" in given and lines > 4:
        return "Figure"
    if tree and all(isinstance(s, ast.Import | ast.ImportFrom) for s in tree):
        return "Imports"
    return "Check" if tree and all(isinstance(s, ast.Assert) for s in tree) else "Code"


def _label(kind: str, tree: list[ast.stmt]) -> str:
    "Return the label of a fold, with up to three of the names that the cell defines."
    if kind in ("Imports", "Check", "Figure"):
        return kind
    names = [s.name for s in tree if isinstance(s, ast.FunctionDef | ast.ClassDef)]
    targets = [t for s in tree if isinstance(s, ast.Assign) for t in s.targets]
    names = names or [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and n.id != "_"]
    return f"{kind}: {', '.join(dict.fromkeys(names[:3]))}" if names else kind


def fold(
    cell,  # of nbdev: cell_type, source, directives_
) -> None:
    "Fold a cell that is a source, imports, checks or a longer drawing, and label each fold with what it holds."
    if cell.cell_type != "code" or not cell.source.strip():
        return
    lines = cell.source.splitlines(keepends=True)
    options, body = [[line for line in lines if line.startswith("#|") is head] for head in (True, False)]
    given = _given(options)
    if "false" in (given.get("echo"), given.get("include")):
        return
    try:
        tree = ast.parse("".join(lines)).body
    except SyntaxError:
        return  # a magic
    kind = _kind(tree, given, "exports" in (cell.directives_ or {}), len(body))
    if _FOLDED not in given and kind != "Code":
        options.insert(0, f"#| {_FOLDED}: true\n")
    if _LABEL not in given:
        options.insert(0, f'#| {_LABEL}: "{_label(kind, tree)}"\n')
    cell.source = "".join([*options, *body])


def filter_pages(
    *words: str,  # "--all": every notebook of the project into the store; none: one, from stdin to stdout
) -> None:
    "Filter notebooks for Quarto as `nbdev_filter` does."
    here = Path.cwd()
    root = next(folder for folder in (here, *here.parents) if (folder / "settings.ini").exists())
    if not words:
        return print(json.dumps(json.loads(_filtered(sys.stdin.read(), root)[0])))
    for module in pkgutil.walk_packages([str(root / "isoreg")], "isoreg."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass  # a library that is not installed
    pages = [(path, root) for path in sorted(root.glob("nbs/**/[!_]*.ipynb"))]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        kept = set(pool.starmap(_store, pages, chunksize=1))
    for old in set((root / "_filtered").iterdir()) - kept:
        old.unlink(missing_ok=True)


def _filtered(text: str, root: Path) -> tuple[str, Path]:
    "Return the filtered form of a notebook, from the store where it is there, and its file in the store."
    digest = hashlib.sha256(text.encode())
    for path in [root / "settings.ini", *sorted(root.glob("*/*.py")), *sorted(root.glob("isoreg/*/*.py"))]:
        digest.update(path.read_bytes())
    stored = root / "_filtered" / f"{digest.hexdigest()}.json"
    if not stored.exists():
        from nbdev.cli import nbdev_filter

        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            write_atomically(stored, nbdev_filter.__wrapped__(text, printit=False))
    return stored.read_text(encoding="utf-8"), stored


def _store(path: Path, root: Path) -> Path | None:
    "Filter a notebook into the store and return its file; what the filter refuses is said when Quarto comes to it."
    os.chdir(path.parent)
    try:
        return _filtered(path.read_text(encoding="utf-8"), root)[1]
    except Exception:
        return None


if __name__ == "__main__":
    filter_pages(*sys.argv[1:])
