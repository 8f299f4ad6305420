"""Try 10,000 random inputs and enter in the record of trust how many of each kind there were and what went wrong:
python .ci/fuzz.py. A kind stops at its first failure."""

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs" / "results" / "trust.json"


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from test_fuzz import SIZES

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest = ["-m", "pytest", "-m", "fuzz", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = subprocess.run([sys.executable, *pytest, "tests/test_fuzz.py"], cwd=ROOT).returncode
        cases = {case.get("name"): case for case in ElementTree.parse(report).iter("testcase")}
    when = datetime.now(UTC).date().isoformat()
    record = json.loads(RECORD.read_text())
    record["fuzz"] = [
        {
            "what": name.replace("_", " "),
            "inputs": 20 * size,
            "failures": sum(len(cases[f"test_many_{name}"].findall(kind)) for kind in ("failure", "error")),
            "date": when,
        }
        for name, size in SIZES.items()
    ]
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
