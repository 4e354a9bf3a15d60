"""A process that decides whether a grammar is admitted (pdserve/isolated/process.py starts it).

Its first message is {"model", "vocab_size", "eos"}, answered by {"failed": reason or null}. Each further one is
{"kind", "text"}, answered by {"rejected": reason or null}. Each grammar is compiled in a process of its own, because a
few schemas ("multipleOf": 999983) make the compiler run for seconds and take hundreds of MiB.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.isolated import child
from pdserve.structured.compile import NO_DOCUMENT, Compiler, refused, schema_of, why_stuck
from pdserve.structured.endless import is_endless

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
        return {"rejected": reason_against(compiler, Grammar(GrammarKind(asked["kind"]), asked["text"]))}

    child.serve(answer, MEMORY_BYTES, is_reused=False)
    return 0


def _warm_up(compiler: Compiler) -> None:
    """Initialises what the first grammar of a process needs, so that children share it."""
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT)).compute_bitmask()


def reason_against(compiler: Compiler, grammar: Grammar) -> str | None:
    """Why `grammar` is rejected; None if it is admitted."""
    until_s = time.process_time() + MAX_COMPILE_S
    try:
        probe(grammar, compiler.compile(grammar), until_s)
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
