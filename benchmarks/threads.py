"""Measures the best number of compute threads for a prefill and a decode process that share cores.

    python -m benchmarks.threads --model FOLDER [--seconds 4] [--rounds 3] [--busy N]

Two processes run one engine each: one prefills prompts of 512 tokens continuously, the other decodes 8 rows. Each
setting is run in three ways (prefill alone, decode alone, both at once), and settings alternate; the table shows
medians over the rounds. How threads wait matters as much as their number: OpenMP threads that spin while they wait
take the core from the other process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.interface import Row

PROMPT_TOKENS: Final = 512
DECODE_ROWS: Final = 8
CONTEXT_TOKENS: Final = 128
CORES: Final = os.cpu_count() or 2
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "half of the cores each": {"OMP_NUM_THREADS": str(max(1, CORES // 2))},
    "all cores each": {"OMP_NUM_THREADS": str(CORES)},
    "all cores each, passive wait": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "PASSIVE"},
    "all cores each, short spin": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "1000"},
    "the same, prefill at nice 5": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "1000", "PREFILL_NICE": "5"},
    "the same, prefill at nice 19": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "1000", "PREFILL_NICE": "19"},
}
BUNDLED: Final = Path(__file__).parent.parent / "pdserve/models/stdlib-5m"


def child(part: str, model: str, dtype: str, seconds: float) -> None:
    """Prints tokens per second, from a line on standard input until `seconds` later."""
    from pdserve.engine.load.build_engine import open_torch_engine

    threads = int(os.environ["OMP_NUM_THREADS"])
    engine = open_torch_engine(
        WorkerConfig(worker_id=part, model=model, dtype=dtype, kv_blocks=256, block_size=16, threads=threads)
    )
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    if part == "prefill":
        os.nice(int(os.environ.get("PREFILL_NICE", "0")))
        blocks = list(range(PROMPT_TOKENS // 16))
        rows = [Row(tokens=[5] * PROMPT_TOKENS, start=0, blocks=blocks)]
    else:
        size = CONTEXT_TOKENS // 16 + 1
        rows = [
            Row(
                tokens=[5 + row],
                start=CONTEXT_TOKENS,
                blocks=list(range(row * size, (row + 1) * size)),
                sample=sampling,
                history=[5] * (CONTEXT_TOKENS + 1),
                prompt_len=1,
            )
            for row in range(DECODE_ROWS)
        ]
    for _ in range(3):
        engine.step(rows)
    print("ready", flush=True)
    for line in sys.stdin:
        end_s, steps = time.perf_counter() + seconds, 0
        began_s = time.perf_counter()
        while time.perf_counter() < end_s:
            engine.step(rows)
            steps += 1
        tokens = steps * sum(len(row.tokens) for row in rows)
        print(f"{line.strip()} {tokens / (time.perf_counter() - began_s):.1f}", flush=True)


class ThreadedEngine:
    def __init__(self, part: str, args: argparse.Namespace, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.threads", "--child", part, "--model", args.model]
        command += ["--seconds", str(args.seconds), "--dtype", args.dtype]
        self.process = subprocess.Popen(
            command, env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended with code {self.process.wait()}")
        return line

    def rate(self) -> float:
        return float(self.read().split()[1])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="other processes, each of which keeps a core busy (0)")
    parser.add_argument("--child", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model, args.dtype, args.seconds)
        return
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        rates = measure(args)
    finally:
        for other in others:
            other.kill()
    print(
        f"{CORES} cores, {args.busy} of them busy, tokens/s: prompts of {PROMPT_TOKENS}; decode of {DECODE_ROWS} rows"
    )
    print("| setting | prefill alone | decode alone | prefill beside decode | decode beside prefill |")
    print("|---|---|---|---|---|")
    for name, rows in rates.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in medians) + " |")


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float, float, float]]]:
    rates: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in SETTINGS}
    for turn in range(args.rounds):
        for name, env in SETTINGS.items():
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr)
            prefill, decode = ThreadedEngine("prefill", args, env), ThreadedEngine("decode", args, env)
            prefill.start()
            prefill_alone = prefill.rate()
            decode.start()
            decode_alone = decode.rate()
            prefill.start()
            decode.start()
            rates[name].append((prefill_alone, decode_alone, prefill.rate(), decode.rate()))
            prefill.close()
            decode.close()
    return rates


if __name__ == "__main__":
    main()
