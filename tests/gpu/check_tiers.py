"""Checks the host tier of a pool on a GPU: bytes, the rate of its copies, and a step beside them. Prints a table.

    python -m tests.gpu.check_tiers [--only bytes] [--from CASE] [--rehearse]

  bytes   blocks leave the pool, are overwritten at once by later work of the engine's stream, and come back
  rates   saves and loads over one pinned cudaMemcpy of the same bytes in each direction: at least 0.8
  step    products that read as much memory as a decode step, beside saves and loads: at most 1.05 of alone

Exit code 1 if one fails, 2 without a CUDA device. --rehearse: over the stand-in of a device, whose times do not count.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final, final

import torch

from benchmarks.gpu.ends import make_pool
from benchmarks.gpu.failures import add_flags, cases_of, told
from kvtransfer.device_tier import DeviceTier, device_tier
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.host_tier import HostTier, LoadRule
from tests.support.fake_ends import stand_ins

BLOCK_BYTES: Final = 2**21  # of Llama-3.1-8B in bfloat16, 16 tokens
NUM_BLOCKS: Final = 512
NUM_SLOTS: Final = 1024
ROUNDS: Final = 40
REPEAT: Final = 5
LEAST_RATE: Final = 0.8
MOST_STEP: Final = 1.05
STEPS: Final = 200
CASE_S: Final = 60.0
ENDS_S: Final = 20.0  # of one load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="over the stand-in of a device")
    add_flags(parser, "cases")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs the script)", file=sys.stderr)
        return 2
    print("| case | result | s |\n|---|---|---|")
    bodies: dict[str, Callable[[Tiered], str]] = {"bytes": moved_bytes, "rates": rates, "step": step_beside}
    with stand_ins() if args.rehearse else nullcontext():
        cases = cases_of(args, list(bodies), None if args.rehearse else torch.cuda.synchronize, CASE_S)
        for name, body in bodies.items():
            began_s = time.monotonic()

            def check(name: str = name, body: Callable[[Tiered], str] = body, began_s: float = began_s) -> None:
                tiered = Tiered(is_rehearsal=args.rehearse)
                try:
                    result = body(tiered)
                finally:
                    tiered.copies.close()
                is_right = "**" not in result
                cases.num_failed += not is_right
                print(f"| {name} | {result} | {time.monotonic() - began_s:.1f} |", flush=True)

            def failed(error: Exception, name: str = name) -> None:
                print(f"| {name} | **raised** {told(name, error)} | |", flush=True)

            cases.run(name, check, failed)
    return int(cases.num_failed > 0)


@final
class Tiered:
    """A pool and its tier, without an engine."""

    def __init__(self, *, is_rehearsal: bool) -> None:
        self.is_rehearsal = is_rehearsal
        self.block_bytes = 2**12 if is_rehearsal else BLOCK_BYTES
        self.pool: Any = make_pool("stand-in" if is_rehearsal else "cuda", NUM_BLOCKS, self.block_bytes, seed=1)
        copies = device_tier(self.pool, NUM_SLOTS * self.block_bytes, lambda done, of: None)
        assert copies is not None
        self.copies: DeviceTier = copies
        self.block_s = copies.measure_s()
        self.tier = HostTier(copies, LoadRule(0.0, lambda uncached, cached: 0.0), NUM_BLOCKS, queued=copies)
        self.wrong: list[bytes] = []
        copies.serve(self.tier, self.wrong.append)
        self._num_fetches = 0

    def save(self, saves: Sequence[tuple[int, bytes]]) -> None:
        """As an allocation does, with as many as there is room for."""
        for block, block_hash in saves:
            self.tier.save(block, block_hash)
        self.tier.flush()

    def begin(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> queue.SimpleQueue[int]:
        self._num_fetches += 1
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        attempt: Any = None  # the tier does not read it
        fetch = Fetch(
            number=self._num_fetches,
            source="host",
            attempt=attempt,
            first=0,
            hashes=tuple(hashes),
            blocks=tuple(blocks),
            started_s=0.0,
            predicted_s=0.0,
        )
        self.copies.begin(fetch, ends.put)
        return ends

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        count = self.begin(hashes, blocks).get(timeout=ENDS_S)
        if count != len(hashes) or self.wrong:
            raise AssertionError(f"{count} of {len(hashes)} blocks were verified")

    def overwrite(self, blocks: Sequence[int], value: int) -> None:
        """Later work of the engine."""
        if self.is_rehearsal:
            self.copies._device.run_step(lambda: self._fill(blocks, value))  # type: ignore[attr-defined]
        else:
            self.pool.raw.index_fill_(0, torch.tensor(blocks, device="cuda"), value)

    def _fill(self, blocks: Sequence[int], value: int) -> None:
        for block in blocks:
            self.pool.on_device[block * self.block_bytes : (block + 1) * self.block_bytes] = (
                bytes([value]) * self.block_bytes
            )


def moved_bytes(tiered: Tiered) -> str:
    """Random blocks, with noise that differs in each, are saved and overwritten at once, and loaded elsewhere."""
    draw, text_of = random.Random(5), dict[bytes, bytes]()
    num_loaded = 0
    for number in range(ROUNDS):
        blocks = draw.sample(range(NUM_BLOCKS), 24)
        saved, into = blocks[:12], blocks[12:]
        saves = [(block, bytes([number, at])) for at, block in enumerate(saved[: tiered.copies.room])]
        text_of |= {block_hash: tiered.pool.block(block) for block, block_hash in saves}
        for _ in range(len(tiered.tier) + len(saves) - NUM_SLOTS):
            tiered.tier.leave(draw.choice(list(tiered.tier)))
        tiered.save(saves)
        tiered.overwrite(saved, number)
        hashes = draw.sample(list(tiered.tier), min(len(into), len(tiered.tier)))
        tiered.load(hashes, into[: len(hashes)])
        for block_hash, block in zip(hashes, into, strict=False):
            if tiered.pool.block(block) != text_of[block_hash]:
                return f"**block {block} has other bytes than were saved**"
        num_loaded += len(hashes)
    return f"exact: {num_loaded} blocks of {tiered.block_bytes} bytes"


def rates(tiered: Tiered) -> str:
    """As much as the staging takes, out and in again."""
    count = min(tiered.copies.room, NUM_BLOCKS // 2)
    num_bytes, hashes = count * tiered.block_bytes, [at.to_bytes(2, "big") for at in range(count)]
    out_s, in_s = [], []
    for _ in range(REPEAT + 1):
        for block_hash in hashes:
            tiered.tier.drop(block_hash)
        began_s = time.perf_counter()
        tiered.save(list(enumerate(hashes)))
        if not tiered.copies.flushed(ENDS_S):
            return "**saves do not end**"
        out_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        tiered.load(hashes, range(NUM_BLOCKS - count, NUM_BLOCKS))
        in_s.append(time.perf_counter() - began_s)
    floors = (1.0, 1.0) if tiered.is_rehearsal else pinned_copy_s(num_bytes)
    shown = []
    for way, took, floor_s in (("out", out_s, floors[0]), ("in", in_s, floors[1])):
        middle_s = statistics.median(took[1:])
        share = floor_s / middle_s
        text = f"{way} {num_bytes / middle_s / 1e9:.3g} GB/s"
        if not tiered.is_rehearsal:
            text += f", {share:.2f} of {num_bytes / floor_s / 1e9:.3g}"
            if share < LEAST_RATE:
                text = f"**missed: {text}**"
        shown.append(text)
    return "; ".join(shown)


def pinned_copy_s(num_bytes: int) -> tuple[float, float]:
    """One cudaMemcpy out, and one in."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    best = []
    for target, source in ((host, there), (there, host)):
        took = []
        for _ in range(REPEAT):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began_s)
        best.append(statistics.median(took))
    return best[0], best[1]


def step_beside(tiered: Tiered) -> str:
    """The mean step, alone and while a thread saves and loads without a pause."""
    run: Callable[[], object] = Products() if not tiered.is_rehearsal else lambda: time.sleep(0.0005)
    count = min(tiered.copies.most_saved, NUM_BLOCKS // 4)
    hashes = [at.to_bytes(2, "big") for at in range(count)]
    mean_s(run)  # warms up
    alone_s = mean_s(run)
    is_over, num_copied = threading.Event(), 0
    errors: list[Exception] = []

    def pump() -> None:
        nonlocal num_copied
        try:
            while not is_over.is_set():
                for block_hash in hashes:
                    tiered.tier.drop(block_hash)
                tiered.save(list(enumerate(hashes)))
                tiered.load(hashes, range(NUM_BLOCKS - count, NUM_BLOCKS))
                num_copied += 2 * count
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=pump, daemon=True)
    began_s = time.perf_counter()
    thread.start()
    during_s = mean_s(run)
    is_over.set()
    thread.join(ENDS_S)
    if errors:
        raise errors[0]
    rate = num_copied * tiered.block_bytes / (time.perf_counter() - began_s) / 1e9
    ratio = during_s / alone_s
    text = f"{alone_s * 1e3:.3g} ms alone, {ratio:.3f} times beside {rate:.3g} GB/s"
    return f"**missed: {text}**" if ratio > MOST_STEP and not tiered.is_rehearsal else text


class Products:
    """64 rows times 32 matrices of 256 MiB, on the engine's stream."""

    def __init__(self) -> None:
        self._rows = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
        self._matrices = [torch.randn(8192, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(32)]

    def __call__(self) -> None:
        for matrix in self._matrices:
            torch.mm(self._rows, matrix)
        torch.cuda.synchronize()


def mean_s(run: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    for _ in range(STEPS):
        run()
    return (time.perf_counter() - began_s) / STEPS


if __name__ == "__main__":
    sys.exit(main())
