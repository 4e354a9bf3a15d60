"""Measures on a GPU, in one command of under nine minutes: decode, prefill, transfers, and a whole cluster.

    python -m benchmarks.gpu [--out DIR] [--only PART,PART | --but PART,PART] [--budget 520] [--rehearse]
    PDSERVE_GPU=merge=fused python -m benchmarks.gpu --only llama-bf16 --cases 'decode 1 x 1024,prefill 4096' \\
        --block-size 64 --chunk-tokens 8192 --kv-dtype fp8

Runs from a checkout with torch, triton, transformers, CuPy, grpcio, protobuf and numpy; weights are random. Parts:
  device        what is installed; bandwidth of a device copy and rates of matrix products, which all shares refer to
  llama-bf16    Llama-3.1-8B's shape: asynchronous decode through graphs, at every batch and context; then prefill
  llama-fp8     the same with fp8 weights
  qwen          Qwen3-0.6B's shape in bfloat16
  transfers     cuda_ipc and nccl between two processes, 1 MiB to 1 GiB; a decode step while they land
  serving       a prefill and a decode worker process on the one GPU: times, and the text against transformers'
  transformers  beside it: the Llama shape, static cache
Each part runs in its own process, so a crash does not affect the others. It appends each row to DIR/benchmark.jsonl at
once; DIR/table.md shows all rows, and for each bar whether it is met. DIR is $OUT if that is set. A part that exceeds
its time is killed and keeps its rows; a part for which no time is left is reported as skipped. The exit code is 1 if a
part failed; a missed bar is not a failure. --cases measures some cases of a part; the second command above compares
switches (pdserve/engine/gpu/kernels/switches.py) and settings, whose findings stand beside those without them.
--rehearse runs the same code on a CPU in one process, with tiny models, Triton's interpreter and stand-ins for devices.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.gpu import stages
from benchmarks.gpu.failures import out_folder
from benchmarks.gpu.report import FILE, append, error_text, read, table
from benchmarks.gpu.setting import PartChoice
from pdserve.engine.gpu.kernels.switches import VARIABLE


@dataclass(frozen=True)
class BenchmarkPart:
    name: str
    most_s: float


PARTS: Final = (  # the most important first: the last part gets what is left of the budget
    BenchmarkPart("device", 70.0),  # with the first import of every library, from a cold disk
    BenchmarkPart("llama-bf16", 130.0),
    BenchmarkPart("transfers", 150.0),
    BenchmarkPart("serving", 130.0),
    BenchmarkPart("llama-fp8", 100.0),
    BenchmarkPart("qwen", 70.0),
    BenchmarkPart("transformers", 60.0),
)
COMPARED: Final = ("block_size", "chunk_tokens", "kv_dtype")  # settings that a run may change
BUDGET_S: Final = 520.0
_LEAST_S: Final = 15.0  # a part is not started with less time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out_folder())
    parser.add_argument("--only", default=",".join(part.name for part in PARTS))
    parser.add_argument("--but", default="", help="all parts without these")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: figures mean nothing")
    parser.add_argument("--cases", default="", metavar="REGEX", help="of a part: how their names begin")
    parser.add_argument("--from", default="", dest="start", metavar="CASE", help="begin with this case of a part")
    for name in COMPARED:
        kind = type(getattr(PartChoice, name, ""))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--failed", type=int, default=0, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    os.environ["OUT"] = str(flags.out)
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.part:
        choice = choice_of(flags.part, flags)
        guarded(choice.label, flags.out, lambda: run_part(flags.part, flags.out, choice, is_rehearsal=flags.rehearse))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that stages.run ends the part's processes
    only, but = flags.only.split(","), flags.but.split(",") if flags.but else []
    parts = {part.name: part for part in PARTS}
    wanted = [parts[name] for name in only if name in parts and name not in but]  # in the order that was asked for
    unknown = {*only, *but} - {*parts}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not flags.rehearse and not has_cuda():
        print("no CUDA device: nothing was measured (--rehearse runs the script on a CPU)", file=sys.stderr)
        return 2
    ends_s = time.monotonic() + flags.budget
    choices = {part.name: choice_of(part.name, flags) for part in wanted}
    for part in wanted:
        choice = choices[part.name]
        left_s = min(part.most_s, ends_s - time.monotonic())
        began_s = time.monotonic()
        print(f"\n# {choice.label}, at most {max(0.0, left_s):.0f} s", flush=True)
        append(flags.out / FILE, choice.label, title="", columns=["what"])  # removes the rows of an earlier run
        if left_s < _LEAST_S:
            note(flags.out, choice.label, TimeoutError(f"SKIPPED: {left_s:.0f} s were left for it"))
        elif flags.rehearse:
            run = partial(run_part, part.name, flags.out, choice, is_rehearsal=True)
            guarded(choice.label, flags.out, run)
        else:
            in_process(
                choice.label, flags.out, left_s, stages.module("benchmarks.gpu", "--part", part.name, *sys.argv[1:])
            )
        print(f"# {choice.label} took {time.monotonic() - began_s:.0f} s", flush=True)
        write_table(flags.out)
    found = read(flags.out / FILE)
    print("\n" + "\n\n".join(table(found[choice.label]) for choice in choices.values()))
    return int(any(found[choice.label].errors for choice in choices.values()))


def choice_of(part: str, flags: argparse.Namespace) -> PartChoice:
    """The findings of a part are labelled by its name, and by what differs from its other runs."""
    changed = {name: value for name in COMPARED if (value := getattr(flags, name)) is not None}
    switches = os.environ.get(VARIABLE, "")
    label = " ".join([part, *filter(None, [switches]), *(f"{name}={value}" for name, value in changed.items())])
    return PartChoice(label=label, only=flags.cases, start=flags.start, num_failed=flags.failed, **changed)


def has_cuda() -> bool:
    """Asks another process: a CUDA context in this one would hold memory that the parts need."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def in_process(name: str, out: Path, seconds: float, command: list[str]) -> None:
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
    text = error_text(name, error, out)
    print(f"# {text}", flush=True)
    append(out / FILE, name, error=text)


def write_table(out: Path) -> None:
    (out / "table.md").write_text("\n\n".join(map(table, read(out / FILE).values())) + "\n")


def run_part(name: str, out: Path, choice: PartChoice, *, is_rehearsal: bool) -> None:
    import torch

    from benchmarks.gpu.clock import CudaClock, HostClock
    from benchmarks.gpu.setting import full, rehearsal

    if is_rehearsal:
        from tests.gpu.interpreter import prepare

        if "pdserve.engine.gpu.graphs" not in sys.modules:
            prepare()
        setting = rehearsal(HostClock(), choice)
    else:
        torch.cuda.set_device(0)
        setting = full(CudaClock(), torch.cuda.mem_get_info()[0], choice)
    from benchmarks.gpu import parts

    def transfers() -> None:  # these two need grpcio and protobuf; the others must not
        from benchmarks.gpu.transfers import transfers

        transfers(setting, out)

    def serving() -> None:
        from benchmarks.gpu.serving import serving

        serving(setting, out)

    runs: dict[str, Callable[[], None]] = {
        "device": lambda: parts.device(setting, out),
        "llama-bf16": lambda: parts.model(setting, out, parts.LLAMA, "bfloat16"),
        "llama-fp8": lambda: parts.model(setting, out, parts.LLAMA, "fp8"),
        "qwen": lambda: parts.model(setting, out, "qwen3-0.6b", "bfloat16"),
        "transfers": transfers,
        "serving": serving,
        "transformers": lambda: parts.peer(setting, out),
    }
    runs[name]()


if __name__ == "__main__":
    sys.exit(main())
