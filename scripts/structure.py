"""Checks that the packages stay readable: no cycle of imports, no large folder, few small files with one importer.

    python -m scripts.structure      prints totals; the exit status is 1 if a limit is exceeded

A file earns its existence if two others import it, or by about 120 lines of one idea. The limits of one-importer files
and of files in a folder are what the project has reached; lower them with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator")
SMALL_LINES: Final = 120
MAX_SMALL: Final = 15  # small files with exactly one importer
MAX_FILES: Final = 20  # in a folder, with __init__.py
GENERATED: Final = "pdserve.v1."


def path_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def main() -> int:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    modules = {one: path_of(one) for one in sorted(graph.modules) if not one.startswith(GENERATED)}
    problems = []

    imports = {one: graph.find_modules_directly_imported_by(one) & modules.keys() for one in modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        problems.append(f"modules import each other in a circle: {' -> '.join(error.args[1])}")

    for folder, count in Counter(path.parent for path in modules.values()).items():
        if count > MAX_FILES:
            problems.append(
                f"{folder.relative_to(ROOT)} has {count} files, {MAX_FILES} at most: divide it, or merge files"
            )

    small = [
        one
        for one, path in modules.items()
        if path.name not in ("__init__.py", "__main__.py")
        and num_lines(path) < SMALL_LINES
        and len(graph.find_modules_that_directly_import(one)) == 1
    ]
    if len(small) > MAX_SMALL:
        problems.append(
            f"{len(small)} files have fewer than {SMALL_LINES} lines and one importer, {MAX_SMALL} at most: "
            f"merge one with its importer: {', '.join(small)}"
        )

    lines = sum(map(num_lines, modules.values()))
    print(f"{len(modules)} files, {lines} lines, {len(small)} small files with one importer")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
