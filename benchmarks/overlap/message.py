"""Measures the cost of one more part of a transfer: the same blocks in one push and in many, in this process."""

from __future__ import annotations

import statistics
import threading
import time

from kvtransfer.link.endpoint import make_receiver, make_sender
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from tests.support.transfer_ends import WAIT_S, GrpcHost, HostPool, endpoint_config, fingerprint

NUM_BLOCKS, BLOCK_BYTES = 64, 64 * 1024
PARTS = 32
ROUNDS = 40


def message_s(transport: str) -> float:
    """CPU seconds of both ends for one more part, which a step may lose."""
    source, landing = HostPool(NUM_BLOCKS, BLOCK_BYTES, seed=7), HostPool(NUM_BLOCKS, BLOCK_BYTES)
    facts = fingerprint(BLOCK_BYTES)
    receiver = make_receiver(
        endpoint_config(
            landing, facts, worker_id="d0", incarnation="d0-1", stamps=BlockStamps(NUM_BLOCKS), transport=transport
        ),
        host="127.0.0.1",
    )
    sender = make_sender(
        endpoint_config(
            source, facts, worker_id="p0", incarnation="p0-1", stamps=BlockStamps(NUM_BLOCKS), transport=transport
        )
    )
    host = GrpcHost(receiver.servicer)

    def move(number: int, parts: int) -> float:
        grant = Grant(
            key=TransferKey(transfer_id=f"t{number}-{parts}", attempt=1, generation=1 + number),
            endpoint=host.endpoint,
            worker_id="d0",
            incarnation="d0-1",
            fingerprint=facts,
            blocks=tuple(range(NUM_BLOCKS)),
            num_cached_blocks=0,
        )
        received, sent = threading.Event(), threading.Event()
        receiver.expect(grant, lambda _: received.set())
        sender.start(grant, lambda _: sent.set())
        began_s, size = time.process_time(), NUM_BLOCKS // parts
        for part in range(parts):
            blocks = [(block, block) for block in range(part * size, (part + 1) * size)]
            sender.push(grant.key, blocks, part == parts - 1)
        if not (received.wait(WAIT_S) and sent.wait(WAIT_S)):
            raise TimeoutError(f"a transfer of {NUM_BLOCKS} blocks did not end in {WAIT_S} s")
        return time.process_time() - began_s

    try:
        took = {parts: [move(number, parts) for number in range(ROUNDS)] for parts in (1, PARTS)}
    finally:
        sender.close()
        receiver.close()
        host.stop()
    return (statistics.median(took[PARTS]) - statistics.median(took[1])) / (PARTS - 1)
