"""The record of trust, nbs/results/trust.json: the checks of this folder enter there what they find."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from isoreg.files import write_atomically

ROOT = Path(__file__).parents[1]
_RECORD = ROOT / "nbs" / "results" / "trust.json"


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def recorded(part: str) -> Any:
    "Return a part of the record as it is."
    return json.loads(_RECORD.read_text())[part]


def enter(part: str, found: Any) -> None:
    "Put what was found in place of a part of the record; the others stay."
    write_atomically(_RECORD, json.dumps(json.loads(_RECORD.read_text()) | {part: found}, indent=1) + "\n")
