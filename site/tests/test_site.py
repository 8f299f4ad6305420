"""The site's sources: sound as they are, and the check that says so finds what is broken on purpose."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import build_readme
import check_site
import preview
from pages import fold

ROOT = Path(__file__).parents[2]
FILTER = [sys.executable, str(ROOT / "site/pages.py")]


SKIP = re.search(r"^skip_procs = .*$", (ROOT / "settings.ini").read_text(), re.MULTILINE)[0]

CONFIG = """
project: {type: website, output-dir: _site, render: [index.qmd, "nbs/*.ipynb", "nbs/**/*.ipynb", "!nbs/index.ipynb"]}
execute: {enabled: false}
ipynb-filters: [nbdev_filter]
format: {html: {theme: cosmo, toc: true, html-math-method: mathml}}
website:
  title: small
  sidebar: {contents: [index.qmd, {section: All, contents: [nbs/00_core.ipynb, nbs/tables/main.ipynb]}]}
"""
SETTINGS = f"""[DEFAULT]
repo = small
lib_name = small
lib_path = small
nbs_path = nbs
recursive = True
{SKIP}
doc_host = https://small.example
doc_baseurl = /small/nbs
"""
DOUBLE = '#| export\ndef double(\n    x: float,  # any number\n) -> float:  # 2x\n    "Twice `x`."\n    return 2 * x'
CORE = [
    ("raw", "---\ntitle: Core\ndescription: One function\noutput-file: core.html\n---"),
    ("code", "#| default_exp core"),
    (
        "markdown",
        "Doubling is $$ y = 2x $$ {#eq-double}\n\nand @eq-double is what `small.core.double` computes: "
        "[a table](tables/main.ipynb).",
    ),
    ("code", DOUBLE),
    ("code", "#| hide\nimport nbdev; nbdev.nbdev_export()"),
]
TABLE = [
    ("raw", "---\ntitle: Table\ndescription: One table\noutput-file: main.html\n---"),
    (
        "code",
        '#| label: tbl-main\n#| tbl-cap: "Doubles"\n#| echo: false\nMarkdown(table)',
        "| x | 2x |\n|---|---|\n| 1 | 2 |",
    ),
    ("markdown", "@tbl-main, or `@tbl-nothing` when quoted, and [the function](../core.html)."),
]
INDEX = [
    ("raw", "---\ntitle: small\ndescription: A small project\n---"),
    (
        "markdown",
        "It doubles. See [core](00_core.ipynb), the [licence](../LICENSE) and [the web](https://small.example).",
    ),
    ("code", "#| hide\nimport small"),
    ("code", "#| echo: true\nprint(2 * 2)", None, "4\n"),
]


def write_notebook(path: Path, cells: list[tuple]) -> None:
    "Cells are (kind, source), (kind, source, markdown output) or (kind, source, None, printed output)."
    made = []
    for n, (kind, source, *out) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"cell{n}", "metadata": {}, "source": source.splitlines(True)}
        outputs = [
            {"output_type": "display_data", "data": {"text/markdown": text.splitlines(True)}, "metadata": {}}
            for text in out[:1]
            if text
        ]
        outputs += [{"output_type": "stream", "name": "stdout", "text": text.splitlines(True)} for text in out[1:]]
        if kind == "code":
            cell |= {"execution_count": None, "outputs": outputs}
        made.append(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in [
        ("_quarto.yml", CONFIG),
        ("settings.ini", SETTINGS),
        ("LICENSE", "free"),
        ("index.qmd", "{{< include README.md >}}\n"),
        ("small/__init__.py", ""),
        ("small/core.py", "def double(x): return 2 * x\n"),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, cells in [("00_core", CORE), ("tables/main", TABLE), ("index", INDEX)]:
        write_notebook(tmp_path / f"nbs/{name}.ipynb", cells)
    (tmp_path / "README.md").write_text(build_readme.readme(tmp_path / "nbs/index.ipynb"))
    return tmp_path


def replace_text(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def add_cells(path: Path, cells: list[tuple], *more: tuple) -> None:
    write_notebook(path, [*cells, *more])


def test_a_sound_site_passes(site):
    assert check_site.check(site) == []


BREAKS = {
    "linked but missing": (
        lambda s: replace_text(s / "_quarto.yml", "nbs/tables/main.ipynb]", "nbs/tables/main.ipynb, nbs/none.ipynb]"),
        "nbs/none.ipynb is linked but does not exist",
    ),
    "not in the sidebar": (
        lambda s: replace_text(s / "_quarto.yml", ", nbs/tables/main.ipynb]", "]"),
        "published but not in the sidebar",
    ),
    "empty glob": (
        lambda s: replace_text(s / "_quarto.yml", '[index.qmd, "nbs', '[index.qmd, "docs/*.qmd", "nbs'),
        "nothing matches docs/*.qmd",
    ),
    "unknown key": (
        lambda s: replace_text(s / "_quarto.yml", "toc: true", "tok: true"),
        "unknown key format.html.tok",
    ),
    "yaml": (lambda s: replace_text(s / "_quarto.yml", "toc: true", "toc: [true"), "_quarto.yml: "),
    "key twice": (
        lambda s: replace_text(s / "_quarto.yml", "toc: true", "toc: true, toc: false"),
        "_quarto.yml: toc is given twice",
    ),
    "no theme": (
        lambda s: replace_text(s / "_quarto.yml", "theme: cosmo", "theme: [cosmo, none.scss]"),
        "the file none.scss of theme does not exist",
    ),
    "front matter key twice": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "title: Table", "title: Table\\ntitle: Main"),
        "nbs/tables/main.ipynb: cell 0: front matter: title is given twice",
    ),
    "front matter key twice, deeper": (
        lambda s: (s / "index.qmd").write_text("---\nformat: {html: {toc: true, toc: true}}\n---\n"),
        "index.qmd: cell 0: front matter: toc is given twice",
    ),
    "front matter is no mapping": (
        lambda s: (s / "index.qmd").write_text("---\ntitle\n---\n"),
        "index.qmd: cell 0: front matter: 'title' is not of the form key: value",
    ),
    "HTML output": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "text/markdown", "text/html"),
        "main.ipynb: cell 1: an output of the type text/html, for which Quarto makes the page load scripts",
    ),
    "widget": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "text/markdown", "application/vnd.jupyter.widget-view"),
        "main.ipynb: cell 1: an output of the type application/vnd.jupyter.widget-view",
    ),
    "picture of another host": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "| 1 |", "| ![](https://other.example/a.png) |"),
        "cell 1: https://other.example/a.png is loaded from another host",
    ),
    "script of another host": (
        lambda s: add_cells(s / "nbs/00_core.ipynb", CORE, ("markdown", "<script src='//other.example/a.js'>")),
        "cell 5: //other.example/a.js is loaded from another host",
    ),
    "favicon": (
        lambda s: replace_text(s / "_quarto.yml", "title: small", "title: small\n  favicon: nbs/images/none.svg"),
        "the favicon nbs/images/none.svg does not exist",
    ),
    "social card": (
        lambda s: replace_text(s / "_quarto.yml", "title: small", "title: small\n  image: nbs/images/none.png"),
        "the image nbs/images/none.png does not exist",
    ),
    "filter of pandoc": (
        lambda s: replace_text(s / "_quarto.yml", "execute:", "filters: [none.lua]\nexecute:"),
        "the file none.lua of filters does not exist",
    ),
    "filter": (
        lambda s: replace_text(s / "_quarto.yml", "[nbdev_filter]", "[no_such_filter]"),
        "no_such_filter is not on PATH",
    ),
    "no title": (lambda s: add_cells(s / "nbs/tables/main.ipynb", TABLE[1:]), "no title in the front matter"),
    "same page twice": (lambda s: add_cells(s / "nbs/00_other.ipynb", CORE), "output-file core.html is also that of"),
    "wrong page for the API": (
        lambda s: replace_text(s / "nbs/00_core.ipynb", "core.html", "kernel.html"),
        "links into the API lead to core.html",
    ),
    "no label": (
        lambda s: add_cells(s / "nbs/00_core.ipynb", CORE, ("markdown", "As [-@fig-none] shows.")),
        "cell 5: @fig-none has no label",
    ),
    "label of another page": (
        lambda s: add_cells(s / "nbs/00_core.ipynb", CORE, ("markdown", "See @tbl-main.")),
        "@tbl-main has no label in this",
    ),
    "label twice": (
        lambda s: add_cells(s / "nbs/tables/main.ipynb", TABLE, TABLE[1]),
        "label tbl-main is given 2 times",
    ),
    "no caption": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "tbl-cap", "fig-cap"),
        "tbl-main has no tbl-cap",
    ),
    "no output": (
        lambda s: add_cells(s / "nbs/tables/main.ipynb", [TABLE[0], TABLE[1][:2]]),
        "tbl-main has no stored output",
    ),
    "unnumbered sections": (
        lambda s: add_cells(s / "nbs/00_core.ipynb", CORE, ("markdown", "## A {#sec-a}\n\nSee @sec-a.")),
        "needs number-sections",
    ),
    "embedding": (
        lambda s: (s / "index.qmd").write_text("{{< embed nbs/tables/main.ipynb#tbl-none >}}"),
        "nbs/tables/main.ipynb has no cell tbl-none",
    ),
    "inclusion": (
        lambda s: (s / "index.qmd").write_text("{{< include OTHER.md >}}"),
        "include OTHER.md does not exist",
    ),
    "link": (
        lambda s: replace_text(s / "nbs/00_core.ipynb", "tables/main.ipynb", "tables/other.ipynb"),
        "cell 2: the link to tables/other.ipynb",
    ),
    "link to a page": (
        lambda s: replace_text(s / "nbs/tables/main.ipynb", "../core.html", "core.html"),
        "the link to core.html leads nowhere",
    ),
    "API name": (
        lambda s: replace_text(s / "nbs/00_core.ipynb", "small.core.double", "small.core.triple"),
        "`small.core.triple` does not exist",
    ),
    "no docstring": (
        lambda s: add_cells(s / "nbs/00_core.ipynb", CORE, ("code", "#| export\ndef half(x): return x / 2")),
        "half has no docstring",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found(site, name):
    spoil, message = BREAKS[name]
    spoil(site)
    assert any(message in line for line in check_site.check(site, with_filter=False))


FILTER_BREAKS = {
    "stray directive": (("code", "y = 1\n#| export"), "directive left over: #| export"),
    "misspelt option": (("code", "#| ehco: false\ny = 1"), "ehco: False is no option"),
    "option twice": (("code", "#| echo: true\n#| echo: true\ny = 1"), "echo is given twice"),
    "neither true nor false": (("code", "#| echo: yes\ny = 1"), "echo is 'yes', but has to be bool or fenced"),
    "true for a text": (("code", "#| label: true\ny = 1"), "label is True, but has to be str"),
    "another word": (("code", "#| code-fold: hide\ny = 1"), "code-fold is 'hide', but has to be bool or show"),
    "no YAML": (("code", "#| fig-cap: one: two\ny = 1"), "mapping values are not allowed here"),
    "option below the code": (("code", "y = 1\n#| echo: false"), "directive left over: #| echo: false"),
    "hidden export": (
        ("code", "#| hide\n#| export\ndef half(x):\n    'Half.'\n    return x / 2"),
        "half is exported but its documentation is not shown",
    ),
    "imports and code": (("code", "import math\ny = math.pi"), "a cell mixes imports with other code"),
    "failing export": (("code", "#| export\nlimit = undefined_name"), "the filter fails"),
}


@pytest.mark.parametrize("name", FILTER_BREAKS)
def test_what_the_filter_trips_over_is_found(site, name):
    cell, message = FILTER_BREAKS[name]
    add_cells(site / "nbs/00_core.ipynb", CORE, cell)
    assert any(message in line for line in check_site.check(site, only=["nbs/00_core.ipynb"]))


@pytest.mark.parametrize("name", ["failing export", next(iter(FILTER_BREAKS))])
def test_the_preview_refuses_what_the_check_refuses(name, site, monkeypatch):
    "The filter is left out but where it fails itself: each notebook is its own filtered form."
    cell, message = FILTER_BREAKS[name]
    failing = name == "failing export"
    done = lambda root, path, _: type("Done", (), {"returncode": failing, "stderr": "", "stdout": path.read_text()})
    monkeypatch.setattr(preview, "run_filter", done)
    write_notebook(site / "nbs/00_core.ipynb", [CORE[0], cell])
    with pytest.raises(SystemExit, match=re.escape(re.sub(r"cell \d+", "cell 1", message))):
        preview.build(site, site / "_preview")


@pytest.mark.parametrize("name", ["yaml", "key twice", "front matter key twice"])
def test_the_preview_refuses_wrong_yaml(name, site):
    spoil, message = BREAKS[name]
    spoil(site)
    with pytest.raises((SystemExit, ValueError), match=message):
        preview.build(site, site / "_preview")


def test_an_exported_cell_folds_as_it_says(site):
    "The filter's own folding would be a second one: `#| exports` cells say themselves whether they fold."
    options = '#| exports\n#| code-fold: true\n#| code-summary: "Halves"\n'
    add_cells(site / "nbs/00_core.ipynb", CORE, ("code", options + DOUBLE[10:].replace("double", "half")))
    assert check_site.check(site, only=["nbs/00_core.ipynb"]) == []
    replace_text(site / "settings.ini", SKIP, "skip_procs = FrontmatterProc")
    assert any("code-fold is given twice" in line for line in check_site.check(site, only=["nbs/00_core.ipynb"]))


@pytest.mark.parametrize(
    "text, value",
    [
        ("a: yes", "yes"),
        ("a: true", True),
        ("a: 12:30", "12:30"),
        ("a: 2026-01-02", "2026-01-02"),
        ("a: 1", 1),
        ("a: 1.5", 1.5),
        ("a:", None),
        ("a: '1'", "1"),
        ("a: [x, 2]", ["x", 2]),
    ],
)
def test_yaml_is_read_as_quarto_reads_it(text, value):
    found = check_site.read_yaml(text)["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, address",
    [
        ('<script src="https://a.example/x.js"></script>', "https://a.example/x.js"),
        ("<script\n  defer\n  src=https://a.example/x.js></script>", "https://a.example/x.js"),
        ("<link rel='stylesheet' href='//a.example/x.css'>", "//a.example/x.css"),
        ('<link href="https://a.example/x.css" rel="stylesheet">', "https://a.example/x.css"),
        ('<img alt="a" src="http://a.example/x.png">', "http://a.example/x.png"),
        ('@import"https://a.example/css?family=A:wght@300;400"', "https://a.example/css?family=A:wght@300;400"),
        ("@import url(https://a.example/x.css);", "https://a.example/x.css"),
        ("@font-face { src: url('https://a.example/x.woff2') }", "https://a.example/x.woff2"),
    ],
)
def test_what_is_loaded_from_another_host_is_seen(text, address):
    assert check_site.loaded_from_elsewhere(text) == [address]


@pytest.mark.parametrize(
    "text",
    [
        '<a class="x" href="https://a.example/x.html">there</a>',
        '<img src="images/x.png" alt="from https://a.example/">',
        '<link rel="canonical" href="https://a.example/">',
        '&lt;script src="https://a.example/x.js"&gt;',
        """url("data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>")""",
        "see https://a.example/x.js",
    ],
)
def test_what_is_only_named_is_not_loaded(text):
    assert check_site.loaded_from_elsewhere(text) == []


def test_api_links_must_lead_to_an_anchor():
    api, made = (
        "https://small.example/small/nbs/",
        {"cells": [{"cell_type": "markdown", "source": "[x](https://small.example/small/nbs/core.html#triple)"}]},
    )
    done = type("Done", (), {"returncode": 0, "stderr": "", "stdout": json.dumps(made)})
    assert check_site.check_filtered(Path("a.ipynb"), [], done, api, {"core.html": {"double"}}) == [
        "a.ipynb: filtered cell 0: the API link core.html#triple leads nowhere"
    ]
    assert check_site.check_filtered(Path("a.ipynb"), [], done, api, {"core.html": {"triple"}}) == []


def test_a_missing_page_of_the_rendered_site_is_found(site):
    for page in ["index.html", "nbs/core.html"]:
        (site / "_site" / page).parent.mkdir(parents=True, exist_ok=True)
        (site / "_site" / page).touch()
    assert check_site.check_rendered(site) == ["nbs/tables/main.ipynb: _site/nbs/tables/main.html was not rendered"]


def test_a_rendered_page_that_loads_from_another_host_is_found(site):
    for page in ["index.html", "nbs/core.html", "nbs/tables/main.html", "site_libs/a.css"]:
        (site / "_site" / page).parent.mkdir(parents=True, exist_ok=True)
        (site / "_site" / page).touch()
    assert check_site.check_rendered(site) == []
    (site / "_site/site_libs/a.css").write_text('@import"https://a.example/a.css";body{}')
    assert check_site.check_rendered(site) == ["site_libs/a.css: https://a.example/a.css is loaded from another host"]


@pytest.mark.parametrize(
    "text, kept",
    [
        ("0.03 [0.02, 0.04]", "0.03 [0.02,~0.04]"),
        ("0.3 ± 0.1 at n = 6", "0.3~±~0.1 at n~=~6"),
        ("0.1 to 0.4", "0.1~to~0.4"),
        ("[−0.1, +0.2], up to 6 to us", "[−0.1,~+0.2], up to 6 to us"),
        ("[two, three] of 3, 4", "[two, three] of 3, 4"),
        ("`[0.1, 0.2]`", "<code>[0.1, 0.2]</code>"),
    ],
)
@pytest.mark.skipif(shutil.which("pandoc") is None, reason="pandoc is not on PATH")
def test_an_interval_stays_in_one_line(text, kept):
    assert preview.pandoc([text])[0].strip() == f"<p>{kept}</p>".replace("~", "\u00a0")


SMALL = re.compile(r"(?:fontsize|labelsize)=[0-7](?![\d])")


def test_letters_of_figures_have_eight_points_or_more():
    "And no figure is wider than the page (tests/test_pages.py): 8 points are 10 pixels there."
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        assert not SMALL.findall("".join(cell["source"] for cell in check_site.read_cells(path))), path.name


def test_git_ignores_what_quarto_would_have_it_ignore():
    "In its words: it adds to .gitignore each line that it does not find."
    assert {"/.quarto/", "**/*.quarto_ipynb"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_the_repository_is_sound():
    "All but the passage through the filter, which takes some seconds a notebook and is a step of its own in .ci/run."
    wrong = check_site.check(ROOT, with_filter=False)
    assert not wrong, "\n".join(wrong)


# ---- README.md


def test_readme_holds_what_the_notebook_says(site):
    text = (site / "README.md").read_text()
    assert text.startswith("<!-- Generated from nbs/index.ipynb")
    assert "# small\n\nA small project\n" in text
    assert "[core](nbs/00_core.ipynb), the [licence](LICENSE) and [the web](https://small.example)" in text
    assert "```python\nprint(2 * 2)\n```\n\n```text\n4\n```" in text
    assert "import small" not in text


def test_readme_shows_tables_and_leaves_pictures_out(tmp_path):
    write_notebook(tmp_path / "index.ipynb", [("code", "#| hide_input\ntable", "| a |\n|---|\n| 1 |")])
    book = json.loads((tmp_path / "index.ipynb").read_text())
    book["cells"][0]["outputs"].append(
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}, "metadata": {}}
    )
    (tmp_path / "index.ipynb").write_text(json.dumps(book))
    text = build_readme.readme(tmp_path / "index.ipynb")
    assert "\n| a |\n|---|\n| 1 |\n" in text and "Figure" not in text and "AAAA" not in text


@pytest.mark.parametrize(
    "text, said", [("{{< embed tables/main.ipynb#tbl-main >}}", "shortcode"), (r"$\operatorname{tr}S$", "mathrm")]
)
def test_readme_refuses_what_it_cannot_show(tmp_path, text, said):
    write_notebook(tmp_path / "index.ipynb", [("markdown", text)])
    with pytest.raises(SystemExit, match=said):
        build_readme.readme(tmp_path / "index.ipynb")


def test_readme_links_of_a_computed_text_are_seen_from_above(tmp_path):
    write_notebook(
        tmp_path / "index.ipynb", [("code", "#| echo: false\nMarkdown(text)", "see [the table](tables/main.ipynb)")]
    )
    assert "see [the table](nbs/tables/main.ipynb)" in build_readme.readme(tmp_path / "index.ipynb")


def test_readme_of_the_repository_is_up_to_date():
    assert (ROOT / "README.md").read_text() == build_readme.readme(ROOT / "nbs/index.ipynb")


def test_pages_filtered_in_one_go_are_those_of_the_filter_alone(site):
    name = site / "nbs/00_core.ipynb"
    add_cells(name, CORE, ("code", DOUBLE))

    def cells(command, folder=site / "nbs"):
        done = subprocess.run(command, cwd=folder, input=name.read_text(), capture_output=True, text=True, check=True)
        return [cell | {"id": ""} for cell in json.loads(done.stdout)["cells"]] if done.stdout else None

    stored = lambda: set((site / "_filtered").glob("*.json"))
    subprocess.run([*FILTER, "--all"], cwd=site, check=True)
    first = stored()
    assert len(first) == len(list((site / "nbs").rglob("[!_]*.ipynb")))
    assert cells(FILTER) == cells(["nbdev_filter"]) and stored() == first
    (site / "settings.ini").write_text((site / "settings.ini").read_text() + "\n# changed\n")
    cells(FILTER)
    assert len(stored() - first) == 1, "what was kept under other settings was taken"
    subprocess.run([*FILTER, "--all"], cwd=site, check=True)
    assert len(stored()) == len(first) and not stored() & first


@pytest.mark.parametrize(
    "source, exported, options",
    [
        ("import torch\n", False, ['code-summary: "Imports"', "code-fold: true"]),
        ("assert 1\nassert 2\n", False, ['code-summary: "Check"', "code-fold: true"]),
        ("def f(x): return x\n", True, ['code-summary: "Source: f"', "code-fold: true"]),
        ("#| code-fold: false\nimport torch\n", False, ['code-summary: "Imports"', "code-fold: false"]),
        ("a, _ = b = 1, 2\n", False, ['code-summary: "Code: a, b"']),
        ("print(1)\n", False, ['code-summary: "Code"']),
        (
            "#| fig-cap: x\na = 1\nb = 2\nc = 3\nd = 4\ne = 5\n",
            False,
            ['code-summary: "Figure"', "code-fold: true", "fig-cap: x"],
        ),
        ("#| fig-cap: x\na = 1\n", False, ['code-summary: "Code: a"', "fig-cap: x"]),
        ("#| echo: false\nimport torch\n", False, ["echo: false"]),
        ("%matplotlib inline\n", False, []),
    ],
)
def test_a_fold_says_what_is_in_it(source, exported, options):
    cell = SimpleNamespace(cell_type="code", source=source, directives_={"exports": []} if exported else None)
    fold(cell)
    lines = cell.source.splitlines()
    assert [line for line in lines if line.startswith("#|")] == [f"#| {o}" for o in options]
    assert [x for x in lines if x[:2] != "#|"] == [x for x in source.splitlines() if x[:2] != "#|"]


def test_text_and_empty_cells_are_not_folded():
    for kind, source in (("markdown", "text"), ("code", "  \n")):
        cell = SimpleNamespace(cell_type=kind, source=source, directives_={})
        fold(cell)
        assert cell.source == source
