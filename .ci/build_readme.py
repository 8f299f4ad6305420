"""Write README.md from nbs/index.ipynb, or say with --check that the two differ. Pictures are left out."""

import argparse, json, re, sys
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
        return "".join(data["text/markdown"]).strip()
    if output["output_type"] == "error":
        raise SystemExit("index.ipynb holds a failed cell: " + output["ename"])
    if any(kind.startswith("image/") for kind in data):
        return ""
    text = "".join(output.get("text", data.get("text/plain", "")))
    return fenced(text, "text") if text.strip() else ""


def cell_text(cell: dict) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return relink(source.strip())
    if cell["cell_type"] == "raw":
        front = yaml.safe_load(source.strip().strip("-")) or {}
        return "\n\n".join(
            text for text in (f"# {front.get('title', 'isoreg')}", front.get("description", "")) if text
        )
    if re.match(r"#\|\s*hide\b", source):
        return ""
    silent = re.search(r"^#\|\s*echo:\s*false", source, flags=re.MULTILINE)
    code = "" if silent else re.sub(r"^#\|.*\n?", "", source, flags=re.MULTILINE).strip()
    return "\n\n".join(
        text for text in [fenced(code, "python") if code else "", *map(output_text, cell["outputs"])] if text
    )


def readme(notebook: Path) -> str:
    parts = [cell_text(cell) for cell in json.loads(notebook.read_text())["cells"]]
    if "{{<" in "".join(parts):
        raise SystemExit("index.ipynb holds a Quarto shortcode, which README.md cannot show")
    return "\n\n".join([NOTE, *filter(None, parts)]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md is out of date")
    args = parser.parse_args()
    text, target = readme(args.root / "nbs" / "index.ipynb"), args.root / "README.md"
    if not args.check:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        sys.exit("README.md is not what nbs/index.ipynb says: run python .ci/build_readme.py")
