"""Measures on a GPU, in one command of under nine minutes: decode, prefill, transfers, and a whole cluster.

    python -m benchmarks.gpu [--out DIR] [--only PART,PART | --but PART,PART] [--budget 520] [--rehearse]

Runs from a checkout with torch, triton, transformers, CuPy, grpcio, protobuf and numpy; weights are random. Parts:
  device        what is installed; bandwidth of a device copy and rates of matrix products, which all shares refer to
  llama-bf16    Llama-3.1-8B's shape: asynchronous decode through graphs, at every batch and context; then prefill
  llama-fp8     the same with fp8 weights
  qwen          Qwen3-0.6B's shape in bfloat16
  transfers     cuda_ipc and nccl between two processes, 1 MiB to 1 GiB; a decode step while they land
  serving       a prefill and a decode worker process on the one GPU: times, and the text against transformers'
  transformers  beside it: the Llama shape, static cache
Each part runs in its own process, so a crash does not affect the others. It appends each row to DIR/benchmark.jsonl at
once; DIR/table.md shows all rows, and for each bar whether it is met. A part that exceeds its time is killed and keeps
its rows; a part for which no time is left is reported as skipped. The exit code is 1 if a part failed; a missed bar is
not a failure. --rehearse runs the same code on a CPU in one process, with tiny models, Triton's interpreter and
stand-ins for devices.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu import stages
from benchmarks.gpu.report import FILE, append, error_text, read, table


@dataclass(frozen=True)
class BenchmarkPart:
    name: str
    most_s: float


PARTS: Final = (  # the most important first: the last part gets what is left of the budget
    BenchmarkPart("device", 40.0),
    BenchmarkPart("llama-bf16", 130.0),
    BenchmarkPart("transfers", 150.0),
    BenchmarkPart("serving", 200.0),
    BenchmarkPart("llama-fp8", 100.0),
    BenchmarkPart("qwen", 70.0),
    BenchmarkPart("transformers", 60.0),
)
BUDGET_S: Final = 520.0
_LEAST_S: Final = 15.0  # a part is not started with less time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", default=",".join(part.name for part in PARTS))
    parser.add_argument("--but", default="", help="all parts without these")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: figures mean nothing")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # in this process
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.part:
        run_part(flags.part, flags.out, is_rehearsal=flags.rehearse)
        return 0
    only, but = flags.only.split(","), flags.but.split(",") if flags.but else []
    wanted = [part for part in PARTS if part.name in only and part.name not in but]
    unknown = {*only, *but} - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not flags.rehearse and not has_cuda():
        print("no CUDA device: nothing was measured (--rehearse runs the script on a CPU)", file=sys.stderr)
        return 2
    ends_s = time.monotonic() + flags.budget
    for part in wanted:
        left_s = min(part.most_s, ends_s - time.monotonic())
        began_s = time.monotonic()
        print(f"\n# {part.name}, at most {max(0.0, left_s):.0f} s", flush=True)
        append(flags.out / FILE, part.name, title="", columns=["what"])  # removes the rows of an earlier run
        if left_s < _LEAST_S:
            note(flags.out, part.name, TimeoutError(f"SKIPPED: {left_s:.0f} s were left for it"))
        elif flags.rehearse:
            guarded(part.name, flags.out, lambda part=part: run_part(part.name, flags.out, is_rehearsal=True))  # type: ignore[misc]
        else:
            in_process(part.name, flags.out, left_s)
        print(f"# {part.name} took {time.monotonic() - began_s:.0f} s", flush=True)
        write_table(flags.out)
    print("\n" + (flags.out / "table.md").read_text())
    found = read(flags.out / FILE)
    return int(any(found[part.name].errors for part in wanted))


def has_cuda() -> bool:
    """Asks another process: a CUDA context in this one would hold memory that the parts need."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def in_process(name: str, out: Path, seconds: float, command: list[str] | None = None) -> None:
    command = command or stages.module("benchmarks.gpu", "--part", name, "--out", str(out))
    code = stages.run(command, seconds, lambda line: print(line, flush=True))
    if code == stages.OVER_TIME:  # noted when the part's process writes no longer
        note(out, name, TimeoutError(f"ended after {seconds:.0f} s"))
    elif code:
        note(out, name, RuntimeError(f"the part's process ended with {stages.why(code)}"))


def guarded(name: str, out: Path, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:
        note(out, name, error)


def note(out: Path, name: str, error: Exception) -> None:
    """Adds an error to the findings of the part."""
    print(f"# {error_text(name, error)}", flush=True)
    append(out / FILE, name, error=error_text(name, error))


def write_table(out: Path) -> None:
    (out / "table.md").write_text("\n\n".join(map(table, read(out / FILE).values())) + "\n")


def run_part(name: str, out: Path, *, is_rehearsal: bool) -> None:
    import torch

    from benchmarks.gpu.clock import CudaClock, HostClock
    from benchmarks.gpu.setting import full, rehearsal

    if is_rehearsal:
        from tests.gpu.interpreter import prepare

        if "pdserve.engine.gpu.static" not in sys.modules:
            prepare()
        setting = rehearsal(HostClock())
    else:
        torch.cuda.set_device(0)
        setting = full(CudaClock(), torch.cuda.mem_get_info()[0])
    from benchmarks.gpu import parts

    def transfers() -> None:  # these two need grpcio and protobuf; the others must not
        from benchmarks.gpu.transfers import transfers

        transfers(setting, out)

    def serving() -> None:
        from benchmarks.gpu.serving import serving

        serving(setting, out)

    runs: dict[str, Callable[[], None]] = {
        "device": lambda: parts.device(setting, out),
        "llama-bf16": lambda: parts.model(setting, out, name, parts.LLAMA, "bfloat16"),
        "llama-fp8": lambda: parts.model(setting, out, name, parts.LLAMA, "fp8"),
        "qwen": lambda: parts.model(setting, out, name, "qwen3-0.6b", "bfloat16"),
        "transfers": transfers,
        "serving": serving,
        "transformers": lambda: parts.peer(setting, out),
    }
    runs[name]()


if __name__ == "__main__":
    sys.exit(main())
