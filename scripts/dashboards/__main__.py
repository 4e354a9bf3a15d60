"""Writes deploy/observe/dashboards/*.json from this package. `make reference` runs it.

    python -m scripts.dashboards [--check]

With --check it writes nothing, names each file that is stale, and fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from scripts.dashboards.capacity import CAPACITY
from scripts.dashboards.kv import KV
from scripts.dashboards.panels import render
from scripts.dashboards.slo import SLO
from scripts.dashboards.tenants import TENANTS

DASHBOARDS: Final = (SLO, CAPACITY, KV, TENANTS)
FOLDER: Final = Path(__file__).resolve().parents[2] / "deploy/observe/dashboards"


def files() -> dict[Path, str]:
    return {FOLDER / f"{one.uid}.json": json.dumps(render(one), indent=1) + "\n" for one in DASHBOARDS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    made = files()
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in FOLDER.glob("*.json") if path not in made]
    if args.check:
        for path in stale:
            print(f"{path.relative_to(Path.cwd())} is stale: run `make reference`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        if path in made:
            path.write_text(made[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
