"""A process that says whether a grammar may be admitted: `python -m pdserve.structured.checker MODEL VOCAB EOS...`.

It reads one JSON object {"kind", "text", "cpu_s", "wall_s"} a line and answers each with {"refused": reason or null,
"ended": how or null}; the first line that it writes is {"failed": reason or null}. Each grammar is compiled in a
child of its own, since a few schemas ("multipleOf": 999983) make the compiler run for seconds and take hundreds of
MiB, and only a process can be bounded in both and ended in the middle. A child ends by SIGPROF where a grammar takes
over `cpu_s` of CPU, and as it can where memory is refused; `ended` is then minus the signal's number, or the exit
status; LATE where it got too little CPU within `wall_s`. The vocabulary stays loaded. The process ends with its
stdin.
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

MAX_COMPILE_S: Final = 0.25  # of CPU: what a worker may have to spend between two steps
LONGEST_S: Final = 2 * MAX_COMPILE_S  # of CPU: beyond it there is nothing to wait for
MEMORY_BYTES: Final = 256 * 2**20  # over what a child holds when it begins
LATE: Final = -signal.SIGALRM  # as if it had been set an alarm
PROBED_STEPS: Final = 16  # along the only possible way, or the token of the highest number


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
    """The answer to a question. This process has one thread, so that it may fork."""
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
        return {"refused": None, "ended": ended}
    found = json.loads(answer)
    return {"refused": None if found is None else str(found), "ended": None}


def _answer_and_exit(compiler: Compiler, grammar: Grammar, cpu_s: float, writer: int) -> NoReturn:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # not a handler's to catch: the compiler is in native code
        _bound_memory()
        reason = reason_against(compiler, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.write(writer, json.dumps(reason).encode())
    except BaseException:  # what is left of a parent's work must not go on here
        os._exit(1)
    os._exit(0)


def _warm_up(compiler: Compiler) -> None:
    """What the first grammar of a process has to make; children then share it."""
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT)).compute_bitmask()


def reason_against(compiler: Compiler, grammar: Grammar) -> str | None:
    """Why `grammar` is refused; None where it is not."""
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
    """Raises InvalidRequest where the document cannot begin, or where the first steps of one cost too much."""
    is_forced = True
    for _ in range(PROBED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        is_forced = is_forced and mask & (mask - 1) == 0
        if matcher.is_error() or mask == 0 or not matcher.consume_token(mask.bit_length() - 1):
            reason = why_stuck(matcher)
            if is_forced or reason != NO_DOCUMENT:
                raise refused(grammar, reason)
            return  # a dead end; there may be another way
        if matcher.is_stopped() or time.process_time() > until_s:
            return


def _bound_memory() -> None:
    """Past it the allocator fails and the process ends."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))


def _say(message: dict[str, str | int | None]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
