"""Check that a wheel holds every module, every asset, every papermill notebook and every grid of the checkout, and
nothing else."""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def expected(root: Path) -> set[str]:
    modules = {path.relative_to(root).as_posix() for path in (root / "isoreg").rglob("*.py")}
    assets = {path.relative_to(root).as_posix() for path in (root / "isoreg" / "assets").rglob("*") if path.is_file()}
    runs = {f"isoreg/runs/{path.name}" for path in (root / "nbs" / "runs").glob("*.ipynb")}
    return modules | assets | runs | {f"isoreg/grids/{path.name}" for path in (root / "nbs" / "grids").glob("*.yaml")}


def differences(wheel: Path, root: Path = ROOT) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    return [f"missing: {name}" for name in sorted(expected(root) - inside)] + [
        f"too much: {name}" for name in sorted(inside - expected(root))
    ]


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]))
    print("\n".join(found) or f"{len(expected(ROOT))} files, all there")
    sys.exit(bool(found))
