"""The deeper exploration: `python -m tests.unit.kvtransfer.model [NAME ...]` prints a table, and exits with 1 on a
violation.
"""

from __future__ import annotations

import sys

from tests.unit.kvtransfer.model.report import run
from tests.unit.kvtransfer.model.scenarios import DEEP


def main(names: list[str]) -> int:
    print("| explored | transfers | blocks each | writes a chunk | faults | states | steps | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names or DEEP:
        one = DEEP[name]
        result = run(one)
        facts = f"{one.transfers} | {one.blocks} | {one.slices} | {one.faults}"
        print(f"| {name} | {facts} | {result.num_states:,} | {result.num_steps:,} | {result.cpu_s:.0f} s |", flush=True)
        if result.violated is not None:
            print(result.story())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
