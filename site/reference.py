"""What the pages Reference and Commands say, and the entry of a name on its page: read from docstrings, class bodies
and the parser of the command line."""

import ast
import dataclasses
import html
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages import addresses


def public_names(room: str) -> dict[str, object]:
    "Return what a room exports and documents, in the order of its page."
    module = importlib.import_module(f"isoreg.{room}")
    named = {name: getattr(module, name) for name in module.__all__}
    return {n: v for n, v in named.items() if inspect.isfunction(v) or inspect.isclass(v)}


def first_sentence(documented) -> str:
    "Return the first sentence of its docstring, in one line."
    paragraph = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return re.split(r"(?<=[^.][.!?])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0].rstrip(":")


class Field(NamedTuple):
    "A field of a class, as its body writes it."

    name: str
    type: str
    default: str  # empty where there is none
    text: str  # the comment behind it, or the help of a setting


def fields(kind: type) -> list[Field]:
    "Return the fields of a NamedTuple, dataclass or configuration, inherited ones too; none of another class."
    if hasattr(kind, "model_fields"):
        return [_setting(name, field) for name, field in kind.model_fields.items()]
    names = getattr(kind, "_fields", ())
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind) if f.init]
    found = {}
    for base in reversed(kind.__mro__):
        found |= _written(base)
    return [found[name] for name in names if name in found]


def _written(kind: type) -> dict[str, Field]:
    "Return the fields in the body of a class of this package, by name."
    if not kind.__module__.startswith("isoreg."):
        return {}
    source = textwrap.dedent(inspect.getsource(kind))
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("#")[2].strip()
        default = "" if node.value is None else ast.unparse(node.value)
        if default.startswith(("field(", "dataclasses.field(")):
            default = "..."
        if isinstance(node.value, ast.Call) and default.startswith(("setting(", "Field(")):
            default, behind = _described(node.value)
        found[node.target.id] = Field(node.target.id, ast.unparse(node.annotation), default, behind)
    return found


def _described(call: ast.Call) -> tuple[str, str]:
    "Return default and description of a field of a record, which the call that makes it names."
    words = {word.arg: word.value for word in call.keywords}
    default, text = call.args or (None, words["description"])
    return ast.unparse(default) if default else "", ast.literal_eval(text)


def _setting(name: str, field) -> Field:
    "Return a setting of a configuration."
    kind = getattr(field.annotation, "__name__", None) if isinstance(field.annotation, type) else str(field.annotation)
    kind = re.sub(r"Literal\[[^]]{80,}\]", "str", kind).replace("typing.", "")  # the page of settings has the values
    kind = re.sub(r"Annotated\[([^,\[]+(?:\[[^]]*\])?), .*?\)\]", r"\1", kind)
    return Field(name, kind, "" if field.is_required() else repr(field.default), field.description or "")


def anchor(room: str, name: str) -> str:
    "Return the mark of a name on the page of its room, different for names that differ in case only."
    return f"isoreg.{room}.{name}"


def _library(sym) -> tuple[str, object]:
    "Return room and object of what a notebook defines, as the library has it; no room for what it does not export."
    name, lines = getattr(sym, "__name__", ""), inspect.getdoc(sym)
    from isoreg._modidx import d

    for module, known in d["syms"].items():
        if f"{module}.{name}" not in known:
            continue
        held = importlib.import_module(module)
        same = inspect.getdoc(getattr(held, name, None)) == lines
        if same:
            return module.removeprefix("isoreg.") if name in held.__all__ else "", getattr(held, name)
    return "", sym


def _mark(room: str, documented) -> str:
    "Return the mark of a name: nothing to see, a place to link to, and a section of its own for the search."
    line = html.escape(first_sentence(documented).replace("`", ""))
    inside = f"<h2 hidden>{documented.__name__}</h2><p hidden>{line}</p>"
    section = f'<section id="{anchor(room, documented.__name__)}" class="level2">{inside}</section>'
    return f"```{{=html}}\n{section}\n```\n\n"


def entry(
    sym,  # function or class
    name: str | None = None,  # shown in place of its own
    title_level: int = 3,  # of the heading
):  # an object that a notebook shows as Markdown
    "Return the entry of a name on its page: nbdev's, marked for the index, the fields of a class in place of `*args`."
    room, held = _library(sym)
    render = importlib.import_module("nbdev.showdoc").BasicMarkdownRenderer
    try:
        shown = render(sym, name=name, title_level=title_level)
    except NameError:  # an annotation names a class of a later cell; the module has it
        shown = render(held, name=name, title_level=title_level)
    shown.fn = getattr(sym, "__qualname__", shown.fn)  # under which nbdev finds its line
    call = _call(held, str(shown.dm)) if inspect.isclass(held) else _short(str(shown.dm))
    sentence, (paragraph, _, rest) = first_sentence(held), (shown.docs or "").partition("\n\n")
    more = " ".join(paragraph.split()).removeprefix(sentence).strip()  # nbdev sets the first line in italics
    shown.docs = "\n\n".join(filter(None, (sentence + ":" * (more == ":"), more.lstrip(":").strip(), rest)))
    shown.dm = call.replace("`", "")  # else nbdev writes links, which code does not show as such
    return _Entry(shown, _mark(room, held) if room else "")


def _short(signature: str) -> str:
    "Return a signature without the types that say nothing, and without the modules of the others."
    lines = [line.partition(" # ") for line in signature.replace("<lambda>", "...").split("\n")]
    bare = lambda code: re.sub(r":(NoneType|Annotated)(?=[=,]|$)|\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", code)
    return "\n".join(bare(code) + mark + comment for code, mark, comment in lines)


class _Entry(NamedTuple):
    "What nbdev shows of a name, and the mark before it; no link to the source without an address."

    shown: object
    mark: str

    def _repr_markdown_(self) -> str:
        return self.mark + re.sub(r"\[source\]\((?!http)[^)]*\)(\{[^}]*\})?", "", self.shown._repr_markdown_())


def _call(kind: type, signature: str) -> str:
    "Return the fields of a class as arguments, a line each; of one without fields its signature, or its bases."
    lines = [
        f"    {f.name}: {f.type}{' = ' * bool(f.default)}{f.default},{'  # ' * bool(f.text)}{f.text}\n"
        for f in fields(kind)
    ]
    if lines:
        return f"{kind.__name__}(\n{''.join(lines)})"
    bare = re.fullmatch(r"def \w+\(\s*\*args,\s*\*\*kwargs\s*\)\s*(->\s*None)?:?", signature.strip())
    return f"class {kind.__name__}({', '.join(b.__name__ for b in kind.__bases__)})" if bare else _short(signature)


def rooms(folder: str | Path) -> Iterator[tuple[str, str, str]]:
    "Yield (room, its notebook below the folder, the title of its page), in the order of the numbers."
    for path in sorted(Path(folder).rglob("[0-9]*_*.ipynb"), key=lambda path: path.name):
        front = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        file = path.relative_to(folder).as_posix()
        yield (
            ".".join([*file.split("/")[:-1], path.stem[3:]]),
            file,
            re.search(r'^title: "?(.+?)"?$', front, re.MULTILINE)[1],
        )


TASKS = {  # what a reader wants to do, and the rooms for it; a room that is not named here is an internal one
    "Measure vectors": "isoscore embeddings vectors metric tokens geometry moments states",
    "Add a penalty": "istar trainer sentence_transformers",
    "Set dropout": "fisher sites schedules dropout corpus",
    "Look at the loss": "landscape",
    "Run experiments": "experiments.finetune experiments.sweep experiments.tasks experiments.data experiments.toy "
    "experiments.pretrain experiments.measure",
    "Read results": "report.records report.statistics report.figures",
}
INNER = (  # names of these rooms that only the library calls
    "scores_without stand_out few_operations full_precision pool check_batches "
    "direction step_length displaced normalize_answer squad_scores resample "
    "ProgressFile compute plan_jobs machine environment compute_on_node eval_mode plain_score draw_texts "
    "is_sentence_transformer in_words predicted_logits training_arguments Scores Folder Checked "
    "MissingSplit corpus_texts log_frequencies predicted_tokens toy_batches random_model"
)


def index_page(
    folder: str | Path = "..",  # nbs, as seen from where the page is made
) -> str:
    "Return the index of public names by task in Markdown: a link to the entry, or the entry itself, folded."
    known = {room: (file, title) for room, file, title in rooms(folder)}
    used = [room for named in TASKS.values() for room in named.split()]
    groups = TASKS | {"Internals": " ".join(known)}
    parts = []
    for task, named in groups.items():
        calls = lambda room, name: (room not in used or name in INNER.split()) == (task == "Internals")
        listed = [_room(room, *known[room], Path(folder), calls) for room in named.split() if room in known]
        text = "\n\n".join(filter(None, listed))
        note = "Except for `RunConfig`, `RunRecord`, `collect` and `load_grid`, only the library itself needs these."
        folded = f"{note}\n\n<details><summary>What the library itself calls</summary>\n\n{text}\n\n</details>"
        parts.append(f"## {task}\n\n{folded if task == 'Internals' else text}")
    # the address of a function is another each time
    return re.sub(r"<function <lambda>( at 0x\w+)?>", "...", "\n\n".join(parts) + "\n")


def _room(room: str, file: str, title: str, folder: Path, wanted) -> str:
    "Return the wanted names of a room: each with its line, and its whole entry where the room has no page."
    lines, page = [], f"nbs/{file}" in addresses(folder.resolve().parent).pages
    for name, value in public_names(room).items():
        if not wanted(room, name):
            continue
        line = _plain(first_sentence(value))
        if page:
            lines.append(f"- [{name}](../{file}#{anchor(room, name)}): {line}")
        else:
            lines.append(f"- {_folded(name, value, anchor(room, name))}")
    title = title.partition(" (`")[0]  # the filter makes a link of a name, and no link stands in another
    head = f"**`isoreg.{room}`**: " + (f"[{title}](../{file})" if page else title)
    return f"{head}\n\n" + "\n".join(lines) if lines else ""


def _folded(name: str, value, mark: str) -> str:
    "Return the entry of a name as a block that opens; its mark lies within, so a link to it opens it."
    line = html.escape(first_sentence(value).replace("`", ""))
    shown = entry(value)._repr_markdown_().split("```python", 1)[1]
    opening = f'<section id="{mark}" class="level2"><h2 hidden>{name}</h2>'  # a section, for the search
    body = textwrap.indent(f"{opening}\n\n```python{shown.rstrip()}\n\n</section>\n</details>", "  ")
    return f"<details><summary><code>{name}</code>: {line}</summary>\n\n{body}"


def _plain(text: str) -> str:
    "Return a text whose code stands as it is, and all else without a meaning in Markdown."
    parts = text.split("`")
    return "`".join(part if n % 2 else re.sub(r"[<$@*|]|-(?=-)", r"\\\g<0>", part) for n, part in enumerate(parts))


EXAMPLES = {  # in this order they build on each other
    "demo": "isoreg demo --out runs",
    "run": "isoreg run --task toy-cola --regularizer istar --lam -0.1 --set correction=ustat",
    "rerun": "# a run of the demo\nisoreg rerun runs/toy-cola-toy-bert-none-seed0-defa0c425c",
    "sweep": "isoreg sweep toy --out runs --dry-run",
    "select": "sed 's/seed: .*/seed: [100, 101]/' nbs/grids/toy.yaml > search.yaml\n"
    "isoreg sweep search.yaml --out search\n"
    "isoreg select search.yaml search --out final.yaml",
    "status": "isoreg status runs --json",
    "score": "python -c \"import numpy as np; [np.save(f, np.random.rand(500, 32)) for f in 'ab']\"\n"
    "isoreg score a.npy\nisoreg score a.npy b.npy --each --paired\nmkdir shards\n"
    "python -c \"import numpy as np; np.savez('shards/1', embedding=np.random.rand(500, 32))\"\n"
    "isoreg score shards/ --array embedding\n"
    "cp README.md text.txt\nisoreg score --model toy-bert --texts text.txt",
    "report": "isoreg report runs --out report",
    "tasks": "isoreg tasks",
}


def commands_page() -> str:
    "Return the page of the commands in Markdown: usage, arguments, an example, options but the settings of a run."
    import typer
    from isoreg.cli import app

    commands = typer.main.get_command(app).commands
    return "\n\n".join(_command(name, command) for name, command in commands.items()) + "\n"


def _command(name: str, command) -> str:
    "Return the section of a command."
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    # the settings of a run stand on another page
    own = [p for p in command.params if p.param_type_name == "option" and not p.rich_help_panel]
    groups = {"Arguments": arguments, "Options": own}
    usage = " ".join([f"isoreg {name}", *["[OPTIONS]"] * any(groups["Options"]), *map(_placeholder, arguments)])
    parts = [f"## isoreg {name}", inspect.cleandoc(command.help or ""), f"```bash\n{usage}\n```"]
    for heading, options in groups.items():
        if options:
            parts.append(f"**{heading}**\n\n{_table(options)}")
    return "\n\n".join([*parts, f"**Example**\n\n```bash\n{EXAMPLES[name]}\n```"])


def _placeholder(argument) -> str:
    "Return an argument as usage shows it."
    name = argument.metavar or argument.name.upper()
    return (name if argument.required else f"[{name}]") + "..." * (argument.nargs == -1)


def _table(options: list) -> str:
    "Return the table of a group of options, in a block whose flags the site leaves whole."
    return "\n".join(["::: {.flags}", "", "| | |", "|:---|:------|", *map(_option, options), "", ":::"])


def _option(p) -> str:
    "Return the row of an option or argument: how it is given and its type, what it does, its bound and default."
    given = _placeholder(p) if p.param_type_name == "argument" else " / ".join([*p.opts, *p.secondary_opts])
    flag = getattr(p, "is_flag", False)
    kind = "" if flag else re.sub(r" range|list\[|\]", "", p.display_type(None)).lower()
    notes = ["may be repeated"] * p.multiple + [f"{p.min} or more"] * (p.min is not None)
    notes += [f"default {p.default}"] * (p.show_default and p.default is not None and not flag)
    text = re.sub(r"^[A-Z](?![A-Z])", lambda m: m[0].lower(), p.help).rstrip(".")
    text += f" ({'; '.join(notes)})" * bool(notes)
    return f"| `{given}{' ' * bool(kind)}{kind}` | {_plain(text)} |"
