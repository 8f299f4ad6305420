"""A preview of the pages, without Quarto: each published notebook through the site's filter, nbconvert and pandoc, into
one folder.

    python site/preview.py _preview

It is not the site: Quarto's layout, search and navigation are missing. What is the same is what goes in (the filtered
notebooks, the captions, the cross-references, site/styles.css and so on) and how equations are made
(pandoc, MathML)."""

import argparse
import functools
import html
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import yaml
from nbconvert import HTMLExporter

sys.path.insert(0, str(Path(__file__).parent))
from check_site import (
    cell_options,
    check_filtered_cells,
    front_matter,
    hrefs,
    pre_render,
    published,
    read_cells,
    read_config,
    run_filter,
    unreadable,
)

CUT = "<!-- cut here -->"
INCLUDES = ("include-before-body", "include-after-body")
KINDS = {"fig": "Figure", "tbl": "Table", "eq": "Equation"}
PAGE = """<!doctype html>
<html lang="{lang}"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><meta name="description" content="{description}">
<meta property="og:image" content="{up}{card}"><link rel="icon" href="{icon}"><link rel="stylesheet" href="{up}site/styles.css">
<style>
:root {{ color-scheme: light dark; --paper: #fff; --ink: #212529; --edge: #ccc; --soft: #f4f4f4; --link: #2761a3 }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #222; --ink: #ddd; --edge: #555; --soft: #2c2c2c; --link: #7fb3f0 }} }}
body {{ margin: 0 auto; max-width: 56rem; padding: 1rem; font: 1rem/1.55 system-ui, sans-serif; background: var(--paper); color: var(--ink) }}
a {{ color: var(--link) }} nav {{ font-size: .85rem }} img {{ max-width: 100%; height: auto; background: #fff }}
pre {{ background: var(--soft); padding: .6rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap }} code, pre {{ overflow-wrap: anywhere }}
table {{ border-collapse: collapse; font-size: .9rem }} summary {{ cursor: pointer; opacity: .8 }} td p {{ margin: 0 }} td, th {{ border-bottom: 1px solid var(--edge); padding: .2rem .5rem; text-align: left }} .prompt {{ display: none }} figure {{ margin: 0 }}
.note {{ border: 1px solid var(--edge); padding: .3rem .6rem }}
</style></head><body>
{before}<p class="note">A preview without Quarto. <a href="{up}index.html">Start</a></p>
<details><summary>Pages</summary><nav>{nav}</nav></details>
<header><h1>{title}</h1><p>{subtitle}</p><p>{description}</p></header><main id="quarto-document-content">{body}</main>{after}</body></html>
"""  # noqa: E501


def numbered(cells: list[dict]) -> dict[str, str]:
    "Label to number, counted by kind down the page."
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            found += [label] if (label := cell_options(cell["source"]).get("label")) else []
        else:
            found += re.findall(r"\{#((?:fig|tbl|eq)-[\w:-]+)", cell["source"])
    kind = lambda label: label.split("-")[0]
    return {a: str(1 + sum(kind(b) == kind(a) for b in found[:i])) for i, a in enumerate(found) if kind(a) in KINDS}


def to_pandoc(text: str, numbers: dict[str, str]) -> str:
    "Quarto's references and numbered equations, in words that pandoc knows."
    text = re.sub(
        r"(\$\$(?:(?!\$\$).)*\$\$)\s*\{#(eq-[\w:-]+)\}",
        lambda m: f"::: {{#{m[2]} .equation}}\n{m[1]}\n\n[({numbers[m[2]]})]{{.number}}\n:::",
        text,
        flags=re.S,
    )
    caption = lambda m: f": **Table {numbers[m[2]]}.** [{m[1]}]{{#{m[2]}}}"
    text = re.sub(r"^: (.+?)\s*\{#(tbl-[\w:-]+)\}$", caption, text, flags=re.M)
    name = lambda m: f"[{KINDS[m[2]]} {numbers[m[1]]}](#{m[1]})" if m[1] in numbers else m[0]
    return re.sub(r"(?<![\w`\\/])@((fig|tbl|eq)-\w+(?:[:-]\w+)*)", name, text)


def pandoc(texts: list[str]) -> list[str]:
    filters = [f"--lua-filter={path}" for path in Path(__file__).parents[1].glob("site/_*.lua")]
    done = subprocess.run(
        ["pandoc", "-f", "markdown", "-t", "html5", "--mathml", "--wrap=none", *filters],
        input=f"\n\n{CUT}\n\n".join(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    return re.sub(r"<colgroup>.*?</colgroup>\s*", "", done.stdout, flags=re.S).split(
        CUT
    )  # as tbl-colwidths: false does


def folded(new: nbformat.NotebookNode, summary: str) -> list:
    "A cell as a folded source and its outputs."
    source = nbformat.v4.new_markdown_cell(
        f"<details><summary>{summary}</summary>\n\n```python\n{new.source}\n```\n\n</details>"
    )
    new.metadata["transient"] = {"remove_source": True}
    return [source, new]


def prepare(cells: list[dict], numbers: dict[str, str], fold: bool = False) -> list:
    "The cells as nbconvert needs them: options taken out, captions put in."
    ready = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            ready.append(nbformat.v4.new_markdown_cell(to_pandoc(cell["source"], numbers)))
        if cell["cell_type"] != "code" or (said := cell_options(cell["source"])).get("include") is False:
            continue
        source = re.sub(r"^#\|.*\n?", "", cell["source"], flags=re.M).strip("\n")
        label = said.get("label", "")
        new = nbformat.v4.new_code_cell(source, outputs=[] if said.get("output") is False else cell["outputs"])
        new.metadata["alt"] = said.get("fig-alt", "")
        if said.get("echo") is False:
            new.metadata["transient"] = {"remove_source": True}
        caption = said.get("fig-cap") or said.get("tbl-cap")
        if label and caption:
            ready.append(nbformat.v4.new_markdown_cell(f'<div id="{label}"></div>'))
        fold_this = said.get("code-fold", fold) is True
        hidden = said.get("echo") is False or not source
        ready += folded(new, said.get("code-summary", "Code")) if fold_this and not hidden else [new]
        if caption:
            head = f"**{KINDS.get(label.split('-')[0], 'Figure')} {numbers.get(label, '')}.** "
            ready.append(nbformat.v4.new_markdown_cell(f"::: {{.caption}}\n{head}{to_pandoc(caption, numbers)}\n:::"))
    return ready


def body(cells: list[dict], fold: bool = False) -> str:
    numbers = numbered(cells)
    notebook = nbformat.v4.new_notebook(cells=prepare(cells, numbers, fold))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                output.data["text/markdown"] = to_pandoc(output.data["text/markdown"], numbers)
    texts = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    texts += [
        o.data["text/markdown"]
        for c in notebook.cells
        for o in c.get("outputs", [])
        if "text/markdown" in o.get("data", {})
    ]
    made = dict(zip(texts, pandoc(texts)))
    return exporter(made).from_notebook_node(notebook)[0]


@functools.cache
def bare_exporter() -> HTMLExporter:
    "Return the exporter, which is slow to make."
    return HTMLExporter(template_name="basic")


def exporter(made: dict[str, str]) -> HTMLExporter:
    "Return the exporter with the HTML of each text."
    found = bare_exporter()
    found.register_filter("markdown2html", lambda context, text=None: made[context if text is None else text])
    found.filters["strip_files_prefix"] = lambda text: text
    return found


def links(text: str, pages: dict[str, str], folder: str) -> str:
    "Links to notebooks and to the site's address, made links between the pages."

    def local(m):
        target, _, anchor = m[1].partition("#")
        path = os.path.normpath(os.path.join(folder, target))
        there = pages.get(path)
        return (
            m[0] if there is None else f'href="{os.path.relpath(there, folder or ".")}{"#" + anchor if anchor else ""}"'
        )

    return re.sub(r'href="(?!https?:|mailto:|#|data:)([^"]+)"', local, text)


def heading(path: Path) -> str:
    "The first heading of a Markdown file."
    return (re.search(r"^# (.+)$", path.read_text(), re.M) or ["", path.stem])[1]


def passed(path: Path, name: Path, command: str) -> list:
    "The cells that the filter gives. `SystemExit` for what Quarto would refuse in them."
    done = run_filter(path.parents[len(name.parts) - 1], path, command)
    if done.returncode:
        raise SystemExit(f"{name}: the filter fails: {done.stderr[-500:]}")
    cells = nbformat.reads(done.stdout, as_version=4).cells  # text that the file holds as a list of lines becomes one
    if wrong := check_filtered_cells(cells):
        raise SystemExit("\n".join(f"{name}: {line}" for line in wrong))
    return cells


def build(root: Path, out: Path) -> list[Path]:
    "Write the preview of every published page, and the front page from README.md; the files."
    config = read_config(root)
    notebooks = [p for p in published(root, config["project"]["render"]) if p.suffix == ".ipynb"]
    cells_of = {p: read_cells(p) for p in notebooks}
    if wrong := unreadable(root, cells_of):
        raise SystemExit("\n".join(wrong))
    pre_render(root, config)
    with ThreadPoolExecutor(2) as pool:
        filtered = dict(
            zip(notebooks, pool.map(lambda p: passed(p, p.relative_to(root), config["ipynb-filters"][0]), notebooks))
        )
    fronts = {p: front_matter(cells) for p, cells in cells_of.items()}
    place = {p: (p.parent / fronts[p].get("output-file", f"{p.stem}.html")).relative_to(root) for p in notebooks}
    texts = [p.name for p in published(root, config["project"]["render"]) if p.suffix == ".md" or p.stem == "404"]
    pages = {str(p.relative_to(root)): str(place[p]) for p in notebooks} | {
        "index.qmd": "index.html",
        "README.md": "index.html",
    }
    pages |= {name: f"{Path(name).stem}.html" for name in texts}
    order = [h for h in hrefs(config["website"]["sidebar"]) if h in pages]
    names = {str(p.relative_to(root)): fronts[p].get("title", p.stem) for p in notebooks} | {
        name: heading(root / name) for name in texts
    }
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / "site").mkdir()
    shutil.copy(root / "site/styles.css", out / "site")
    icon = config["website"].get("favicon")
    for glob in [*config["project"].get("resources", []), *([icon] if icon else [])]:
        for path in root.glob(glob):
            (out / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, out / path.relative_to(root))
    options, website, written = config["format"]["html"], config["website"], []
    before, after = ((root / options[n]).read_text() if n in options else "" for n in INCLUDES)
    api = re.compile(r'href="https?://[^"/]+/\w+/(nbs/[\w/.-]+\.html)')

    def write(target: str, title: str, description: str, content: str, subtitle: str = ""):
        folder, up = os.path.dirname(target), "../" * target.count("/")
        here = lambda h: ' aria-current="page"' if pages[h] == target else ""
        link = lambda h: f'<a href="{up}{pages[h]}"{here(h)}>{html.escape(names.get(h, "isoreg"))}</a>'
        nav = " · ".join(map(link, order))
        content = api.sub(lambda m: f'href="{up}{m[1]}', links(content, pages, folder))
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        (out / target).write_text(
            PAGE.format(
                title=html.escape(title),
                subtitle=html.escape(subtitle),
                description=html.escape(description),
                up=up,
                nav=nav,
                body=content,
                lang=config.get("lang", "en"),
                before=before,
                after=after,
                card=website["image"].lstrip("/"),
                icon=up + icon if icon else "data:,",
            )
        )
        written.append(out / target)

    for path, cells in filtered.items():
        write(
            str(place[path]),
            fronts[path].get("title", path.stem),
            fronts[path].get("description", ""),
            body(cells, bool((fronts[path].get("format") or {}).get("html", {}).get("code-fold"))),
            fronts[path].get("subtitle", ""),
        )
    for name, target, title in [
        ("README.md", "index.html", "isoreg"),
        *((name, pages[name], names[name]) for name in texts),
    ]:
        text, said = (root / name).read_text(), website["description"]
        if front := re.match(r"---\n(.*?)\n---\n", text, re.S):
            text, said = text[front.end() :], yaml.safe_load(front[1]).get("description", said)
        write(target, title, said, pandoc([re.sub(r"^# .*$", "", text, count=1, flags=re.M)])[0])
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("_preview"))
    found = build(Path(__file__).parents[1], parser.parse_args().out)
    print(f"{len(found)} pages in {parser.parse_args().out}")
