"""A process that says whether a grammar may be admitted: `python -m pdserve.structured.checker MODEL VOCAB EOS...`.

It reads one JSON object {"kind", "text"} a line and answers each with {"refused": reason or null}; the first line
that it writes is {"failed": reason or null}. A process of its own, since a few schemas ("multipleOf": 999983) make the
compiler run for seconds and take hundreds of MiB, and only a process can be bounded in both and ended in the middle.
It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Final

from llguidance import LLMatcher

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.structured.compile import Compiler, refused, schema_of, why_stuck
from pdserve.structured.endless import is_endless

MAX_COMPILE_S: Final = 0.25  # of CPU: what a worker may have to spend between two steps
MEMORY_BYTES: Final = 256 * 2**20  # over what the process holds when it begins
FORCED_STEPS: Final = 16  # so far the only possible way is followed


def main(arguments: list[str]) -> int:
    model, vocab_size, *ends = arguments
    try:
        compiler = Compiler(Path(model), int(vocab_size), [int(end) for end in ends])
    except ModelError as error:
        _say({"failed": str(error)})
        return 0
    _bound_memory()
    _say({"failed": None})
    for line in sys.stdin:
        asked = json.loads(line)
        _say({"refused": reason_against(compiler, Grammar(GrammarKind(asked["kind"]), asked["text"]))})
    return 0


def reason_against(compiler: Compiler, grammar: Grammar) -> str | None:
    """Why `grammar` is refused; None where it is not."""
    began_s = time.process_time()
    try:
        probe(grammar, compiler.compile(grammar))
        if grammar.kind is GrammarKind.JSON_SCHEMA and is_endless(schema_of(grammar)):
            return "Unsatisfiable schema: it requires itself, so that no document ends"
    except InvalidRequest as error:
        return str(error.seen)
    spent_s = time.process_time() - began_s
    if spent_s > MAX_COMPILE_S:
        return f"{spent_s:.1f} s to compile, where {MAX_COMPILE_S:g} s are allowed"
    return None


def probe(grammar: Grammar, matcher: LLMatcher) -> None:
    """Raises InvalidRequest where the document cannot begin; follows the only possible way for some steps."""
    for _ in range(FORCED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or mask == 0:
            raise refused(grammar, why_stuck(matcher))
        if matcher.is_accepting() or mask & (mask - 1):
            return
        matcher.consume_token(mask.bit_length() - 1)


def _bound_memory() -> None:
    """Past it the allocator fails and the process ends."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))


def _say(message: dict[str, str | None]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
