"""Runs all checks that need a GPU, several at once, within seven minutes. Prints one table.

    python -m tests.gpu [--out DIR] [--only kernels,engine] [--budget 420] [--rehearse]

  kernels    every Triton kernel against float64 (check_kernels), in two processes
  graphs     captured decode steps against the same steps uncaptured, no waiting in a launch (check_graphs): the bundled
             model, and two times two families, in three processes
  engine     the eager engine against transformers, every family (check_engine)
  transfer   cuda_ipc and nccl between two processes, one of which is killed (check_transfer)
  tiers      the host tier of a pool: bytes, rates, a step beside them (check_tiers)
  times      every kernel's time against floors (check_kernels --times)

Each check runs in a process of its own, so that an error in one does not affect the others, and is killed when its time
is over. `transfer`, `tiers` and `times` have deadlines or measure time, so nothing else runs beside them. Output lines
are printed as they arrive, with the name of their check, and are also written to DIR/checks.log ($OUT if it is set).
Failures are repeated at the end and written to DIR/checks.md, tracebacks to DIR/traces.txt. Exit code 1 if a check
failed, 2 without a CUDA device. --rehearse runs them on a CPU. scripts/gpu has the checks of a first run, in an order
for fifteen minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import torch

from benchmarks.gpu.failures import out_folder
from benchmarks.gpu.stages import module, run, why

ATTENTION: Final = "attention,norms"  # files of kernels that take as long to compile as all others
TOGETHER: Final = {  # that run at once; mostly compilers, which share a GPU well
    "kernels": module("tests.gpu.check_kernels", "--errors", "--only", ATTENTION),
    "kernels-1": module("tests.gpu.check_kernels", "--errors", "--only", f"(?!{ATTENTION.replace(',', '|')}).*"),
    "graphs": module("tests.gpu.check_graphs", "--only", "stdlib-5m"),
    "graphs-1": module("tests.gpu.check_graphs", "--only", "llama,qwen3"),
    "graphs-2": module("tests.gpu.check_graphs", "--only", "gemma2,mistral-window"),
    "engine": module("tests.gpu.check_engine"),
}
ALONE: Final = {
    "transfer": module("tests.gpu.check_transfer"),
    "tiers": module("tests.gpu.check_tiers"),
    "times": module("tests.gpu.check_kernels", "--times"),
}
REHEARSED: Final = {
    "kernels": module("tests.gpu.check_kernels", "--rehearse", "--errors"),
    "transfer": module("tests.gpu.check_transfer", "--rehearse"),
    "tiers": module("tests.gpu.check_tiers", "--rehearse"),
    "graphs": module("tests.gpu.check_graphs", "--rehearse"),
}
BUDGET_S: Final = 420.0
TOGETHER_S: Final = 240.0  # of it at most, so that something is left for the others
ALONE_S: Final = 110.0  # each
_LEAST_S: Final = 20.0  # no check is started with less time than this
_MOST_TOLD: Final = 60  # lines of failures that are repeated at the end of the output


@dataclass
class Check:
    name: str
    lines: list[str] = field(default_factory=list)
    result: str = ""  # why it failed
    took_s: float = 0.0


@final
class Log:
    """Prints the lines of several checks that run at once, and writes them to a file."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checks.log").write_text("")

    def say(self, line: str) -> None:
        with self._lock:
            print(line, flush=True)
            with (self._folder / "checks.log").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def keep(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out_folder())
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all checks")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs what can be)", file=sys.stderr)
        return 2
    known = REHEARSED if args.rehearse else TOGETHER | ALONE
    names = args.only.split(",") if args.only else list(known)
    for kind in ("graphs", "kernels"):
        if kind in names:  # all of them
            names += [name for name in known if name.startswith(f"{kind}-") and name not in names]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    os.environ["OUT"] = str(args.out)  # where their traces go
    return session({name: known[name] for name in names}, args.budget, args.out)


def session(commands: dict[str, list[str]], budget_s: float, folder: Path) -> int:
    """Runs the checks; those of ALONE run after the others. Returns the exit code."""
    log, ends_s = Log(folder), time.monotonic() + budget_s
    together = [Check(name) for name in commands if name not in ALONE]
    alone = [Check(name) for name in commands if name in ALONE]
    most_s = min(budget_s, TOGETHER_S) if alone else budget_s
    threads = [threading.Thread(target=perform, args=(one, commands[one.name], most_s, log)) for one in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in alone:
        perform(one, commands[one.name], min(ALONE_S, ends_s - time.monotonic()), log)
    text = summary([*together, *alone])
    log.keep("checks.md", text)
    print("\n" + text)
    return int(any(one.result for one in (*together, *alone)))


def perform(check: Check, command: list[str], seconds: float, log: Log) -> None:
    if seconds < _LEAST_S:
        check.result = f"SKIPPED: {max(0.0, seconds):.0f} s were left for it"
        log.say(f"[{check.name}] {check.result}")
        return

    def tell(line: str) -> None:
        check.lines.append(line)
        log.say(f"[{check.name}] {line}")

    began_s = time.monotonic()
    check.result = why(run(command, seconds, tell))
    check.took_s = time.monotonic() - began_s
    log.say(f"[{check.name}] ended after {check.took_s:.0f} s: {check.result or 'right'}")


def summary(checks: list[Check]) -> str:
    """The failures, then the table. Every check prints failures in bold; if it ended without any, its last lines are
    shown."""
    text = []
    for one in checks:
        failed = [line for line in one.lines if "**" in line] or one.lines[-12:]
        if one.result:
            text += [f"## {one.name}: {one.result}", "", *failed[:_MOST_TOLD], ""]
            text += [f"and {len(failed) - _MOST_TOLD} more", ""] if len(failed) > _MOST_TOLD else []
    text += ["| check | result | s |", "|---|---|---|"]
    text += [f"| {one.name} | {f'**{one.result}**' if one.result else 'right'} | {one.took_s:.0f} |" for one in checks]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
