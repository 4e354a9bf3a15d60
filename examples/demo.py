"""`make demo`: a whole cluster on this machine, real completions, and where each request's time went.

One router, one prefill worker and one decode worker serve the bundled model. The decode worker computes a short prompt
itself. The prefill worker computes longer ones and transfers their KV cache, unless the router predicts that the decode
worker would be faster, which can happen on a busy machine. The line under each timeline says where the request ran.
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
from pdserve.cli.generate import measured_rate
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
            run_one(client, 1, "a short prompt: the decode worker computes it itself", SHORT)
            longer = run_one(client, 2, "a longer prompt: usually prefilled on the prefill worker", READ_LINES)
            run_together(client, "two at once, batched on the same workers", FIND_FILES, PARSE_HEADER)
            show_reasons(client, longer)
            show_topology(client)
        print(dim("  draining"))
        status = cluster.stop()
    print(f"{bold('done')} in {time.monotonic() - began_s:.1f} s")
    show_next()
    return status


def show_next() -> None:
    """Where to look: a page on which something moves within seconds."""
    print(f"\n{bold('watch a cluster')}: start one, send it requests from a second terminal, and open the page")
    print("  .venv/bin/pdserve up --http 8000")
    print("  .venv/bin/pdserve bench --url http://127.0.0.1:8000 --rate 4")
    print("  http://127.0.0.1:8000/ui   or in a third terminal: .venv/bin/pdserve top")
    print(f"{bold('talk to it')}: .venv/bin/pdserve chat")
    print(f"{bold('what the rows mean')}: docs/telemetry.md#phases")


def show_prompt(title: str, prompt: str) -> None:
    print(f"\n{bold(title)}")
    for line in prompt.split("\n"):
        print(f"{dim('│')} {cyan(line)}")


def run_one(client: Client, number: int, title: str, prompt: str) -> Completion:
    show_prompt(f"{number} · {title}", prompt)
    with client.stream(prompt, slo=Slo(ttft_s=2.0, tpot_s=0.2), **SAMPLING) as stream:  # type: ignore[arg-type]
        for piece in stream:
            print(piece.text, end="", flush=True)
    print("\n\n" + timeline(stream.completion))
    return stream.completion


def run_together(client: Client, title: str, *prompts: str) -> None:
    print(f"\n{bold(f'3, 4 · {title}; shown one after the other')}")
    streams = [StreamThread(client, prompt) for prompt in prompts]
    for stream in streams:
        stream.start()
    for number, stream in enumerate(streams, start=3):
        stream.join()
        if stream.error is not None:
            raise stream.error
        assert stream.completion is not None
        show_prompt(f"{number}", stream.prompt)
        print(f"{stream.completion.text}\n\n{timeline(stream.completion)}")


class StreamThread(threading.Thread):
    """Streams one answer in a thread of its own."""

    def __init__(self, client: Client, prompt: str) -> None:
        super().__init__(daemon=True)
        self._client, self.prompt = client, prompt
        self.completion: Completion | None = None
        self.error: PdserveError | None = None

    def run(self) -> None:
        try:
            with self._client.stream(self.prompt, **SAMPLING) as stream:  # type: ignore[arg-type]
                for _ in stream:
                    pass
            self.completion = stream.completion
        except PdserveError as error:
            self.error = error


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    begin_s: float
    took_s: float
    color: Callable[[str], str]


def timeline(done: Completion) -> str:
    """A bar for each phase. The bars follow each other, and together they cover the whole time of the request."""
    times = done.timings
    bars: list[Bar] = []
    begin_s = 0.0
    for name, took_s in times.phases.shown():
        bars.append(Bar(name, begin_s, took_s, COLORS.get(name, dim)))
        begin_s += took_s
    lines = [f"  {bar.name:<14}{milliseconds(bar.took_s)}  {draw(bar, times.total_s)}" for bar in bars]
    where = f"{times.prefill_worker} → {times.decode_worker}" if times.path == "remote" else times.decode_worker
    moved = []
    if times.transfer_bytes:
        moved.append(f"{times.transfer_bytes / 1024:.0f} KiB of KV transferred")
    if times.transfer_saved_bytes:
        moved.append(f"{times.transfer_saved_bytes / 1024:.0f} KiB already cached")
    if times.transfer_exposed_s:
        moved.append(f"complete {times.transfer_exposed_s * 1e3:.1f} ms after the prefill")
    facts = [
        f"{done.usage.prompt_tokens} + {done.usage.completion_tokens} tokens",
        f"first after {times.ttft_s * 1e3:.0f} ms",
    ]
    if (rate := measured_rate(done)) is not None:
        facts.append(f"then {rate:.0f} tokens/s")
    lines.append(dim(f"  {times.path} on {where}: {', '.join(facts)}"))
    if moved:
        lines.append(dim(f"  {', '.join(moved)}"))
    return "\n".join(lines)


def draw(bar: Bar, total_s: float) -> str:
    scale = WIDTH / total_s if total_s > 0 else 0.0
    begin = min(WIDTH - 1, int(bar.begin_s * scale))
    length = min(WIDTH - begin, round(bar.took_s * scale))
    return " " * begin + bar.color("█" * length if length else "▏")


def show_reasons(client: Client, done: Completion) -> None:
    explained = client.explain(done.request_id)
    print(f"\n{bold('why request 2 was placed there')}: {explained.decision}, {explained.reason}")
    for candidate in explained.candidates:
        where = f"{candidate.decode_worker} alone"
        if candidate.prefill_worker:
            where = f"{candidate.prefill_worker} → {candidate.decode_worker}"
        preference = f" (of it {percent(candidate.preference)} preference)" if candidate.preference else ""
        chosen = "  ← chosen" if candidate.is_chosen else ""
        print(
            f"  {where:<10} predicted TTFT {milliseconds(candidate.predicted_ttft_s)}, "
            f"TPOT {milliseconds(candidate.predicted_tpot_s)}, cost {percent(candidate.cost)}{preference}{chosen}"
        )


def show_topology(client: Client) -> None:
    topology = client.topology()
    workers = ", ".join(
        f"{worker.worker_id} {worker.role} ({worker.free_blocks} blocks free, {worker.evictable_blocks} cached)"
        for worker in topology.workers
    )
    print(f"\n{bold('topology')}: {topology.router_id} → {workers}")


def show_start(line: str) -> None:
    """Prints the launcher's own lines from the output of `pdserve up`, and drops the workers' logs."""
    if LAUNCHER.match(line) and any(word in line for word in (" listens on ", " still ", " again ")):
        say(dim(line))


def say(line: str) -> None:
    """Prints with one write, so lines of two threads do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:7.1f} ms"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


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
