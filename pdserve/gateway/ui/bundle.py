"""Joins ES modules into one script, in the order of their imports. Pure.

The joined modules share one scope. A name that two modules define, an import of a name that is not exported, and a
cycle of imports are therefore errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:const|let|function|class)\b)", re.MULTILINE)
_DEFINED: Final = re.compile(r"^(export )?(?:async )?(?:const|let|function|class) (\w+)", re.MULTILINE)
_OTHER: Final = re.compile(r"^(?:import|export)\b", re.MULTILINE)


def bundle(sources: Mapping[str, str], entry: str) -> str:
    """`sources`: text of each module by file name. Returns `entry` after everything that it imports. Raises ValueError
    for a missing module or name, a cycle, a name that two modules define, or a form of import or export that is not
    `import { a, b } from "./file.js";` or `export` before a declaration."""
    order = _in_order(sources, entry)
    exported: dict[str, set[str]] = {}
    defined_in: dict[str, str] = {}
    parts = []
    for name in order:
        source = sources[name]
        _check_imports(name, source, exported)
        found = _DEFINED.findall(source)
        exported[name] = {symbol for is_exported, symbol in found if is_exported}
        for _, symbol in found:
            if symbol in defined_in:
                raise ValueError(f"{name} and {defined_in[symbol]} both define {symbol}")
            defined_in[symbol] = name
        body = _EXPORT.sub("", _IMPORT.sub("", source))
        if _OTHER.search(body):
            raise ValueError(f"{name} has a form of import or export that is not supported")
        parts.append(f"// {name}\n{body.strip()}\n")
    return "\n".join(parts)


def _in_order(sources: Mapping[str, str], entry: str) -> list[str]:
    order: list[str] = []
    begun: set[str] = set()

    def visit(name: str, needed_by: str) -> None:
        if name in order:
            return
        if name not in sources:
            raise ValueError(f"{needed_by} imports {name}, which does not exist")
        if name in begun:
            raise ValueError(f"{needed_by} imports {name}, which imports {needed_by} in turn")
        begun.add(name)
        for _, other in _IMPORT.findall(sources[name]):
            visit(other, name)
        order.append(name)

    visit(entry, "the page")
    return order


def _check_imports(name: str, source: str, exported: Mapping[str, set[str]]) -> None:
    for names, other in _IMPORT.findall(source):
        for symbol in filter(None, (part.strip() for part in names.split(","))):
            if symbol not in exported[other]:
                raise ValueError(f"{name} imports {symbol}, which {other} does not export")
