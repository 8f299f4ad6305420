"""Run the tests that take minutes (whole runs that are killed, a slow hub, clusters of Ray that lose a part) and enter
in the record of trust what came of them: python tools/long.py."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from trust import ROOT, enter, today

FILES = "tests/test_faults.py", "tests/test_determinism.py"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}", *FILES]
        code = subprocess.run(pytest, cwd=ROOT, env=os.environ | {"ISOREG_LONG": "1"}).returncode
        suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    enter("long", count | {"seconds": round(float(suite.get("time"))), "date": today()})
    return code


if __name__ == "__main__":
    sys.exit(main())
