"""Compare runs that were repeated on this processor with the stored ones, and enter in the record of trust how far they
are apart: python tools/processors.py FOLDER [RECORDS]. The folder is that of `isoreg run` or `isoreg sweep`, made at
the commit of the stored runs."""

import json
import sys
from pathlib import Path

from trust import ROOT, enter, today

from isoreg.files import unpack
from isoreg.experiments.record import read_lines

STORED = ROOT / "nbs" / "results" / "second.jsonl"


def compare(old: dict, new: dict) -> dict:
    "Return what two records of one run say of score, isotropy and predictions."
    if old["git_commit"] != new["git_commit"]:
        sys.exit(f"{new['key']}: stored at {old['git_commit']}, repeated at {new['git_commit']}; use one commit")
    a, b = (unpack(r["predictions"]) for r in (old, new))
    return {
        "run": new["key"],
        "commit": new["git_commit"],
        "stored_on": old["hardware"]["cpu"],
        "repeated_on": new["hardware"]["cpu"],
        "precision": new["hardware"]["precision"],
        "value": [old["value"], new["value"]],
        "isoscore": [r["isoscore"]["after"]["union"] for r in (old, new)],
        "predictions": len(a),
        "others": int((a != b).sum()),
        "date": today(),
    }


def main(folder: str, stored: str = str(STORED)) -> None:
    "Compare all runs of a folder."
    before = {r["key"]: r for r in read_lines(Path(stored))}
    again = (json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/record.json")))
    rows = [compare(before[r["key"]], r) for r in again if r["key"] in before]
    enter("processors", rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
