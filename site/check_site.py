"""Check, without Quarto, all that Quarto needs to build the site: the configuration, each notebook's passage through
the filter, and every cross-reference, embedding and link. Prints what is wrong by file and cell, and exits 1."""

import argparse
import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the filter of this environment
CELL_OPTIONS = set(
    "label tbl-cap fig-cap fig-alt fig-subcap code-summary column eval include warning error fig-width fig-height "
    "layout layout-ncol echo output code-fold code-overflow fig-align tbl-colwidths".split()
)
OUTPUTS = {"text/plain", "text/markdown", "image/png"}
HOST = r"""\s*["']?\s*((?:https?:)?//[^"'\s>)]+)"""
LOADED = re.compile(
    rf"""<(?!a\b)\w+\b[^<>]*?\s(?:src|srcset|poster|data)\s*={HOST}"""
    rf"""|<link\b(?![^<>]*\brel=["']?(?:canonical|alternate|next|prev)\b)[^<>]*?\shref\s*={HOST}"""
    rf"""|@import{HOST}|\burl\({HOST}""",
    re.IGNORECASE,
)
BEFORE, BODY = r"(?<![\w@`\\/.])", r"([A-Za-z0-9](?:[\w:-]*\w)?)"
REFERENCE = re.compile(BEFORE + r"-?@(tbl|fig|eq|sec)-" + BODY)
MARK = re.compile(r"\{#((?:tbl|fig|eq)-[\w:-]+)[^}]*\}")
OPTION = re.compile(r"^#\|\s*([\w-]+)\s*:\s*(.*?)\s*$")
LINK = re.compile(r"\]\((?!https?:|mailto:|data:|attachment:|#)([^)\s#]+)(?:#[^)\s]*)?\)")


def text_of(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def read_cells(path: Path) -> list[dict]:
    return [cell | {"source": text_of(cell["source"])} for cell in json.loads(path.read_text())["cells"]]


def prose(text: str) -> str:
    "The text without its code, fenced or in backticks."
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE))


def read_yaml(text: str, place: str = "") -> dict:
    "What a YAML mapping holds. ValueError, in one line that begins with the place, for what Quarto refuses too."
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(place + " ".join(str(error).replace('in "<unicode string>", ', "").split())) from None
    if not isinstance(found or {}, dict):
        raise ValueError(f"{place}{text.strip()[:80]!r} is not of the form key: value")
    return found or {}


def read_config(root: Path) -> dict:
    return read_yaml((root / "_quarto.yml").read_text(), "_quarto.yml: ")


def front_matter(cells: list[dict]) -> dict:
    "What a first cell between two lines --- says. ValueError as `read_yaml`."
    found = cells and re.match(r"---[ \t]*\n(.*?)^---[ \t]*$", cells[0]["source"], re.DOTALL | re.MULTILINE)
    return read_yaml(found[1]) if found and cells[0]["cell_type"] != "code" else {}


def cell_options(source: str) -> dict:
    "The Quarto options of a filtered code cell: its leading lines #| as one YAML mapping. ValueError for a wrong one."
    leading = re.match(r"(?:#[ \t]*\|.*\n?)*", source)[0]
    given = read_yaml(re.sub(r"^#[ \t]*\| ?", "", leading, flags=re.MULTILINE))
    for key in given.keys() - CELL_OPTIONS:
        raise ValueError(f"{key}: {given[key]} is no option; mend it, or add it to CELL_OPTIONS of site/check_site.py")
    return given


def loaded_from_elsewhere(text: str) -> list[str]:
    "The addresses on other hosts that HTML or CSS loads by itself: scripts, styles, pictures, fonts; not links."
    return sorted({next(filter(None, found)) for found in LOADED.findall(text)})


def directives(source: str) -> set[str]:
    "The words of the leading #| lines of a cell."
    leading = re.match(r"(?:\s*#\|.*\n?)*", source)[0]
    return {word for line in leading.splitlines() for word in re.findall(r"#\|\s*([\w-]+)", line)[:1]}


def options(cell: dict) -> list[tuple[str, str]]:
    "The Quarto options of a cell: its lines of the form #| key: value."
    return [(option[1], option[2]) for line in cell["source"].splitlines() if (option := OPTION.match(line))]


def is_hidden(cell: dict) -> bool:
    return "hide" in directives(cell["source"]) or bool(
        re.search(r"^#\|\s*include:\s*false", cell["source"], re.MULTILINE)
    )


def exported_defs(cells: list[dict]) -> list[tuple[int, ast.AST]]:
    "Each public function and class that the notebook exports, with the number of its cell."
    found = []
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "code" and directives(cell["source"]) & {"export", "exports"}:
            found += [
                (n, node)
                for node in ast.parse(cell["source"]).body
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_"
            ]
    return found


# ---- 1. the configuration


def published(root: Path, globs: list[str]) -> list[Path]:
    "The files that the render list selects. Names that begin with _ or . are never rendered."
    chosen = {path for glob in globs if glob[0] != "!" for path in root.glob(glob)}
    chosen -= {path for glob in globs if glob[0] == "!" for path in root.glob(glob[1:])}
    return sorted(path for path in chosen if not any(part[0] in "_." for part in path.relative_to(root).parts))


def hrefs(item: object) -> list[str]:
    "Every page named in a sidebar or navigation bar, in order."
    if isinstance(item, str):
        return [item]
    if isinstance(item, list):
        return [href for part in item for href in hrefs(part)]
    keys = ("href", "file", "contents", "menu", "left", "right")
    if isinstance(item, dict):
        return [href for key in keys for href in hrefs(item.get(key, []))]
    return []


def check_config(root: Path, config: dict) -> list[str]:
    "Globs without a file, and pages that are linked and missing or published and not in the sidebar."
    wrong = []
    globs, site = config["project"].get("render", []), config["website"]
    for glob in globs:
        if not any(root.glob(glob.lstrip("!"))) and glob[0] != "!":
            wrong.append(f"_quarto.yml: nothing matches {glob} in project.render")
    linked = [href for bar in ("sidebar", "navbar") for href in hrefs(site.get(bar, {})) if not href.startswith("http")]
    for href in linked:
        if not any(root.glob(href)):
            wrong.append(f"_quarto.yml: {href} is linked but does not exist")
    reachable = {
        path for href in hrefs(site.get("sidebar", {})) if not href.startswith("http") for path in root.glob(href)
    }
    pages = published(root, globs)
    for page in pages:
        if page not in reachable and page.stem != "404":
            wrong.append(f"_quarto.yml: {page.relative_to(root)} is published but not in the sidebar")
    for page in sorted(reachable - set(pages)):
        wrong.append(f"_quarto.yml: {page.relative_to(root)} is in the sidebar but not published")
    for command in [*config.get("ipynb-filters", []), config["project"].get("pre-render", "true")]:
        if not shutil.which(command.split()[0]) and not (root / command.split()[0]).exists():
            wrong.append(f"_quarto.yml: the filter {command} is not on PATH")
    return wrong


def unreadable(root: Path, files: dict[Path, list[dict]]) -> list[str]:
    "The files whose front matter Quarto would refuse."
    wrong = []
    for path, cells in files.items():
        try:
            front_matter(cells)
        except ValueError as error:
            wrong.append(f"{path.relative_to(root)}: cell 0: front matter: {error}")
    return wrong


def check_front_matter(root: Path, notebooks: dict[Path, list[dict]]) -> list[str]:
    wrong, taken = [], {}
    for path, cells in notebooks.items():
        name, front = path.relative_to(root), front_matter(cells)
        wrong += [
            f"{name}: cell 0: no {key} in the front matter"
            for key in ("title", "description", "output-file")
            if not front.get(key)
        ]
        page = path.parent / front.get("output-file", f"{path.stem}.html")
        if page in taken:
            wrong.append(f"{name}: cell 0: output-file {page.name} is also that of {taken[page]}")
        taken.setdefault(page, name)
        expected = re.sub(r"^\d+[a-zA-Z0-9]*_", "", path.stem.lower()) + ".html"
        if exported_defs(cells) and page.name != expected:
            wrong.append(f"{name}: cell 0: links into the API lead to {expected}, but output-file is {page.name}")
    return wrong


def check_outputs(cells: list[dict]) -> list[str]:
    "Outputs for which Quarto makes the page load scripts (RequireJS, jQuery) from another host."
    wrong = []
    for n, cell in enumerate(cells):
        shown = [out.get("data", {}) for out in cell.get("outputs", [])]
        wrong += [
            f"cell {n}: an output of the type {kind}; end the cell with Markdown(table.to_markdown()), or a picture"
            for kind in sorted({kind for data in shown for kind in data} - OUTPUTS)
        ]
    return wrong


# ---- 2. the filter


def pre_render(root: Path, config: dict):
    "What Quarto does before the first page."
    if command := config["project"].get("pre-render"):
        subprocess.run(command_of(root, command), cwd=root, check=True, timeout=900)


def command_of(root: Path, command: str) -> list[str]:
    "The words of a command in _quarto.yml: a script of the project is run by Python, as Quarto does it."
    script, *words = command.split()
    return [sys.executable, str(root / script), *words] if script.endswith(".py") else [script, *words]


def run_filter(root: Path, path: Path, command: str) -> subprocess.CompletedProcess:
    "What Quarto does with a notebook: the filter, in the notebook's folder, from stdin to stdout."
    return subprocess.run(
        command_of(root, command), cwd=path.parent, input=path.read_text(), capture_output=True, text=True, timeout=900
    )


def check_filtered_cells(cells: list[dict]) -> list[str]:
    "What Quarto would refuse in the filtered cells."
    wrong = []
    for n, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        source = text_of(cell.get("source", ""))
        try:
            cell_options(source)
        except ValueError as error:
            wrong.append(f"filtered cell {n}: {error}")
        below = re.sub(r"\A(?:#[ \t]*\|.*\n?)*", "", source)
        wrong += [
            f"filtered cell {n}: directive left over: {line.strip()}"
            for line in re.findall(r"^[ \t]*#[ \t]*\|.*", below, re.MULTILINE)
        ]
    return wrong


def check_filtered(
    name: Path, cells: list[dict], done: subprocess.CompletedProcess, anchors: dict[str, set[str]]
) -> list[str]:
    if done.returncode:
        return [f"{name}: the filter fails: {' | '.join(done.stderr.strip().splitlines()[-3:])}"]
    filtered = json.loads(done.stdout)["cells"]
    wrong = [f"{name}: {line}" for line in check_filtered_cells(filtered)]
    shown = {}
    for n, cell in enumerate(filtered):
        source = text_of(cell.get("source", ""))
        outputs = [text_of(out.get("data", {}).get("text/markdown", "")) for out in cell.get("outputs", [])]
        if cell["cell_type"] == "code":
            if called := re.search(r"^show_doc\((?:\w+\.)?(\w+)\)", source, re.MULTILINE):
                shown[called[1]] = "".join(outputs)
        text = "".join([source if cell["cell_type"] == "markdown" else "", *outputs])
        for page, anchor in re.findall(r"`\]\(([\w/.-]+\.html)#([\w.]+)\)", text):
            page = os.path.normpath(name.parent / page)
            if anchor not in anchors.get(page, set()):
                wrong.append(f"{name}: filtered cell {n}: the API link {page}#{anchor} leads nowhere")
    for n, node in exported_defs(cells):
        if node.name not in shown:
            wrong.append(f"{name}: cell {n}: {node.name} is exported but its documentation is not shown")
        elif node.name not in shown[node.name]:
            wrong.append(f"{name}: cell {n}: the documentation of {node.name} is empty")
    return wrong


def api_anchors(root: Path, notebooks: dict[Path, list[dict]]) -> dict[str, set[str]]:
    "For each page of the library, the anchors that nbdev gives to what it exports."
    anchors = {}
    for path, cells in notebooks.items():
        page = (path.parent / front_matter(cells).get("output-file", "")).relative_to(root).as_posix()
        for _, node in exported_defs(cells):
            methods = [
                part for part in node.body if isinstance(node, ast.ClassDef) and isinstance(part, ast.FunctionDef)
            ]
            names = [node.name, *(f"{node.name}.{method.name}" for method in methods)]
            anchors.setdefault(page, set()).update(name.lower() for name in names)
    return anchors


# ---- 3. references, embeddings, links


def labels(cells: list[dict]) -> list[tuple[int, str]]:
    found = []
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            found += [(n, mark) for mark in MARK.findall(prose(cell["source"]))]
        elif cell["cell_type"] == "code" and not is_hidden(cell):
            found += [(n, value.strip("\"'")) for key, value in options(cell) if key == "label"]
    return found


def check_references(name: Path, cells: list[dict]) -> list[str]:
    wrong, marks = [], labels(cells)
    known = [mark for _, mark in marks]
    for n, mark in marks:
        if known.count(mark) > 1:
            wrong.append(f"{name}: cell {n}: label {mark} is given {known.count(mark)} times")
        kind, cell = mark.split("-")[0], cells[n]
        if cell["cell_type"] == "code" and kind in ("tbl", "fig"):
            if f"{kind}-cap" not in directives(cell["source"]):
                wrong.append(f"{name}: cell {n}: {mark} has no {kind}-cap")
            if not cell["outputs"] and "# no output until then" not in cell["source"]:
                wrong.append(f"{name}: cell {n}: {mark} has no stored output")
    for n, cell in enumerate(cells):
        if any(out["output_type"] == "error" for out in cell.get("outputs", [])):
            wrong.append(f"{name}: cell {n}: the stored output is an error")
        if cell["cell_type"] == "raw" or is_hidden(cell):
            continue
        if any("image/png" in out.get("data", {}) for out in cell.get("outputs", [])):
            for needed in ("label", "fig-cap", "fig-alt"):
                if needed not in directives(cell["source"]):
                    wrong.append(f"{name}: cell {n}: a figure without {needed}")
        captions = [value for key, value in options(cell) if key.endswith("-cap")]
        tables = [text_of(out.get("data", {}).get("text/markdown", "")) for out in cell.get("outputs", [])]
        text = cell["source"] if cell["cell_type"] == "markdown" else "\n".join(captions + tables)
        for kind, body in REFERENCE.findall(prose(text)):
            if f"{kind}-{body}" not in known:
                wrong.append(f"{name}: cell {n}: @{kind}-{body} has no label in this notebook")
    return wrong


def check_links(root: Path, path: Path, cells: list[dict], pages: set[Path]) -> list[str]:
    wrong, name = [], path.relative_to(root)
    for n, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        for target in LINK.findall(prose(cell["source"])):
            found = Path(os.path.normpath(path.parent / target if target[0] != "/" else root / target[1:]))
            if not (found.exists() or found in pages):
                wrong.append(f"{name}: cell {n}: the link to {target} leads nowhere")
    return wrong


def module_names(module: Path) -> set[str]:
    "The names that a module defines or imports at its top level."
    names = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


def check_api_names(root: Path, lib: str, name: Path, cells: list[dict]) -> list[str]:
    "Each `lib.module.name` in backticks has to exist."
    wrong = []
    for n, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        for dotted in re.findall(rf"`{lib}\.([A-Za-z_][\w.]*)(?:\(\))?`", cell["source"]):
            first, *rest = dotted.split(".")
            module, package = root / lib / f"{first}.py", root / lib / "__init__.py"
            if module.exists():
                good = not rest or rest[0] in module_names(module) or rest == ["py"]
            else:
                good = (
                    (root / lib / first).is_dir()
                    or first in module_names(package)
                    or f'"{first}"' in package.read_text()
                )
            if not good:
                wrong.append(f"{name}: cell {n}: `{lib}.{dotted}` does not exist")
    return wrong


# ---- all of it


def check(root: Path, with_filter: bool = True, only: list[str] = ()) -> list[str]:
    try:
        config = read_config(root)
    except (OSError, ValueError) as error:
        return [str(error)]
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(root / "settings.ini")
    settings = settings["DEFAULT"]
    wrong = check_config(root, config)
    chosen = published(root, config["project"]["render"])
    notebooks = {path: read_cells(path) for path in chosen if path.suffix == ".ipynb"}
    documents = {
        path: [{"cell_type": "markdown", "source": path.read_text()}]
        for path in [*root.glob("*.qmd"), *root.glob("*.md")]
    }
    index = root / settings["nbs_path"] / settings.get("readme_nb", "index.ipynb")
    if index.exists():
        documents[index] = read_cells(index)
    if unread := unreadable(root, notebooks | documents):
        return wrong + unread
    wrong += check_front_matter(root, notebooks)
    pages = {
        path.parent / front_matter(cells).get("output-file", f"{path.stem}.html") for path, cells in notebooks.items()
    }
    for path, cells in (notebooks | documents).items():
        if only and str(path.relative_to(root)) not in only:
            continue
        wrong += check_references(path.relative_to(root), cells)
        wrong += check_links(root, path, cells, pages | {root / "index.html"})
        wrong += [f"{path.relative_to(root)}: {line}" for line in check_outputs(cells)]
        wrong += check_api_names(root, settings["lib_name"], path.relative_to(root), cells)
        wrong += [
            f"{path.relative_to(root)}: cell {n}: a line of {len(line.encode())} bytes, 120 are the limit: {line[:60]}"
            for n, cell in enumerate(cells)
            if cell["cell_type"] == "code"
            for line in cell["source"].splitlines()
            if len(line.encode()) > 120
        ]
    for path, cells in notebooks.items():
        wrong += [
            f"{path.relative_to(root)}: cell {n}: {node.name} has no docstring"
            for n, node in exported_defs(cells)
            if not ast.get_docstring(node)
        ]
    if with_filter and not any("is not on PATH" in line for line in wrong):
        anchors = api_anchors(root, notebooks)
        paths = [path for path in notebooks if not only or str(path.relative_to(root)) in only]
        if not only:
            pre_render(root, config)
        with ThreadPoolExecutor(2) as pool:
            for path, done in zip(
                paths, pool.map(lambda path: run_filter(root, path, config["ipynb-filters"][0]), paths)
            ):
                wrong += check_filtered(path.relative_to(root), notebooks[path], done, anchors)
    return wrong


def check_hosts(site: Path) -> list[str]:
    "What the pages and styles in a folder load from another host."
    return [
        f"{path.relative_to(site)}: {address} is loaded from another host"
        for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")])
        for address in loaded_from_elsewhere(path.read_text())
    ]


def check_rendered(root: Path) -> list[str]:
    "After `quarto render`: each published page is there, and nothing is loaded from another host."
    config = read_config(root)
    site, wrong = root / config["project"]["output-dir"], []
    for path in published(root, config["project"]["render"]):
        front = front_matter(read_cells(path)) if path.suffix == ".ipynb" else {}
        page = site / path.parent.relative_to(root) / front.get("output-file", f"{path.stem}.html")
        if not page.exists():
            wrong.append(f"{path.relative_to(root)}: {page.relative_to(root)} was not rendered")
    return wrong + check_hosts(site)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument(
        "--only", nargs="*", default=[], help="check the cells of these notebooks alone (paths from the root)"
    )
    parser.add_argument(
        "--rendered", action="store_true", help="check only what quarto render wrote: every page, no other host"
    )
    args = parser.parse_args()
    root = args.root.resolve()
    found = check_rendered(root) if args.rendered else check(root, only=args.only)
    print("\n".join(found) if found else "the site's sources are sound")
    sys.exit(bool(found))
