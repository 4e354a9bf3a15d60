"""Checks that the packages stay readable: no cycle of imports, no import by a string, no large folder, few small files
with one importer.

    python -m scripts.structure      prints totals; the exit status is 1 if a limit is exceeded

A file earns its existence if two others import it, or by about 120 lines of one idea. The limits of one-importer files
and of files in a folder are what the project has reached; lower them with it.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator")
SMALL_LINES: Final = 120
MAX_SMALL: Final = 8  # small files with exactly one importer
MAX_FILES: Final = 20  # in a folder, with __init__.py
GENERATED: Final = "pdserve.v1"
COMMANDS: Final = "pdserve.cli.main"  # imports each command, a file of its own, once
#: What imports or runs a module that a string names. The contracts of import-linter cannot see such an import.
BY_STRING: Final = frozenset(
    {"import_module", "__import__", "run_module", "run_path", "resolve_name", "exec_module", "entry_points"}
)
#: The modules that may, and why.
MAY_USE_STRINGS: Final = {
    "pdserve": "lazy exports of the SDK",
    "pdserve.telemetry.tracing": "OpenTelemetry is optional, and the client must not import it",
    "pdserve.engine.load_engine": "engines of other distributions are entry points",
    "kvtransfer.transports.common.registry": "a transport is added by its file alone",
    "pdserve.image_check": "tries to import every module",
    "router.policy": "each file in policies/ is a policy, found by its name",
    "pdserve.isolated.tied_program": "runs a program by its name",
}


def path_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def string_imports(source: str, modules: Collection[str], programs: Collection[str]) -> Iterator[str]:
    """Where a source imports a module by a string, or names a module of `modules` that is not one of `programs`.

    A program may be named, because another process runs it: `python -m NAME`.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in BY_STRING:
                yield f"line {getattr(node, 'lineno', 0)} uses {name}"
            case ast.Constant(value=str(text)) if "." in text:
                module = text.partition(":")[0]
                if module in modules and module not in programs:
                    yield f"line {node.lineno} names the module {module} in a string"


def is_program(module: str, source: str) -> bool:
    return 'if __name__ == "__main__":' in source or path_of(f"{module}.__main__").exists()


def all_string_imports(modules: Collection[str]) -> Iterator[str]:
    """In all of `modules`, except for those in MAY_USE_STRINGS."""
    sources = {one: path_of(one).read_text() for one in modules}
    programs = {one for one, source in sources.items() if is_program(one, source)}
    for one in sources.keys() - MAY_USE_STRINGS.keys():
        for found in string_imports(sources[one], modules, programs):
            yield f"{path_of(one).relative_to(ROOT)} {found}: import it plainly, inside a function if it is slow"


def main() -> int:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    modules = {one: path_of(one) for one in sorted(graph.modules) if not one.startswith(GENERATED)}
    problems = []

    imports = {one: graph.find_modules_directly_imported_by(one) & modules.keys() for one in modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        problems.append(f"modules import each other in a circle: {' -> '.join(error.args[1])}")

    problems += sorted(all_string_imports(modules))

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
        and len(importers := graph.find_modules_that_directly_import(one)) == 1
        and importers != {COMMANDS}
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
