"""List the licence of each package that isoreg needs, directly or not, as installed here: python tools/licences.py
[--json]. Exits 1 where a package names none, or one under which isoreg could not be given away."""

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires

FREE = r"Apache|MIT|0?BSD|PSF|Python Software Foundation|ISC|MPL|Mozilla|HPND|Zlib|Unlicense|CC0|LGPL(v\d)?"
OWN = "Proprietary|NVIDIA"  # of CUDA builds of torch; isoreg neither holds nor hands on any of it


def needed(name: str, seen: dict[str, str]) -> dict[str, str]:
    "Return the licence by package of all that a package needs and that is installed here."
    for line in requires(name) or []:
        if "extra ==" in line:
            continue
        other = re.match(r"[A-Za-z0-9._-]+", line)[0]
        key = re.sub(r"[-_.]+", "-", other).lower()
        if key in seen:
            continue
        try:
            seen[key] = licence(other)
        except PackageNotFoundError:  # for another system or Python
            continue
        needed(other, seen)
    return seen


def licence(name: str) -> str:
    "Return what a package says of its licence, in a few words."
    about = distribution(name).metadata
    classified = [c.split("::")[-1].strip() for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    said = about.get("License-Expression") or " / ".join(classified) or (about.get("License") or "").strip()
    return said.splitlines()[0][:60] if said else ""


if __name__ == "__main__":
    found = dict(sorted(needed("isoreg", {}).items()))
    odd = [n for n, words in found.items() if not re.search(rf"\b({FREE}|{OWN})\b", words, re.IGNORECASE)]
    print(json.dumps(found, indent=1) if "--json" in sys.argv else "\n".join(f"{n}: {w}" for n, w in found.items()))
    if odd:
        sys.exit(f"to be looked at: {', '.join(f'{n} ({found[n]!r})' for n in odd)}")
