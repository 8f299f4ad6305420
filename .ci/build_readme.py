"""Write README.md from nbs/index.ipynb. A labelled picture becomes a file in nbs/images."""

import base64
import json
import re
from pathlib import Path

import yaml

NOTE = "<!-- Generated from nbs/index.ipynb by .ci/build_readme.py: edit the notebook, not this file. -->"
LINK = re.compile(r"(\]\()(?!https?:|mailto:|[#/])([^)\s]+)(?=[)\s])")


def relink(text: str) -> str:
    "The links of a notebook in nbs/, as seen from the folder above it."
    return LINK.sub(lambda m: m[1] + (m[2][3:] if m[2].startswith("../") else "nbs/" + m[2]), text)


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```"


def output_text(output: dict) -> str:
    data = output.get("data", {})
    if "text/markdown" in data:
        return relink("".join(data["text/markdown"]).strip())
    if output["output_type"] == "error":
        raise SystemExit("index.ipynb holds a failed cell: " + output["ename"])
    if any(kind.startswith("image/") for kind in data):
        return ""  # see pictures
    text = "".join(output.get("text", data.get("text/plain", "")))
    return fenced(text, "text") if text.strip() else ""


def option(cell: dict, name: str) -> str:
    found = re.search(rf'^#\|\s*{name}:\s*"?(.*?)"?\s*$', "".join(cell["source"]), flags=re.MULTILINE)
    return found[1] if found else ""


def pictures(cells: list[dict]) -> dict[str, bytes]:
    "File name and content of each labelled picture."
    found = {}
    for cell in cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}) and option(cell, "label"):
                found[f"{option(cell, 'label')}.png"] = base64.b64decode("".join(output["data"]["image/png"]))
    return found


def cell_text(cell: dict) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return relink(source.strip())
    if cell["cell_type"] == "raw":
        front = yaml.safe_load(source.strip().strip("-")) or {}
        return "\n\n".join(text for text in (f"# {front.get('title', 'isoreg')}", front.get("description", "")) if text)
    if re.match(r"#\|\s*hide\b", source):
        return ""
    silent = re.search(r"^#\|\s*echo:\s*false", source, flags=re.MULTILINE)
    code = "" if silent else re.sub(r"^#\|.*\n?", "", source, flags=re.MULTILINE).strip()
    shown = [
        f'<img src="nbs/images/{name}" alt="{option(cell, "fig-alt")}"><br>\n*{option(cell, "fig-cap")}*'
        for name in pictures([cell])
    ]
    if caption := option(cell, "tbl-cap"):
        shown.append(f"*{caption}*")
    return "\n\n".join(
        text for text in [fenced(code, "python") if code else "", *map(output_text, cell["outputs"]), *shown] if text
    )


def readme(notebook: Path) -> str:
    parts = [cell_text(cell) for cell in json.loads(notebook.read_text())["cells"]]
    if "{{<" in "".join(parts):
        raise SystemExit("index.ipynb holds a Quarto shortcode, which README.md cannot show")
    if "\\operatorname" in "".join(parts):
        raise SystemExit(
            "index.ipynb holds \\operatorname, which the repository's page refuses in formulas: use \\mathrm"
        )
    return "\n\n".join([NOTE, *filter(None, parts)]) + "\n"


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    notebook = root / "nbs" / "index.ipynb"
    (root / "README.md").write_text(readme(notebook))
    for name, content in pictures(json.loads(notebook.read_text())["cells"]).items():
        (root / "nbs" / "images" / name).write_bytes(content)
