"""Checks cuda_ipc and nccl between two processes on one GPU, also when the sender is killed. Prints a table.

    python -m tests.gpu.check_transfer [--only cuda_ipc] [--from TRANSPORT] [--rehearse]

For each transport, blocks are written only to the granted places. If the sender is killed during a transfer, the
receiver keeps running, reports the failure before the deadline, and nothing is written after that report. Then a new
sender's transfer succeeds. Exit code 1 if any of this fails, 2 without a CUDA device. --rehearse runs the same checks
between processes of this host with stand-ins for CUDA and NCCL.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import torch

from benchmarks.gpu.ends import Landing, Memory, ProcessSender, SenderSetup, make_pool, nccl_environment
from benchmarks.gpu.failures import add_flags, cases_of, told
from kvtransfer.protocol.transport import Received, ReceiveOutcome
from tests.support.fake_ends import DEVICE_TRANSPORTS, stand_ins
from tests.support.transfer_ends import fingerprint

NUM_BLOCKS: Final = 96
SENT_BLOCKS: Final = 64
DEADLINE_S: Final = 10.0
FIRST_CHUNKS: Final = 8  # chunks that have arrived when the sender is killed
CASE_S: Final = 35.0  # two senders start, and one is noticed at its deadline
QUIET_S: Final = 1.0  # long enough to notice a writer that is still alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="over stand-ins for CUDA and NCCL")
    add_flags(parser, "transports")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs the script)", file=sys.stderr)
        return 2
    print("| transport | check | result | s |\n|---|---|---|---|")
    with stand_ins() if args.rehearse else nullcontext():
        cases = cases_of(args, DEVICE_TRANSPORTS, None if args.rehearse else torch.cuda.synchronize, CASE_S)
        for transport in DEVICE_TRANSPORTS:

            def check_one(transport: str = transport) -> None:
                cases.num_failed += not checked(transport, args.rehearse)

            def failed(error: Exception, transport: str = transport) -> None:
                print(f"| {transport} | all | **raised** {told(transport, error)} | |", flush=True)

            cases.run(transport, check_one, failed)
    return int(cases.num_failed > 0)


def checked(transport: str, is_rehearsal: bool) -> bool:
    environment: dict[str, str] = {}
    if is_rehearsal:
        return check(transport, "stand-in", 2**16, environment)
    if transport == "nccl":
        os.environ.update(nccl_environment("receiver"))
        environment = nccl_environment("sender")
    return check(transport, "cuda", 2**20, environment)


def check(transport: str, memory: Memory, block_bytes: int, environment: dict[str, str]) -> bool:
    facts = fingerprint(block_bytes)
    pool = make_pool(memory, NUM_BLOCKS, block_bytes, seed=1)
    landing = Landing(pool, facts, transport)
    setup = SenderSetup(
        memory=memory, transport=transport, fingerprint=facts, num_blocks=SENT_BLOCKS, environment=environment
    )
    blocks = random.Random(3).sample(range(NUM_BLOCKS), SENT_BLOCKS)
    results: list[bool] = []

    def told(what: str, run: Callable[[], str]) -> None:
        began_s = time.monotonic()
        wrong = run()
        results.append(not wrong)
        took_s = time.monotonic() - began_s
        print(f"| {transport} | {what} | {f'**{wrong}**' if wrong else 'right'} | {took_s:.2f} |", flush=True)

    sender = ProcessSender(setup)
    try:
        told("bytes", lambda: right_bytes(sender, landing, pool, blocks))
        told("killed in mid-transfer", lambda: killed(sender, landing, pool, blocks))
        sender = ProcessSender(setup)
        told("a new pair", lambda: right_bytes(sender, landing, pool, blocks[::-1]))
    finally:
        sender.close()
        landing.close()
    return all(results)


def right_bytes(sender: ProcessSender, landing: Landing, pool: object, blocks: list[int]) -> str:
    """The reason of a failure; empty if the bytes are correct."""
    before = contents(pool)
    outcome, error, _ = sender.ask("send", landing.expect(blocks), 60.0)
    if outcome != "sent":
        return f"{outcome}: {error}"
    after = contents(pool)
    for index, block in enumerate(blocks):
        if after[block] != sender.ask("block", index):
            return f"block {block} holds other bytes than the sender's block {index}"
    for block in set(range(NUM_BLOCKS)) - set(blocks):
        if after[block] != before[block]:
            return f"block {block} was not granted and has changed"
    return ""


def killed(sender: ProcessSender, landing: Landing, pool: object, blocks: list[int]) -> str:
    before = contents(pool)
    ends: queue.SimpleQueue[Received] = queue.SimpleQueue()
    landed = landing.num_chunks
    sender.ask("begin", landing.expect(blocks, ends.put, DEADLINE_S))
    began_s = time.monotonic()
    while landing.num_chunks < landed + FIRST_CHUNKS:
        if time.monotonic() > began_s + DEADLINE_S:
            return "no blocks came"
        time.sleep(0.001)
    began_s = time.monotonic()
    sender.kill()
    if landing.num_chunks >= landed + SENT_BLOCKS - 1:
        return "all blocks had come when it was killed: nothing was shown"
    try:
        end = ends.get(timeout=DEADLINE_S + 1.0)
    except queue.Empty:
        return f"not noticed in {DEADLINE_S + 1:.0f} s"
    noticed_s = time.monotonic() - began_s
    if end.outcome is not ReceiveOutcome.FAILED:
        return f"it ended {end.outcome.value}"
    if noticed_s > DEADLINE_S:
        return f"noticed after {noticed_s:.1f} s, the deadline is {DEADLINE_S:.0f} s"
    if not landing.is_healthy:
        return "the receiver is dead"
    told = contents(pool)
    time.sleep(QUIET_S)
    later = contents(pool)
    if told != later:
        return "blocks were written after the failure was told"
    if any(later[block] != before[block] for block in set(range(NUM_BLOCKS)) - set(blocks)):
        return "a block that was not granted has changed"
    return ""


def contents(pool: object) -> list[bytes]:
    return [pool.block(number) for number in range(NUM_BLOCKS)]  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
