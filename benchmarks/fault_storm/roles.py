"""The decode and the prefill worker of a fault storm: which blocks each transfer takes, fills, checks and frees."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.fault_storm.cases import Case, OwnerFault, case_of
from benchmarks.fault_storm.ranks import StormRanks, in_order, text_of
from benchmarks.fault_storm.report import kind_of
from benchmarks.fault_storm.storage import OTHER_TEXT, REUSED, block_hash, content_hash_of
from benchmarks.fault_storm.worker import NUM_LAYERS, Setup, StormWorker
from benchmarks.gpu.ends import nccl_environment
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.grants import grant_from_proto, grant_to_proto
from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent
from pdserve.core.kv.kv_shape import Grant
from pdserve.v1 import transfer_pb2
from tests.support.netns import enter
from tests.support.transfer_ends import GrpcHost, endpoint_config


class Decode(StormWorker):
    def __init__(self, setup: Setup, driver: Connection) -> None:
        super().__init__(setup, driver)
        self.end = make_receiver(
            endpoint_config(
                self.storage.pool,
                self.fingerprint,
                worker_id=setup.name,
                incarnation=self.incarnation,
                transport=setup.transport,
                fault_injector=self.fault_injector,
                stamps=self.storage.stamps,
            ),
            host=setup.host,
        )
        self._grpc = GrpcHost(self.end.servicer, host=setup.host)
        if (ranks := self.ranks()) is not None:
            self.end = ranks.receiver(self.end)
        self._landings: dict[int, tuple[Case, list[int], float]] = {}
        self._kept: dict[int, list[int]] = {}

    def grant(self, number: int) -> None:
        case = case_of(self.setup.seed, number)
        blocks = self.storage.take(case.count)
        if blocks is None:
            self._tell("full", number)
            return
        grant = Grant(
            key=case.key,
            endpoint=self._grpc.endpoint,
            worker_id=self.setup.name,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint,
            blocks=tuple(blocks),
            rank_endpoints=self.end.rank_endpoints,
            num_cached_blocks=0,
        )
        for block in blocks:
            self.storage.expects_anything(block)
        deadline_s = self.setup.deadline_s(case)
        self._landings[number] = (case, blocks, time.monotonic() + deadline_s)
        content_hashes = [content_hash_of(number, place) for place in range(case.count)]
        granted = partial(self._granted, number, grant)
        if self.end.expect(grant, self.on_end, deadline_s, content_hashes, lambda: self.soon(granted)):
            granted()
        if case.fault is OwnerFault.RECEIVER_ABORTS:
            self.after(case.hold_s / 10, lambda: self.end.abort(case.key))

    def _granted(self, number: int, grant: Grant) -> None:
        if number in self._landings:  # otherwise it ended before all ranks had opened it
            self._tell("granted", number, grant_to_proto(grant).SerializeToString())

    def abort(self, number: int) -> None:
        self.end.abort(case_of(self.setup.seed, number).key)

    def ended(self, at_s: float, end: Received) -> None:
        number = end.key.generation
        if end.outcome is ReceiveOutcome.QUARANTINED:
            self._tell("quarantined", number)
            return
        if number not in self._landings:
            self.storage.wrong.append(f"{end.key} ended twice: {end}")
            return
        case, blocks, deadline_at_s = self._landings.pop(number)
        if end.outcome is not ReceiveOutcome.VERIFIED:
            self.storage.give_back(blocks, number)
            self._tell("ended", number, end.outcome.value, kind_of(end.error), self.late_s(deadline_at_s))
            return
        for place, block in enumerate(blocks):
            self.storage.must_hold(block, number, place)
            self.storage.stamps.mark(block, content_hash_of(number, place))
            self.storage.allocator.publish(block, block_hash(number, place))
        self._kept[number] = blocks
        self.after(case.hold_s, lambda: self._let_go(number))
        self._tell("ended", number, end.outcome.value, "", 0.0)

    def _let_go(self, number: int) -> None:
        blocks = self._kept.pop(number)
        for block in blocks:
            self.storage.look(block, "was written after its commit")
        self.storage.allocator.release(blocks)  # into the prefix cache, with their contents

    def held(self) -> list[Sequence[int]]:
        return [*(blocks for _, blocks, _ in self._landings.values()), *self._kept.values()]

    def close(self) -> None:
        super().close()
        self._grpc.stop()


class PrefillEnd(StormWorker):
    def __init__(self, setup: Setup, driver: Connection) -> None:
        super().__init__(setup, driver)
        self._ranks: StormRanks | None = None
        self.end = self._make()
        self._sending: dict[int, tuple[Case, Grant, list[int], float]] = {}

    def _make(self) -> Any:
        self.incarnation = secrets.token_hex(4)
        own = make_sender(
            endpoint_config(
                self.storage.pool,
                self.fingerprint,
                worker_id=self.setup.name,
                incarnation=self.incarnation,
                transport=self.setup.transport,
                fault_injector=self.fault_injector,
                stamps=self.storage.stamps,
            )
        )
        old, self._ranks = self._ranks, self.ranks()
        if old is not None:
            self.after(1.0, old.close)  # once the old end has been closed
        return own if self._ranks is None else self._ranks.sender(own)

    def send(self, number: int, message: bytes) -> None:
        case = case_of(self.setup.seed, number)
        blocks = self.storage.take(case.count)
        if blocks is None:
            self._tell("full", number)
            return
        self.storage.fill(blocks, number + (OTHER_TEXT if case.fault is OwnerFault.OTHER_TEXT else 0))
        grant = grant_from_proto(transfer_pb2.Grant.FromString(message))
        deadline_s = self.setup.deadline_s(case)
        self._sending[number] = (case, grant, blocks, time.monotonic() + deadline_s)
        text = text_of(number, case.count) if self.setup.ranks else None
        groups = 1 + number % NUM_LAYERS if self.end.divides_blocks else 1
        self.end.start(grant, self.on_end, deadline_s, text, groups=groups)
        self._push(number, 0)

    def _push(self, number: int, piece: int) -> None:
        """Pushes this piece and, after its pause, the next ones."""
        if number not in self._sending:
            return
        case, grant, blocks, _ = self._sending[number]
        is_converted = grant.fingerprint.shape.tp_degree != max(1, self.setup.ranks)
        pieces = in_order(case.pieces) if is_converted else case.pieces
        if piece == case.act_at:
            self._act(case, blocks)
        if piece == len(pieces) or number not in self._sending:
            return
        indices = pieces[piece][1]
        is_last = piece + 1 == len(pieces) and case.fault is not OwnerFault.UNFINISHED
        self.end.push(grant.key, [(index, blocks[index]) for index in indices], is_last)
        pause_s = pieces[piece + 1][0] if piece + 1 < len(pieces) else 0.0
        if pause_s:
            self.after(pause_s, lambda: self._push(number, piece + 1))
        else:
            self._push(number, piece + 1)

    def _act(self, case: Case, blocks: list[int]) -> None:
        if case.fault is OwnerFault.SENDER_ABORTS:
            self.end.abort(case.key)
        elif case.fault is OwnerFault.REUSE:
            self.storage.stamps.begin(blocks)  # as `allocate` does
            self.storage.fill(blocks, case.number + REUSED)
        elif case.fault is OwnerFault.RESTART:
            old, self.end = self.end, self._make()
            old.close()
            if old.open_keys:
                self.storage.wrong.append(f"a closed sender holds {old.open_keys}")

    def abort(self, number: int) -> None:
        self.end.abort(case_of(self.setup.seed, number).key)

    def ended(self, at_s: float, end: Sent) -> None:
        number = end.key.generation
        if number not in self._sending:
            self.storage.wrong.append(f"{end.key} ended twice: {end}")
            return
        _, _, blocks, deadline_at_s = self._sending.pop(number)
        for block in blocks:
            self.storage.look(block, "was written while it was sent")
        self.storage.give_back(blocks, number)
        late_s = 0.0 if end.outcome is SendOutcome.SENT else self.late_s(deadline_at_s)
        self._tell("ended", number, end.outcome.value, kind_of(end.error) if end.error else "", late_s)

    def held(self) -> list[Sequence[int]]:
        return [blocks for _, _, blocks, _ in self._sending.values()]


def main(setup: Setup, driver: Connection) -> None:
    """Runs the worker process until its driver ends."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # every injected fault would be logged
    if setup.memory == "cuda" and setup.transport == "nccl":
        os.environ.update(nccl_environment(setup.name))
    if setup.netns:
        enter(setup.netns)
    worker = Decode(setup, driver) if setup.role == "decode" else PrefillEnd(setup, driver)
    try:
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
