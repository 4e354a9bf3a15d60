"""`make demo`: a whole cluster on this machine, real completions, and where each request's time went.

One router, one prefill worker and one decode worker serve the bundled model. A short prompt stays on the decode
worker; longer ones are read by the prefill worker, and their KV cache travels, unless the router predicts that the
decode worker is quicker, as it may be on a busy machine. Each timeline ends with the path that the request took.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve import Client, Completion, Slo
from pdserve.core.errors import PdserveError
from pdserve.launch.running import Running

WIDTH: Final = 46
LAUNCHER: Final = re.compile(r" *\d+\.\d+ s  ")
SHORT: Final = "import os"
READ_LINES: Final = '''import os
import re

def read_lines(path, encoding="utf-8"):
    """Read a text file and return its lines without the line endings."""
    with open(path, encoding=encoding) as file:'''
FIND_FILES: Final = '''class Finder:
    """Find the files below a directory whose names match a pattern."""

    def __init__(self, directory, pattern):
        self.directory = directory
        self.pattern = re.compile(pattern)

    def find(self):'''
PARSE_HEADER: Final = '''def parse_header(line):
    """Parse a header line and return its name and its value.

    Raise ValueError if the line has no colon.
    """
    if ":" not in line:'''
SAMPLING: Final = {
    "max_tokens": 72,
    "min_tokens": 40,
    "temperature": 0.6,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "seed": 7,
}


def main() -> int:
    began_s = time.monotonic()
    print(bold("pdserve demo") + ": 1 router, 1 prefill worker, 1 decode worker, a real Redis, on this machine")
    with Running.start("--prefill", "1", "--decode", "1", on_line=show_start) as cluster:
        print(dim(f"  {cluster.ready_line}"))
        with Client(cluster.target) as client:
            one(client, 1, "a short prompt: the decode worker reads it itself", SHORT)
            longest = one(client, 2, "a longer prompt: mostly worth a prefill worker; its KV cache travels", READ_LINES)
            both(client, "two at once, batched on the same workers", FIND_FILES, PARSE_HEADER)
            show_reasons(client, longest)
            show_topology(client)
        print(dim("  draining"))
        status = cluster.stop()
    took = f"{bold('done')} in {time.monotonic() - began_s:.1f} s"
    print(f"{took}; now try: .venv/bin/pdserve up, and beside it .venv/bin/pdserve chat")
    return status


def one(client: Client, number: int, title: str, prompt: str) -> Completion:
    print(f"\n{bold(f'{number} · {title}')}")
    for line in prompt.split("\n"):
        print(f"{dim('│')} {cyan(line)}")
    with client.stream(prompt, slo=Slo(ttft_s=2.0, tpot_s=0.2), **SAMPLING) as stream:  # type: ignore[arg-type]
        for piece in stream:
            print(piece.text, end="", flush=True)
    print("\n\n" + timeline(stream.completion))
    return stream.completion


def both(client: Client, title: str, *prompts: str) -> None:
    print(f"\n{bold(f'3, 4 · {title}')}")
    talks = [Talk(client, f"{number}", prompt) for number, prompt in enumerate(prompts, start=3)]
    for talk in talks:
        talk.start()
    for talk in talks:
        talk.join()
    for talk in talks:
        if talk.error is not None:
            raise talk.error
        assert talk.completion is not None
        print(f"\n{bold(talk.name)}\n{timeline(talk.completion)}")


class Talk(threading.Thread):
    """One stream beside others; prints whole lines, as soon as each is complete."""

    def __init__(self, client: Client, number: str, prompt: str) -> None:
        super().__init__(name=number, daemon=True)
        self._client, self._prompt = client, prompt
        self.completion: Completion | None = None
        self.error: PdserveError | None = None

    def run(self) -> None:
        prefix = bold(f"{self.name} ")
        for line in self._prompt.split("\n"):
            say(f"{prefix}{dim('│')} {cyan(line)}")
        rest = ""
        try:
            with self._client.stream(self._prompt, **SAMPLING) as stream:  # type: ignore[arg-type]
                for piece in stream:
                    *lines, rest = (rest + piece.text).split("\n")
                    for line in lines:
                        say(f"{prefix}  {line}")
            self.completion = stream.completion
            say(f"{prefix}  {rest}")
        except PdserveError as error:
            self.error = error


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    begin_s: float
    took_s: float
    color: Callable[[str], str]


def timeline(done: Completion) -> str:
    """A bar for each phase, end to end: together they are the whole time of the request."""
    times = done.timings
    bars: list[Bar] = []
    begin_s = 0.0
    for name, took_s in times.phases.shown():
        bars.append(Bar(name, begin_s, took_s, COLORS.get(name, dim)))
        begin_s += took_s
    lines = [f"  {bar.name:<14}{milliseconds(bar.took_s)}  {draw(bar, times.total_s)}" for bar in bars]
    where = f"{times.prefill_worker} → {times.decode_worker}" if times.path == "remote" else times.decode_worker
    moved = f", {times.transfer_bytes / 1024:.0f} KiB of KV moved" if times.transfer_bytes else ""
    if times.transfer_saved_bytes:
        moved += f", {times.transfer_saved_bytes / 1024:.0f} KiB were there"
    if times.transfer_exposed_s:
        moved += f", all of it {times.transfer_exposed_s * 1e3:.1f} ms after the prompt was read"
    rate = f"{1 / times.tpot_s:.0f} tokens/s" if times.tpot_s > 0 else "one token"
    lines.append(
        dim(
            f"  {times.path} on {where}: {done.usage.prompt_tokens} + {done.usage.completion_tokens} tokens, "
            f"first after {times.ttft_s * 1e3:.0f} ms, then {rate}{moved}"
        )
    )
    return "\n".join(lines)


def draw(bar: Bar, total_s: float) -> str:
    scale = WIDTH / total_s if total_s > 0 else 0.0
    begin = min(WIDTH - 1, int(bar.begin_s * scale))
    length = min(WIDTH - begin, round(bar.took_s * scale))
    return " " * begin + bar.color("█" * length if length else "▏")


def show_reasons(client: Client, done: Completion) -> None:
    explained = client.explain(done.request_id)
    print(f"\n{bold('why request 2 went where it went')}: {explained.decision}, {explained.reason}")
    for one in explained.candidates:
        where = f"{one.prefill_worker} → {one.decode_worker}" if one.prefill_worker else f"{one.decode_worker} alone"
        chosen = "  ← chosen" if one.is_chosen else ""
        print(
            f"  {where:<10} predicted first token {milliseconds(one.predicted_ttft_s)}, "
            f"then {milliseconds(one.predicted_tpot_s)} each{chosen}"
        )


def show_topology(client: Client) -> None:
    topology = client.topology()
    workers = ", ".join(
        f"{worker.worker_id} {worker.role} ({worker.free_blocks} blocks free, {worker.evictable_blocks} cached)"
        for worker in topology.workers
    )
    print(f"\n{bold('topology')}: {topology.router_id} → {workers}")
    print(f"{bold('next')}: pdserve up --http 8000, then open http://127.0.0.1:8000/ui to watch requests move")


def show_start(line: str) -> None:
    """The launcher's own lines of the output of `pdserve up`, without the workers' logs."""
    if LAUNCHER.match(line) and any(word in line for word in (" listens on ", " still ", " again ")):
        say(dim(line))


def say(line: str) -> None:
    """One write, so that two threads do not write into each other's lines."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:7.1f} ms"


def paint(code: str) -> Callable[[str], str]:
    is_wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def painted(text: str) -> str:
        if not is_wanted:
            return text
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else line for line in text.split("\n"))

    return painted


bold, dim, cyan, yellow, green = (paint(code) for code in ("1", "2", "36", "33", "32"))
COLORS: Final = {"prefill": cyan, "transfer wait": yellow, "decode": green}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except PdserveError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(1)
