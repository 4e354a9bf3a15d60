"""A process that decides whether a grammar is admitted (pdserve/isolated/process.py starts it).

Its first message is {"model", "vocab_size", "eos"}, answered by {"failed": reason or null}. Each further one is
{"kind", "text", "for_older"}, answered by {"rejected": reason or null}. Each grammar is compiled in a process of its
own, because a few schemas ("multipleOf": 999983) make the compiler run for seconds and take hundreds of MiB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar, GrammarKind, path_of, resolve
from pdserve.isolated import child
from pdserve.structured.compile import NO_DOCUMENT, Compiler, refused, schema_of, why_stuck

# --- schemas without an end -----------------------------------------------------------------------------------
# Those whose documents are all infinite: a node that requires itself.
#
# llguidance follows such a schema until max_tokens, so admission rejects it. The rule is the least fixed point: a
# reference is finite if its target is, and everything else follows from its parts. Unknown features (anchors, other
# keywords) count as finite, so no satisfiable schema is rejected.


def is_endless(root: Mapping[str, Any]) -> bool:
    references = {one["$ref"] for one in _nodes(root) if _is_local(one.get("$ref"))}
    targets = {one: target for one in references if (target := _resolved(root, one)) is not None}
    finite = references - targets.keys()
    while newly := {one for one, target in targets.items() if one not in finite and _is_finite(target, finite)}:
        finite |= newly
    return not _is_finite(root, finite)


def _is_finite(node: object, finite: set[str]) -> bool:
    if not isinstance(node, Mapping) or "const" in node or "enum" in node:
        return True
    reference = node.get("$ref")
    if _is_local(reference) and reference not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _list(node, "allOf")):
        return False
    for choices in (_list(node, "anyOf"), _list(node, "oneOf")):
        if choices and not any(_is_finite(part, finite) for part in choices):
            return False
    kind = node.get("type")
    if kind in ("object", ["object"]):
        parts = _required_properties(node)
    elif kind in ("array", ["array"]):
        parts = _required_items(node)
    else:
        return True  # a document of another type may be finite
    return all(_is_finite(part, finite) for part in parts)


def _required_properties(node: Mapping[str, Any]) -> list[object]:
    properties = node.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return [known[name] for name in _list(node, "required") if isinstance(name, str) and name in known]


def _required_items(node: Mapping[str, Any]) -> list[object]:
    least = node.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return []
    items, rest = node.get("items"), "items"
    first = _list(node, "prefixItems")
    if isinstance(items, list):  # the form of draft 7
        first, rest = items, "additionalItems"
    return [*first[:least], *([node.get(rest)] if least > len(first) else [])]


def _nodes(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for part in value.values():
            yield from _nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nodes(part)


def _is_local(reference: object) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _resolved(root: Mapping[str, Any], reference: str) -> object:
    """The value of a JSON pointer (RFC 6901); None if there is none."""
    try:
        return resolve(root, path_of(reference))
    except LookupError:
        return None


def _list(node: Mapping[str, Any], name: str) -> list[Any]:
    held = node.get(name)
    return held if isinstance(held, list) else []


# --- process --------------------------------------------------------------------------------------------------

MAX_COMPILE_S: Final = 0.25  # of CPU: the most that a worker may spend between two steps
MEMORY_BYTES: Final = 256 * 2**20  # in addition to a child's memory at its start
PROBED_STEPS: Final = 16  # along the only possible continuation, or with the highest allowed token id


def main() -> int:
    load = child.begin()
    try:
        compiler = Compiler(Path(load["model"]), load["vocab_size"], load["eos"])
    except ModelError as error:
        child.send({"failed": str(error)})
        return 0
    _warm_up(compiler)
    child.send({"failed": None})

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        grammar = Grammar(GrammarKind(asked["kind"]), asked["text"])
        return {"rejected": reason_against(compiler, grammar, for_older=asked["for_older"])}

    child.serve(answer, MEMORY_BYTES, is_reused=False)
    return 0


def _warm_up(compiler: Compiler) -> None:
    """Initialises what the first grammar of a process needs, so that children share it."""
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT)).compute_bitmask()


def reason_against(compiler: Compiler, grammar: Grammar, *, for_older: bool = False) -> str | None:
    """Why `grammar` is rejected; None if it is admitted. `for_older`: some worker has an older library."""
    until_s = time.process_time() + MAX_COMPILE_S
    try:
        probe(grammar, compiler.compile(grammar, for_older=for_older), until_s)
        if grammar.kind is GrammarKind.JSON_SCHEMA and is_endless(schema_of(grammar)):
            return "Unsatisfiable schema: it requires itself, so that no document ends"
    except InvalidRequest as error:
        return str(error.seen)
    if time.process_time() > until_s:
        return f"it takes over {MAX_COMPILE_S:g} s to compile and begin"
    return None


def probe(grammar: Grammar, matcher: LLMatcher, until_s: float) -> None:
    """Raises InvalidRequest if no document can begin, or if its first steps cost too much."""
    is_forced = True
    for _ in range(PROBED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        is_forced = is_forced and mask & (mask - 1) == 0
        if matcher.is_error() or mask == 0 or not matcher.consume_token(mask.bit_length() - 1):
            reason = why_stuck(matcher)
            if is_forced or reason != NO_DOCUMENT:
                raise refused(grammar, reason)
            return  # a dead end; another continuation may exist
        if matcher.is_stopped() or time.process_time() > until_s:
            return


if __name__ == "__main__":
    sys.exit(main())
