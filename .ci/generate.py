"""Write what is made from the code: the parameter cells of the run notebooks, the schema of a record, the pages
Reference and Commands, and the site's addresses from settings.ini."""

import configparser
import json
import sys
from pathlib import Path

import yaml

from isoreg.experiments.config import CONFIGS, choices, plain_type
from isoreg.experiments.record import record_schema

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "nbs"
sys.path.insert(0, str(ROOT / "site"))
from reference import commands_page, index_page


def parameter_line(name: str, field) -> str:
    "A line of a notebook's parameter cell: a setting with its type, default, help and the words to choose from."
    kind = plain_type(field).__name__
    value = json.dumps(field.default) if isinstance(field.default, str) else field.default
    line = f"{name}: {kind} = {value}".ljust(32) + f"  # {field.description}"
    words = f" ({', '.join(choices(field))})" if choices(field) else ""
    return line + words if len(line + words) <= 120 else line


def write_parameters(name: str) -> None:
    "Write the parameter cell of a run notebook; what the notebook reads beside the configuration stays."
    path = NOTEBOOKS / "runs" / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    (cell,) = [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    settings = CONFIGS[name].model_fields
    further = [line for line in "".join(cell["source"]).splitlines() if line.partition(":")[0] not in settings]
    lines = [parameter_line(n, field) for n, field in settings.items()]
    cell["source"] = "\n".join(lines + further).splitlines(keepends=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def write_schema(name: str, schema: dict) -> None:
    "Write the schema of a kind of record."
    (NOTEBOOKS / "results" / f"{name}.schema.json").write_text(json.dumps(schema, indent=1) + "\n")


def describe_settings(name: str) -> None:
    "Write the words of the configuration into the schema of a kind of measurement."
    schema = json.loads((NOTEBOOKS / "results" / f"{name}.schema.json").read_text())
    for setting, about in schema["properties"]["config"]["properties"].items():
        about["description"] = CONFIGS[name].model_fields[setting].description
    write_schema(name, schema)


def write_page(name: str, text: str) -> None:
    "Write the Markdown that the last cell of a guide shows, as running it would."
    path = NOTEBOOKS / "guides" / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    data = {"text/markdown": text.splitlines(keepends=True), "text/plain": ["<IPython.core.display.Markdown object>"]}
    shown = {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    notebook["cells"][-1]["outputs"] = [shown]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def write_addresses() -> None:
    "Write the addresses of site and repository for Quarto; a fork without either leaves them empty in settings.ini."
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini")
    s, website = settings["DEFAULT"], {}
    if s["doc_host"]:
        website["site-url"] = s["doc_host"] + s["doc_baseurl"].removesuffix("/nbs")
    if s["git_url"]:
        website |= {"repo-url": s["git_url"], "repo-branch": s["branch"], "repo-actions": ["source", "issue"]}
    text = yaml.safe_dump({"website": website}, sort_keys=False, default_flow_style=None)
    (ROOT / "site" / "_addresses.yml").write_text(text)


if __name__ == "__main__":
    write_addresses()
    for name in CONFIGS:
        write_parameters(name)
    write_schema("record", record_schema())
    for name in ("fisher", "landscape", "geometry"):
        describe_settings(name)
    write_page("reference", index_page(NOTEBOOKS))
    write_page("commands", commands_page())
