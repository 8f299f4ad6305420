"""The command as a user gives it, and the tables that it writes."""

import re

from typer.testing import CliRunner

from isoreg.cli import app
from isoreg.experiments.grid import expand, load_grid

RUN = expand(load_grid("demo")).runs[0]
RECORD = {"key": RUN.key, "status": "done", "config": RUN.config, "metric": "m", "value": 0.5}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def ends(codes, *arguments):
    "The command ends with one of the codes, in words and without a traceback."
    result = invoke(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, repr(result.exception))
    assert result.exit_code in codes and "Traceback" not in result.output, (arguments, result.output)
    return result


def rows_of(text):
    "The cells of a table in Markdown, a list a line."
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
