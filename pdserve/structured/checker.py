"""A process that decides whether a grammar is admitted: `python -m pdserve.structured.checker MODEL VOCAB EOS...`.

It reads one JSON object {"kind", "text", "cpu_s", "wall_s"} a line and answers each with {"rejected": reason or null,
"ended": how or null}; the first line that it writes is {"failed": reason or null}. Each grammar is compiled in a child
process, because a few schemas ("multipleOf": 999983) make the compiler run for seconds and take hundreds of MiB, and
only a process can be limited in both and killed. A child ends by SIGPROF if a grammar takes more than `cpu_s` of CPU,
and by an error if it exceeds its memory; `ended` is then minus the signal's number, or the exit status. LATE means that
it got too little CPU within `wall_s`. The vocabulary stays loaded. The process ends when its stdin is closed.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

from llguidance import LLMatcher

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.structured.compile import NO_DOCUMENT, Compiler, refused, schema_of, why_stuck
from pdserve.structured.endless import is_endless

MAX_COMPILE_S: Final = 0.25  # of CPU: the most that a worker may spend between two steps
LONGEST_S: Final = 2 * MAX_COMPILE_S  # of CPU: upper limit of `cpu_s`
MEMORY_BYTES: Final = 256 * 2**20  # in addition to a child's memory at its start
LATE: Final = -signal.SIGALRM  # like the end by an alarm
PROBED_STEPS: Final = 16  # along the only possible continuation, or with the highest allowed token id


def main(arguments: list[str]) -> int:
    model, vocab_size, *ends = arguments
    try:
        compiler = Compiler(Path(model), int(vocab_size), [int(end) for end in ends])
    except ModelError as error:
        _say({"failed": str(error)})
        return 0
    _warm_up(compiler)
    _say({"failed": None})
    for line in sys.stdin:
        asked = json.loads(line)
        _say(
            check_in_child(
                compiler, Grammar(GrammarKind(asked["kind"]), asked["text"]), asked["cpu_s"], asked["wall_s"]
            )
        )
    return 0


def check_in_child(compiler: Compiler, grammar: Grammar, cpu_s: float, wall_s: float) -> dict[str, str | int | None]:
    """Answers one request. This process has one thread, so that it may fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_and_exit(compiler, grammar, cpu_s, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as answers:
        is_late = not select.select([reader], [], [], wall_s)[0]
        if is_late:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    ended = LATE if is_late else os.waitstatus_to_exitcode(status)
    if ended != 0:
        return {"rejected": None, "ended": ended}
    found = json.loads(answer)
    return {"rejected": None if found is None else str(found), "ended": None}


def _answer_and_exit(compiler: Compiler, grammar: Grammar, cpu_s: float, writer: int) -> NoReturn:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # not caught by a handler, because the compiler is native code
        _bound_memory()
        reason = reason_against(compiler, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.write(writer, json.dumps(reason).encode())
    except BaseException:  # the parent's remaining work must not continue in the child
        os._exit(1)
    os._exit(0)


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


def _bound_memory() -> None:
    """Beyond it the allocator fails and the process ends."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))


def _say(message: dict[str, str | int | None]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
