"""The site's sources: sound as they are, and the check that says so finds what is broken on purpose."""

import configparser
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
from pages import INDEX as API_PAGE, Addresses, adapt, fold, relink

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


QUARTO, ROOM, PAGE = "_quarto.yml", "nbs/00_core.ipynb", "nbs/tables/main.ipynb"
LINKED = "nbs/tables/main.ipynb]"
SPOILED = {  # file, what stands there, what stands there instead, message
    "linked but missing": (QUARTO, LINKED, "nbs/none.ipynb]", "nbs/none.ipynb is linked but does not exist"),
    "not in the sidebar": (QUARTO, f", {LINKED}", "]", "published but not in the sidebar"),
    "empty glob": (QUARTO, '[index.qmd, "nbs', '[index.qmd, "docs/*.qmd", "nbs', "nothing matches docs/*.qmd"),
    "yaml": (QUARTO, "toc: true", "toc: [true", "_quarto.yml: "),
    "HTML output": (PAGE, "text/markdown", "text/html", "main.ipynb: cell 1: an output of the type text/html"),
    "filter": (QUARTO, "[nbdev_filter]", "[no_such_filter]", "no_such_filter is not on PATH"),
    "wrong page for the API": (ROOM, "core.html", "kernel.html", "links into the API lead to core.html"),
    "no caption": (PAGE, "tbl-cap", "fig-cap", "tbl-main has no tbl-cap"),
    "link": (ROOM, "tables/main.ipynb", "tables/other.ipynb", "cell 2: the link to tables/other.ipynb"),
    "link to a page": (PAGE, "../core.html", "core.html", "the link to core.html leads nowhere"),
    "API name": (ROOM, "small.core.double", "small.core.triple", "`small.core.triple` does not exist"),
}
REBUILT = {  # notebook, its cells, message
    "no title": (PAGE, TABLE[1:], "no title in the front matter"),
    "same page twice": ("nbs/00_other.ipynb", CORE, "output-file core.html is also that of"),
    "no label": (ROOM, [*CORE, ("markdown", "As [-@fig-none] shows.")], "cell 5: @fig-none has no label"),
    "label of another page": (ROOM, [*CORE, ("markdown", "See @tbl-main.")], "@tbl-main has no label in this"),
    "label twice": (PAGE, [*TABLE, TABLE[1]], "label tbl-main is given 2 times"),
    "no output": (PAGE, [TABLE[0], TABLE[1][:2]], "tbl-main has no stored output"),
    "no docstring": (ROOM, [*CORE, ("code", "#| export\ndef half(x): return x / 2")], "half has no docstring"),
}
FRONT = {  # index.qmd, message
    "no mapping": ("---\ntitle\n---\n", "front matter: 'title' is not of the form key: value"),
}


def spoil(site, name):
    "Break the site in one place and return the message that has to name it."
    if name in SPOILED:
        file, old, new, message = SPOILED[name]
        replace_text(site / file, old, new)
    elif name in REBUILT:
        file, cells, message = REBUILT[name]
        write_notebook(site / file, cells)
    else:
        text, message = FRONT[name]
        (site / "index.qmd").write_text(text)
    return message


@pytest.mark.parametrize("name", [*SPOILED, *REBUILT, *FRONT])
def test_what_is_broken_is_found(site, name):
    message = spoil(site, name)
    assert any(message in line for line in check_site.check(site, with_filter=False))


FILTER_BREAKS = {
    "misspelt option": (("code", "#| ehco: false\ny = 1"), "ehco: False is no option"),
    "option below the code": (("code", "y = 1\n#| echo: false"), "directive left over: #| echo: false"),
    "hidden export": (
        ("code", "#| hide\n#| export\ndef half(x):\n    'Half.'\n    return x / 2"),
        "half is exported but its documentation is not shown",
    ),
    "failing export": (("code", "#| export\nlimit = undefined_name"), "the filter fails"),
}


@pytest.mark.parametrize("name", FILTER_BREAKS)
def test_what_the_filter_trips_over_is_found(site, name):
    cell, message = FILTER_BREAKS[name]
    add_cells(site / "nbs/00_core.ipynb", CORE, cell)
    assert any(message in line for line in check_site.check(site, only=["nbs/00_core.ipynb"]))


LOADED = [
    '<script src="https://a.example/x"></script>',
    "<script\n  defer\n  src=https://a.example/x></script>",
    "<link rel='stylesheet' href='https://a.example/x'>",
    '<link href="https://a.example/x" rel="stylesheet">',
    '@import"https://a.example/x";',
    "@font-face { src: url('https://a.example/x') }",
]
NAMED = [
    '<a class="x" href="https://a.example/x.html">there</a>',
    '<img src="images/x.png" alt="from https://a.example/">',
    '<link rel="canonical" href="https://a.example/">',
    '&lt;script src="https://a.example/x.js"&gt;',
    """url("data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>")""",
]


@pytest.mark.parametrize("text", [*LOADED, *NAMED])
def test_what_is_loaded_from_another_host_is_seen_and_a_link_is_not(text):
    assert check_site.loaded_from_elsewhere(text) == ["https://a.example/x"] * (text in LOADED)


def test_api_links_must_lead_to_an_anchor():
    made = {"cells": [{"cell_type": "markdown", "source": "[`x`](../core.html#triple)"}]}
    done = type("Done", (), {"returncode": 0, "stderr": "", "stdout": json.dumps(made)})
    found = lambda anchors: check_site.check_filtered(Path("nbs/tables/a.ipynb"), [], done, {"nbs/core.html": anchors})
    assert found({"triple"}) == []
    assert found({"double"}) == ["nbs/tables/a.ipynb: filtered cell 0: the API link nbs/core.html#triple leads nowhere"]


def test_what_is_wrong_about_a_rendered_site_is_found(site):
    for page in ["index.html", "nbs/core.html", "site_libs/a.css"]:
        (site / "_site" / page).parent.mkdir(parents=True, exist_ok=True)
        (site / "_site" / page).touch()
    (site / "_site/site_libs/a.css").write_text('@import"https://a.example/a.css";body{}')
    assert check_site.check_rendered(site) == [
        "nbs/tables/main.ipynb: _site/nbs/tables/main.html was not rendered",
        "site_libs/a.css: https://a.example/a.css is loaded from another host",
    ]


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


@pytest.mark.skipif(shutil.which("pandoc") is None, reason="pandoc is not on PATH")
def test_a_formula_has_no_tex_beside_it_and_no_gaps():
    text = r"$1/\operatorname{PR}$ and $\operatorname{tr} S$ and $(a)$" + "\n\n" + r"$$x\qquad(3)$$"
    made = preview.pandoc([text])[0]
    assert "annotation" not in made and "operatorname" not in made and "<mo>PR</mo>" not in made
    assert '<span class="number">(3)</span>' in made and 'stretchy="false"' in made
    made = preview.pandoc([r"$\left(\frac{a}{b} f(c) [d]\right) \left\|x\right\|$"])[0]
    taller = re.findall(r'stretchy="true"[^>]*>(.)<', made)
    assert taller == ["(", ")", "‖", "‖"] and made.count("(") == made.count(")") == 2
    assert 'stretchy="true"' not in preview.pandoc([r"$\lVert x_j\rVert$"])[0]


# ---- links and addresses


def test_links_lead_to_pages_or_to_the_repository():
    pages = {"nbs/02_isoscore.ipynb": "nbs/isoscore.html", API_PAGE: "nbs/guides/reference.html"}
    to = Addresses(pages, "https://a.example/x/nbs/", "https://git.example/blob/main", "")
    text = lambda given, of=to: relink(given, "nbs/tables", of)
    made_by_nbdev = "[`{}`](https://a.example/x/nbs/{}.html#{})".format
    assert text(made_by_nbdev("isoscore", "isoscore", "isoscore")) == "[`isoscore`](../isoscore.html#isoscore)"
    entry = "[`IsoScore`](../guides/reference.ipynb#isoreg.metric.IsoScore)"
    assert text(made_by_nbdev("IsoScore", "metric", "isoscore")) == entry
    assert text("[a](../02_isoscore.ipynb#x)") == "[a](../02_isoscore.ipynb#x)"
    assert text("[a](../04_metric.ipynb)") == "[a](https://git.example/blob/main/nbs/04_metric.ipynb)"
    assert text("[a](../04_metric.ipynb)", to._replace(source="")) == "a"
    assert text("[a](../04_metric.ipynb#isoreg.metric.IsoScore)") == entry.replace("`IsoScore`", "a")


def test_a_page_of_results_shows_its_code_at_the_end_and_a_tutorial_opens_on_colab():
    before = [{"cell_type": "raw", "source": "---\noutput-file: score.html\n---"}]
    before.append({"cell_type": "code", "source": "#| label: tbl-x\nx = 1"})
    cells = [dict(cell) for cell in before]
    adapt(cells, before, "nbs/tables", Addresses({}, "-", "", "https://colab.example"))
    assert cells[1]["source"][0] == "#| echo: false\n" and "```python\nx = 1\n```" in "".join(cells[2]["source"])
    adapt(cells, before, "nbs/tutorials", Addresses({}, "-", "", "https://colab.example"))
    assert cells[3]["source"] == ["[Open in Colab](https://colab.example/nbs/tutorials/score.ipynb)"]


def test_addresses_stand_in_settings_ini():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini")
    s, quarto = settings["DEFAULT"], (ROOT / "_quarto.yml").read_text()
    assert all(not address or address not in quarto for address in (s["git_url"], s["doc_host"]))
    for path in [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("*.md"), *ROOT.glob("*.cff"), ROOT / "pyproject.toml"]:
        found = re.findall(r"https://github\.com/[\w.-]+/isoreg\b", path.read_text(encoding="utf-8"))
        assert set(found) <= {s["git_url"]}, path


RETIRED = {  # what the pages say, and what they do not say
    "baseline": r"plain fine-tuning|usual p = 0|standard dropout|\b[Tt]he base (?:and|has|is)\b",
    "constant rate": r"constant p = mean|p = 0\.05 everywhere|mean rate everywhere|as little dropout everywhere",
    "type only": r"by type only",
    "no dropout": r"without any dropout|\(p = 0\)",
    "predicts? a single class": r"answers? (?:with )?one class|answers every question|gives one answer"
    r"|collapsed runs?\b|one class only",
    "inconclusive": "no difference shown|cannot tell|can(?:not| not) be told(?! apart)",
    "exploratory round": r"\b(?:first|second|third) round\b",
    "all-MiniLM-L6-v2": r"\bstand-in\b(?!, not a model of the papers)|(?<!all-)\bMiniLM\b|[|:;f] minilm-l6",
    "method": r"\barms? (?:differ|of|on|share)\b",
    "values of λ": r"\bstrengths\b(?! = |\.|\[)",
    "atomic": "Files that are whole|Grids that survive|What the reference says",
}


def test_one_thing_has_one_name():
    "On all pages but the plans, as registered; in the library and the grids. Stored results keep their names."
    said, wrong = "", []
    for path in [*(ROOT / "isoreg").rglob("*.py"), *(ROOT / "nbs/grids").glob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path.name}: {hit}" for retired in RETIRED.values() for hit in re.findall(retired, text)]
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if path.stem == "plan" or path.parent.name == "runs":
            continue
        for cell in check_site.read_cells(path):
            shown = [out.get("data", {}).get("text/markdown") or out.get("text", "") for out in cell.get("outputs", [])]
            code = cell["cell_type"] == "code"
            shown += re.findall(r'"([^"\n]+)"', cell["source"]) if code else [cell["source"]]  # words of figures
            text = re.sub(r"\]\([^)]*\)", "]", check_site.prose("\n".join(map(check_site.text_of, shown))))
            said += text
            wrong += [f"{path.name}: {hit}" for retired in RETIRED.values() for hit in re.findall(retired, text)]
    assert not wrong, "\n".join(wrong)
    assert all(re.search(name, said, re.I) for name in RETIRED)


SMALL = re.compile(r"(?:fontsize|labelsize)=[0-7](?![\d])")


def test_letters_of_figures_have_eight_points_or_more():
    "And no figure is wider than the page (tests/test_pages.py): 8 points are 10 pixels there."
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        assert not SMALL.findall("".join(cell["source"] for cell in check_site.read_cells(path))), path.name


# ---- README.md


def test_readme_holds_what_the_notebook_says(site):
    text = (site / "README.md").read_text()
    assert text.startswith("<!-- Generated from nbs/index.ipynb")
    assert "# small\n\nA small project\n" in text
    assert "[core](nbs/00_core.ipynb), the [licence](LICENSE) and [the web](https://small.example)" in text
    assert "```python\nprint(2 * 2)\n```\n\n```text\n4\n```" in text
    assert "import small" not in text


def test_pages_filtered_in_one_go_are_those_of_the_filter_alone(site):
    name = site / "nbs/00_core.ipynb"
    add_cells(name, CORE, ("code", DOUBLE))

    def cells(command, folder=site / "nbs"):
        done = subprocess.run(command, cwd=folder, input=name.read_text(), capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)["cells"]
        return [cell | {"id": "", "source": check_site.text_of(cell["source"])} for cell in found]

    stored = lambda: set((site / "_filtered").glob("*.json"))
    subprocess.run([*FILTER, "--all"], cwd=site, check=True)
    first = stored()
    assert len(first) == 2  # the published ones
    assert cells(FILTER) == cells(["nbdev_filter"]) and stored() == first
    (site / "settings.ini").write_text((site / "settings.ini").read_text() + "\n# changed\n")
    cells(FILTER)
    assert len(stored() - first) == 1, "what was kept under other settings was taken"
    subprocess.run([*FILTER, "--all"], cwd=site, check=True)
    assert len(stored()) == len(first) and not stored() & first


FOLDS = [  # source, exported, options
    ("import torch\n", False, ['code-summary: "Imports"', "code-fold: true"]),
    ("assert 1\nassert 2\n", False, ['code-summary: "Check"', "code-fold: true"]),
    ("def f(x): return x\n", True, ['code-summary: "Source: f"', "code-fold: true"]),
    ("#| code-fold: false\nimport torch\n", False, ['code-summary: "Imports"', "code-fold: false"]),
    ("a, _ = b = 1, 2\n", False, ['code-summary: "Code"']),
    ("#| fig-cap: x\n" + "a = 1\n" * 5, False, ['code-summary: "Code of the figure"', "code-fold: true", "fig-cap: x"]),
    ("#| echo: false\nimport torch\n", False, ["echo: false"]),
    ("%matplotlib inline\n", False, []),
]


@pytest.mark.parametrize("source, exported, options", FOLDS)
def test_a_fold_says_what_is_in_it(source, exported, options):
    cell = SimpleNamespace(cell_type="code", source=source, directives_={"exports": []} if exported else None)
    fold(cell)
    lines = cell.source.splitlines()
    assert [line for line in lines if line.startswith("#|")] == [f"#| {o}" for o in options]
    assert [x for x in lines if x[:2] != "#|"] == [x for x in source.splitlines() if x[:2] != "#|"]
