"""Pages in a real browser: headless Chromium over the rendered site where Quarto is on PATH, over the preview
without it."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

import check_site
import preview

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium"),
    pytest.mark.skipif(
        not (os.environ.get("ISOREG_PAGES") or shutil.which("quarto") or shutil.which("pandoc")),
        reason="neither quarto nor pandoc is on PATH",
    ),
]


def _pages():
    config = check_site.read_config(ROOT)
    found = ["index.html"]
    for path in check_site.published(ROOT, config["project"]["render"]):
        if path.suffix == ".ipynb":
            front = check_site.front_matter(check_site.read_cells(path))
            found.append((path.parent / front["output-file"]).relative_to(ROOT).as_posix())
        elif path.suffix == ".md" or path.stem == "404":
            found.append(path.with_suffix(".html").name)
    return found


PAGES = _pages()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "The pages: what quarto renders, or the preview; or those of an earlier build that ISOREG_PAGES names."
    if os.environ.get("ISOREG_PAGES"):
        return Path(os.environ["ISOREG_PAGES"]).resolve()
    if shutil.which("quarto"):  # into the folder that _quarto.yml names: another one can be asked for from 1.5 on only
        subprocess.run(["quarto", "render"], cwd=ROOT, check=True, capture_output=True, timeout=1800)
        return ROOT / "_site"
    out = tmp_path_factory.mktemp("pages") / "site"
    preview.build(ROOT, out)
    return out


@pytest.fixture(scope="module")
def real(folder):
    "Whether these are Quarto's pages, not the preview."
    return bool(re.search(r'<meta name="generator" content="quarto', (folder / "index.html").read_text()))


@pytest.fixture(scope="module")
def address(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def translate_path(self, path):  # the page for lost addresses loads what it needs from the site's own place
            return super().translate_path(re.sub(r"^/isoreg/", "/", path))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as p:
        quiet = (
            "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
        )
        browser = p.chromium.launch(executable_path=CHROMIUM, args=quiet.split())
        yield browser
        browser.close()


def _listen(page, address):
    "The list that gets what the console says and which requests fail."
    said = []
    page.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on(
        "request",
        lambda r: said.append(f"another host: {r.url}") if not r.url.startswith((address, "data:", "blob:")) else None,
    )
    page.on("response", lambda r: said.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    return said


@pytest.fixture
def opened(browser, address):
    "Open a page in a browser of its own."
    contexts = []

    def open_page(name, width=1200, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        said = _listen(page, address)
        page.goto(f"{address}/{name}", wait_until="load")
        return page, said

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def turned(browser, address):
    "Turn to a page in the browser that had the one before: for tests that only look. It starts much faster."
    books = {}

    def turn_page(name, width):
        if width not in books:
            page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
            books[width] = page, _listen(page, address)
        page, said = books[width]
        said.clear()
        page.goto(f"{address}/{name}", wait_until="load")
        return page, said

    yield turn_page
    for page, _ in books.values():
        page.context.close()


def source(name):
    "The notebook (or README) behind a page."
    if name == "index.html":
        return (ROOT / "README.md").read_text()
    for text in ((ROOT / name).with_suffix(suffix) for suffix in (".md", ".qmd")):
        if text.exists():
            return text.read_text()
    for path in (ROOT / Path(name).parent).glob("*.ipynb"):
        cells = check_site.read_cells(path)
        if check_site.front_matter(cells).get("output-file") == Path(name).name:
            return "\n".join(c["source"] for c in cells if c["cell_type"] == "markdown")


# The text of a page without code and formulas.
PROSE = """() => { const main = document.querySelector('main').cloneNode(true);
    main.querySelectorAll('pre, code, math, script, [hidden]').forEach(e => e.remove()); return main.textContent; }"""


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole(name, turned, folder):
    page, said = turned(name, width=1400)
    state = page.evaluate("""() => ({
        text: document.querySelector('main').innerText,
        formulas: document.querySelectorAll('main math').length,
        folds: [...document.querySelectorAll('main details')].filter(d => d.querySelector(':scope > pre, :scope > div pre'))
            .map(d => [d.open, d.querySelector('summary').innerText.trim()]),
        bare: [...document.querySelectorAll('main pre')].filter(e => !e.closest('details')).map(e => e.innerText.trim()),
        raw: [...document.querySelectorAll('main .math')].filter(e => !e.closest('math') && !e.querySelector('math')).map(e => e.innerText),
        images: [...document.querySelectorAll('main img')].map(e => [e.complete && e.naturalWidth > 0, e.alt, (e.clientWidth - 2 * parseFloat(getComputedStyle(e).paddingLeft)) / e.naturalWidth])})""")  # noqa: E501
    assert not said
    assert "$$" not in state["text"] and not state["raw"], "a formula was not turned into MathML"
    assert not re.search(r"\$\$", source(name)) or state["formulas"]
    assert "Traceback (most recent call last)" not in state["text"]
    assert not re.search(r"^\s*#\s*\|", state["text"], re.M), "a directive shows"
    assert not re.search(r"""\[(['"])[^'"\n]{0,80}\\n\1, ?['"]""", state["text"]), (
        "a list of lines shows where its text should"
    )
    assert not re.search(r"(?<!\w)@(fig|tbl|eq|sec)-\w", state["text"]), "a reference is not resolved"
    assert not re.search(r"\[[-−]?[\d.]+, [-−]?[\d.]+\]", page.evaluate(PROSE)), "an interval can be broken"
    assert not [label for opens, label in state["folds"] if opens and re.match("Source|Imports|Check", label)]
    assert all(label for _, label in state["folds"]), "a fold does not say what is inside"
    assert not [code for code in state["bare"] if re.fullmatch(r"(?:(?:import|from) [^\n]+\n?)+", code)]
    for loaded, alt, scale in state["images"]:
        assert loaded and len(alt) > 20
        assert scale >= 0.9, "letters of 8 points are less than 10 pixels high"
    _links_lead_somewhere(name, page, folder)


def test_nothing_is_loaded_from_another_host(folder):
    assert not check_site.check_hosts(folder)


def _links_lead_somewhere(name, page, folder):
    "Assert that the links of an open page lead to files and places of the site."
    links = page.evaluate("[...document.querySelectorAll('main a[href]')].map(a => a.getAttribute('href'))")
    places = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")  # some are given by a script
    for link in links:
        if re.match(r"https?:|mailto:|data:|javascript:", link):
            continue
        target, _, anchor = unquote(link.removeprefix("/isoreg/")).partition("#")
        there = Path(os.path.normpath((folder / name).parent / target)) if target else folder / name
        assert there.exists(), f"{link} leads nowhere"
        if anchor and not target:
            assert anchor in places, f"{link}: no such place on the page"
        elif anchor and there.suffix == ".html":
            assert re.search(rf'\bid="{re.escape(anchor)}"', there.read_text()), f"{link}: no such place on the page"


ANSWERS = {  # a page, and what readers look for who should find it
    "index": ["install", "getting started"],
    "nbs/tutorials/score": ["measure embeddings"],
    "nbs/guides/choosing": ["choose lambda"],
    "nbs/isoscore": ["IsoScore"],
    "nbs/schedules": ["guided dropout"],
    "nbs/integrations/stack": ["GPU", "Slurm"],
}


@pytest.mark.parametrize("page, words", ANSWERS.items())
def test_the_search_finds_the_right_page_first(page, words, turned, folder, real):
    "With the site's own Fuse and the options that Quarto gives it; neither TeX nor the skip link is in the index."
    if not real:
        pytest.skip("a preview, without Quarto's search")
    index = json.loads((folder / "search.json").read_text())
    assert not [e["href"] for e in index if re.search(r"Skip to the content|\\(?:operatorname|frac)\b", e["text"])]
    search = """([index, words]) => { const fuse = new Fuse(index, { ignoreLocation: true, threshold: 0.1,
        keys: [{ name: 'title', weight: 20 }, { name: 'section', weight: 20 }, { name: 'text', weight: 10 }] });
        return words.map(w => fuse.search(w)[0].item.href.split('.html')[0]); }"""
    assert turned("index.html", width=1400)[0].evaluate(search, [index, words]) == [page] * len(words)


RUNS = "main a[href*='runs.jsonl#L']"


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("kind", ["one method", "a difference over tasks"])
def test_a_number_shows_the_runs_behind_it(kind, width, opened, folder):
    page, said = opened("nbs/tables/guided-main.html", width=width)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    links = page.locator(RUNS).all()
    link = links[0] if kind == "one method" else max(links, key=lambda a: a.get_attribute("href").count(","))
    number, spans = link.inner_text(), link.get_attribute("href").split("#")[1].split(",")
    stored = (folder / "nbs/results/runs.jsonl").read_text().split("\n")
    spans = [[int(n) for n in re.findall(r"L(\d+)", span)] for span in spans]
    runs = [json.loads(line) for span in spans for line in stored[span[0] - 1 : span[-1]]]
    link.click()
    dialog = page.locator("dialog[open]")
    dialog.wait_for()
    assert f"{len(runs)} runs behind “{number}”" in dialog.inner_text() and "regularizer none" in dialog.inner_text()
    head = dialog.locator("th").all_inner_texts()
    shown = [dict(zip(head, row.split("\t"))) for row in dialog.locator("tbody").inner_text().splitlines()]
    assert [(row["run"], int(row["seed"])) for row in shown] == [(r["key"], r["config"]["seed"]) for r in runs]
    name = "score" if "score" in head else runs[0]["metric"].replace("_", " ")
    assert [float(row[name]) for row in shown] == pytest.approx([r["value"] for r in runs], rel=1e-3)
    if kind != "one method":
        assert [(row["task"], row["dropout"]) for row in shown] == [
            (r["config"]["task"], r["config"]["dropout"]) for r in runs
        ]
    dialog.locator("summary").first.click()
    assert json.loads(dialog.locator("pre").first.inner_text()) == runs[0]
    right = page.evaluate("document.querySelector('dialog').getBoundingClientRect().right")
    assert right <= width and "#L" not in page.url and not said


@pytest.mark.parametrize("way", ["Escape", "Close", "backdrop"])
def test_the_runs_behind_a_number_open_and_close_by_keyboard_and_pointer(way, opened):
    page, said = opened("nbs/tables/guided-main.html", scheme="dark")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    link, dialog = page.locator(RUNS).first, page.locator("dialog[open]")
    link.focus()
    page.keyboard.press("Enter")
    dialog.wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Close"
    colours = "n => { const s = getComputedStyle(document.querySelector(n)); return [s.color, s.backgroundColor]; }"
    assert page.evaluate(colours, "dialog") == page.evaluate(colours, "body")
    if way == "Escape":
        page.keyboard.press("Escape")
    elif way == "Close":
        dialog.get_by_role("button", name="Close").click()
    else:
        page.mouse.click(5, 5)
    page.wait_for_function("!document.querySelector('dialog')")
    assert page.evaluate("document.activeElement.getAttribute('href')") == link.get_attribute("href") and not said


def test_a_number_opens_its_file_where_its_runs_cannot_be_shown(opened, folder):
    lines = (folder / "nbs/results/runs.jsonl").read_text().split("\n")
    of_another_day = lambda route: route.fulfill(body="\n".join(lines[1:]))
    for answer in (of_another_day, lambda route: route.fulfill(body="{}\n"), lambda route: route.abort()):
        page, _ = opened("nbs/tables/guided-main.html")
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.route(
            "**/runs.jsonl",
            lambda route: answer(route) if route.request.resource_type == "fetch" else route.continue_(),
        )
        with page.expect_download() as file:
            page.locator(RUNS).first.click()  # a server that knows the type shows it
        assert "/nbs/results/runs.jsonl#L" in file.value.url and not page.locator("dialog").count()


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_phone(name, turned):
    page, _ = turned(name, width=390)
    wide = page.evaluate("""() => [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
        && ![...(function*() { for (let p = e.parentElement; p; p = p.parentElement) yield p })()].some(p => /auto|scroll|hidden/.test(getComputedStyle(p).overflowX)))
        .map(e => e.outerHTML.slice(0, 120))""")  # noqa: E501
    assert page.evaluate("document.documentElement.scrollWidth") <= 391, wide[:5]


BRIGHTNESS = "e => (getComputedStyle(e).%s.match(/\\d+/g) || []).slice(0, 3).map(Number).reduce((a, b) => a + b)"


def _paper_and_ink(page):
    "Sums of red, green and blue, of 765 at most: the page behind the text, and the text."
    return page.eval_on_selector("body", BRIGHTNESS % "backgroundColor"), page.eval_on_selector(
        "main", BRIGHTNESS % "color"
    )


def test_one_screen_has_the_answer_the_picture_and_the_command(opened, real):
    if not real:
        pytest.skip("a preview, without Quarto's themes")
    page, _ = opened("index.html", width=1400)
    for part in ("#should-i-use-them ol > li", "main img", "#getting-started-install-and-try-it pre"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= 900, part


CONTRAST = """() => {
  const rgba = s => (s.match(/[\\d.]+/g) || []).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const light = c => c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = e => { const own = rgba(getComputedStyle(e).backgroundColor); return own.length > 3 && own[3] < 1 ? over(own, e.parentElement ? paper(e.parentElement) : [255, 255, 255]) : own; };
  const seen = e => { let o = 1; for (; e; e = e.parentElement) o *= getComputedStyle(e).opacity; return o; };
  const low = [];
  for (const e of document.querySelectorAll('main *, nav *, dialog *, header *, footer *')) {
    const words = [...e.childNodes].filter(n => n.nodeType == 3 && n.textContent.trim());
    if (!words.length || !e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) || e.closest('svg, .visually-hidden, .skip')) continue;
    const below = paper(e), ink = over(rgba(getComputedStyle(e).color), below).map((c, i) => c * seen(e) + below[i] * (1 - seen(e)));
    const [a, b] = [light(ink), light(below)], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(1)} ${e.tagName} ${e.className}: ${words[0].textContent.trim().slice(0, 40)}`);
  }
  return [...new Set(low)];
}"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "nbs/istar.html", "nbs/tables/guided-main.html"])
def test_text_stands_out_from_its_background(name, scheme, opened):
    "WCAG 2.1, 1.4.3: 4.5 to 1, in the mode that the system asks for, and in the dialog of the runs."
    page, _ = opened(name, scheme=scheme)
    paper, _ = _paper_and_ink(page)
    assert (paper > 600) == (scheme == "light"), "the system's preference is not followed"
    if name == "nbs/tables/guided-main.html":
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.locator(RUNS).first.click()
        page.locator("dialog[open]").wait_for()
    assert not page.evaluate(CONTRAST)


def test_formulas_have_a_font_that_travels_with_the_site(opened, folder):
    page, said = opened("nbs/istar.html")
    page.evaluate("document.fonts.ready")
    loaded = page.evaluate("[...document.fonts].filter(f => f.status == 'loaded').map(f => f.family)")
    assert any("Isoreg Math" in family for family in loaded) and not said
    tall = page.evaluate("""[...document.querySelectorAll('main math mo')].filter(e => ['(', '[', '{', '∑'].includes(e.textContent))
        .map(e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).fontSize))""")  # noqa: E501
    assert tall and max(tall) < 4
    assert (folder / "nbs/fonts/OFL.txt").exists()


def test_the_first_key_leads_to_the_content(opened):
    page, _ = opened("nbs/istar.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById(location.hash.slice(1)).tagName") == "MAIN"


@pytest.mark.parametrize("name", PAGES)
def test_each_page_has_a_title_and_a_description(name, folder):
    text = (folder / name).read_text()
    title = re.search(r"<title>(.*?)</title>", text, re.S)
    described = re.search(r'<meta name="description" content="([^"]{20,})"', text)
    assert title and title[1].strip() and described
    (image,) = re.findall(r'<meta property="og:image" content="(?:https?://[^/]+/[^/]+/|[./]*)([^"]+\.png)"', text)
    assert (folder / image).exists() and 'lang="en-GB"' in text
    assert "images/favicon.svg" in text
