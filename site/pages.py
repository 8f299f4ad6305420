"""The filter of the site: what becomes of a notebook before Quarto reads it. `python site/pages.py --all` filters all
notebooks into a store; without arguments it filters one, from stdin to stdout, as Quarto asks for it."""

import ast
import configparser
import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import NamedTuple

from check_site import front_matter, published, read_cells, read_config
from isoreg.files import write_atomically

_FOLDED, _LABEL = (f"code-{name}" for name in ("fold", "summary"))  # Quarto's names


def _given(options: list[str]) -> dict[str, str]:
    "Return name and value of the options that a cell has."
    parts = [line.removeprefix("#|").partition(":") for line in options]
    return {name.strip(): value.strip() for name, _, value in parts}


def _kind(tree: list[ast.stmt], given: dict[str, str], source: bool, lines: int) -> str:
    "Return what a cell holds: Source, the code of a figure or a table, Imports, Check or other Code."
    if source:
        return "Source"
    for option, shown in (("fig-cap", "figure"), ("tbl-cap", "table")):
        if option in given and lines > 4:
            return f"Code of the {shown}"
    if tree and all(isinstance(s, ast.Import | ast.ImportFrom) for s in tree):
        return "Imports"
    return "Check" if tree and all(isinstance(s, ast.Assert) for s in tree) else "Code"


def _label(kind: str, tree: list[ast.stmt]) -> str:
    "Return the label of a fold, with up to three of the functions and classes that the cell defines."
    names = [s.name for s in tree if isinstance(s, ast.FunctionDef | ast.ClassDef)]
    return f"{kind}: {', '.join(names[:3])}" if names and kind in ("Source", "Code") else kind


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
    pages = [(root / name, root) for name in addresses(root).pages]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        kept = set(pool.starmap(_store, pages, chunksize=1))
    for old in set((root / "_filtered").iterdir()) - kept:
        old.unlink(missing_ok=True)


def _filtered(text: str, root: Path) -> tuple[str, Path]:
    "Return the filtered form of a notebook, from the store where it is there, and its file in the store."
    digest = hashlib.sha256(text.encode())
    for path in [
        root / "settings.ini",
        root / "_quarto.yml",
        *sorted(root.glob("*/*.py")),
        *sorted(root.glob("isoreg/*/*.py")),
    ]:
        digest.update(path.read_bytes())
    stored = root / "_filtered" / f"{digest.hexdigest()}.json"
    if not stored.exists():
        from nbdev.cli import nbdev_filter

        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            filtered = json.loads(nbdev_filter.__wrapped__(text, printit=False))
        before = [cell | {"source": "".join(cell["source"])} for cell in json.loads(text)["cells"]]
        adapt(filtered["cells"], before, Path.cwd().relative_to(root).as_posix(), addresses(root))
        write_atomically(stored, json.dumps(filtered))
    return stored.read_text(encoding="utf-8"), stored


class Addresses(NamedTuple):
    "Where links lead: the pages of the site, and the addresses of settings.ini."

    pages: dict[str, str]  # page of each published notebook
    api: str  # what nbdev writes before the page of a name
    source: str  # the notebooks in the repository, or nothing
    colab: str  # the same on Colab, or nothing


@functools.cache
def addresses(root: Path) -> Addresses:
    "Read the addresses of the project."
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(root / "settings.ini")
    s = settings["DEFAULT"]
    pages = {}
    for path in published(root, read_config(root)["project"]["render"]):
        if path.suffix == ".ipynb":
            page = path.with_name(front_matter(read_cells(path)).get("output-file", f"{path.stem}.html"))
            pages[path.relative_to(root).as_posix()] = page.relative_to(root).as_posix()
    url, branch = s.get("git_url", ""), s.get("branch", "main")
    source = url and f"{url}/blob/{branch}"
    colab = source.replace("https://github.com/", "https://colab.research.google.com/github/")
    api = s.get("doc_host", "").rstrip("/") + "/" + s.get("doc_baseurl", "").strip("/") + "/"
    return Addresses(pages, api, source, colab if colab != source else "")


INDEX = "nbs/guides/reference.ipynb"  # has the entries of the rooms that have no page


def relink(text: str, folder: str, to: Addresses) -> str:
    "Return a text whose links lead to pages of the site by relative paths, or to the repository."
    relative = lambda path: os.path.relpath(path, folder)

    def name(m):
        "A link that nbdev made of a name in backticks."
        if f"nbs/{m[2]}.html" in to.pages.values():
            return f"[`{m[1]}`]({relative(f'nbs/{m[2]}.html')}#{m[3]})"
        entry = f"{relative(INDEX)}#isoreg.{m[2].replace('/', '.')}.{m[1].split('.')[0]}"
        return f"[`{m[1]}`]({entry})" if INDEX in to.pages else f"`{m[1]}`"

    def notebook(m):
        "A link to a notebook, which may have no page."
        target = os.path.normpath(os.path.join(folder, m[2]))
        if target in to.pages or not target.startswith("nbs/") or target == "nbs/index.ipynb":
            return m[0]
        if (m[3] or "").startswith("#isoreg."):
            return f"[{m[1]}]({relative(INDEX)}{m[3]})"
        return f"[{m[1]}]({to.source}/{target})" if to.source else m[1]

    text = re.sub(rf"\[`([\w.]+)(?:\(\))?`\]\({re.escape(to.api)}([\w/]+)\.html#([\w.]+)\)", name, text)
    return re.sub(r"\[([^\[\]]+)\]\((?![a-z]+:|/)([^)#\s]+\.ipynb)(#[^)\s]*)?\)", notebook, text)


def adapt(cells: list[dict], before: list[dict], folder: str, to: Addresses) -> None:
    "Make the cells of a filtered notebook those of a page: links, the code of results at the end, a link to Colab."
    for cell in cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = relink("".join(cell["source"]), folder, to).splitlines(keepends=True)
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if "text/markdown" in data:
                text = relink("".join(data["text/markdown"]), folder, to)
                data["text/markdown"] = text.splitlines(keepends=True)
    added = {"cell_type": "markdown", "id": f"added-{len(cells)}", "metadata": {}}
    if folder == "nbs/tables":
        for cell in cells:
            if cell["cell_type"] == "code":
                lines = "".join(cell["source"]).splitlines(keepends=True)
                cell["source"] = ["#| echo: false\n", *(x for x in lines if not x.startswith("#| echo:"))]
        cells.append(added | {"source": code_of(before).splitlines(keepends=True)})
    if folder == "nbs/tutorials" and to.colab:
        name = front_matter(before)["output-file"].replace(".html", ".ipynb")
        question = next(n for n, cell in enumerate(cells) if cell["cell_type"] == "markdown")
        cells.insert(question + 1, added | {"source": [f"[Open in Colab]({to.colab}/{folder}/{name})"]})


def code_of(cells: list[dict]) -> str:
    "Return a section that has the code of a notebook in one block, folded."
    plain = [re.sub(r"(?m)^#\|.*\n?", "", c["source"]).strip() for c in cells if c["cell_type"] == "code"]
    code = "\n\n".join(source for source in plain if source)
    return f"## Code\n\n<details><summary>All code of this page</summary>\n\n```python\n{code}\n```\n\n</details>"


def _store(path: Path, root: Path) -> Path | None:
    "Filter a notebook into the store and return its file; what the filter refuses is said when Quarto comes to it."
    os.chdir(path.parent)
    try:
        return _filtered(path.read_text(encoding="utf-8"), root)[1]
    except Exception:
        return None


if __name__ == "__main__":
    filter_pages(*sys.argv[1:])
