"""The command as a user gives it, and the tables that it writes."""

import re

from typer.testing import CliRunner

from isoreg.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def rows_of(text):
    "The cells of a table in Markdown, a list a line."
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
