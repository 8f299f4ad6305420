"""Try 6,400 random inputs and enter in the record of trust how many of each kind there were and what went wrong:
python tools/fuzz.py. A kind stops at its first failure."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from trust import ROOT, enter, today


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from test_fuzz import SIZES

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        many = os.environ | {"ISOREG_FUZZ": "20"}
        code = subprocess.run([sys.executable, *pytest, "tests/test_fuzz.py"], cwd=ROOT, env=many).returncode
        cases = {case.get("name"): case for case in ElementTree.parse(report).iter("testcase")}
    found = [
        {
            "what": name.replace("_", " "),
            "inputs": 20 * size,
            "failures": sum(len(cases[f"test_{name}"].findall(kind)) for kind in ("failure", "error")),
            "date": today(),
        }
        for name, size in SIZES.items()
    ]
    enter("fuzz", found)
    return code


if __name__ == "__main__":
    sys.exit(main())
