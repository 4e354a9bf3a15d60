"""cuda_ipc and nccl between two processes on one GPU: the right bytes, and what a killed sender leaves. Prints a table.

    python -m tests.gpu.check_transfer [--rehearse]

For each transport: blocks land where they were granted and nowhere else; a sender that is killed in mid-transfer is
noticed before its deadline, the receiver lives, nothing is written once the failure was told; and a sender that is
started after it does its work. Exit code 1 where something of this is not so; 2 without a CUDA device. --rehearse runs
the same over shm and tcp between host memories.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import sys
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks.gpu_ends import Landing, Memory, RemoteSender, SenderSetup, make_pool, nccl_environment
from benchmarks.transfer_ends import fingerprint
from kvtransfer.transport import Received, ReceiveOutcome

NUM_BLOCKS: Final = 96
SENT_BLOCKS: Final = 64
DEADLINE_S: Final = 10.0
QUIET_S: Final = 1.0  # in which a writer that still lives would show


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="shm and tcp, in host memory")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs the script)", file=sys.stderr)
        return 2
    memory: Memory = "host" if args.rehearse else "cuda"
    block_bytes = 2**16 if args.rehearse else 2**20
    print("| transport | check | result | s |\n|---|---|---|---|")
    is_broken = False
    for transport in ("shm", "tcp") if args.rehearse else ("cuda_ipc", "nccl"):
        try:
            environment: dict[str, str] = {}
            if transport == "nccl":
                os.environ.update(nccl_environment("receiver"))
                environment = nccl_environment("sender")
            is_broken |= not check(transport, memory, block_bytes, environment)
        except Exception as error:
            print(f"| {transport} | all | **raised** {type(error).__name__}: {str(error)[:300]} | |", flush=True)
            is_broken = True
    return int(is_broken)


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

    sender = RemoteSender(setup)
    try:
        told("bytes", lambda: right_bytes(sender, landing, pool, blocks))
        told("killed in mid-transfer", lambda: killed(sender, landing, pool, blocks))
        sender = RemoteSender(setup)
        told("a new pair", lambda: right_bytes(sender, landing, pool, blocks[::-1]))
    finally:
        sender.close()
        landing.close()
    return all(results)


def right_bytes(sender: RemoteSender, landing: Landing, pool: object, blocks: list[int]) -> str:
    """Why not."""
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


def killed(sender: RemoteSender, landing: Landing, pool: object, blocks: list[int]) -> str:
    before = contents(pool)
    ends: queue.SimpleQueue[Received] = queue.SimpleQueue()
    sender.ask("begin", landing.expect(blocks, ends.put, DEADLINE_S))
    time.sleep(0.2)  # most blocks are there or on their way; the last is never sent
    began_s = time.monotonic()
    sender.kill()
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
