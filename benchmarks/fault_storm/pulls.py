"""A storm of faults on pulls between workers: no wrong block may be used, and none may be lost.

The workers of this process have the prompts, caches and fetch stage of tiers.py. Their slower source is the real one,
over real gRPC and data connections. At random, frames are lost, changed, late, doubled or cut; a worker dies and starts
again with another incarnation, at its address or another one; it hangs, and answers nobody for a while; it drains; its
clock jumps; prompts leave or give up; and prompts name a source that has less than they expect, or nothing, or that was
another process. The faults follow from the seed, but which of them meet a running pull depends on the threads.
"""

from __future__ import annotations

import logging
import queue
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, cast

from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, NUM_BLOCKS, StormPool, content_of, hash_of
from benchmarks.fault_storm.tiers import END_S, LONGEST, TierResult, TierStorm, lost_threads
from benchmarks.harness import table
from kvtransfer.faults.injector import FaultInjector, with_faults
from kvtransfer.faults.plan import FaultPlan
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.transport import Sender
from kvtransfer.pulls import Peers, Pulls
from kvtransfer.transports.common.registry import choose
from pdserve.core.attempt import PrefixSource
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import Fetches
from pdserve.engine.memory.host import HostMemory
from pdserve.telemetry.metrics import Metrics
from pdserve.worker.program import AnyProgram
from pdserve.worker.tiers import FetchSource
from tests.support.transfer_ends import GrpcHost, endpoint_config, fingerprint

NUM_WORKERS: Final = 3
FEW_TEXTS: Final = 12  # of which each worker has some
CHUNK_BYTES: Final = 4 * BLOCK_BYTES  # so that a pull has several
FAULT_SHARE: Final = 0.25  # of transfers
LONGEST_S: Final = 0.05  # of a frame that is late
HANGS_S: Final = 0.1
TURNS: Final = 100  # of each worker, between two checks
LEASE: Final = Lease(
    beat_s=0.05, silence_s=0.5, unconfirmed_s=1.0, stall_s=2.0, unclaimed_s=2.0, grace_s=0.05, quarantine_s=0.2
)


def make_texts(rng: random.Random, count: int) -> list[list[bytes]]:
    """Chains of hashes, of which every other one begins like one before."""
    texts: list[list[bytes]] = []
    for number in range(count):
        text = list(rng.choice(texts)[: rng.randrange(LONGEST)]) if number % 2 else []
        text += [hash_of(number * LONGEST + place) for place in range(len(text), LONGEST)]
        texts.append(text)
    return texts


class SharedPool(StormPool):
    """In memory that other processes may map, as shm needs it."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = HostMemory(len(self.buffer))
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor  # type: ignore[assignment]


class PullWorker(TierStorm):
    """A worker, of which the slower tier are the others."""

    def __init__(
        self, name: str, number: int, seed: int, result: TierResult, texts: list[list[bytes]], port: int = 0
    ) -> None:
        self.rng, self.result = random.Random(f"{seed} {name} {number}"), result
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting = {}
        self._texts, self._number, self._clock_s = texts, 0, 0.0
        self.name, self.incarnation = name, str(number)
        self.pool = SharedPool()
        self.blocks = BlockAllocator(NUM_BLOCKS)
        self.kv = KvCache(self.blocks, 1)
        facts = fingerprint(BLOCK_BYTES, self.pool.runs_per_block)
        self.injector = FaultInjector(FaultPlan(seed=seed, share=FAULT_SHARE, longest_s=LONGEST_S).fault_of)
        endpoint = endpoint_config(
            self.pool,  # type: ignore[arg-type]
            facts,
            transport="auto",
            stamps=self.blocks.stamps,
            worker_id=name,
            incarnation=self.incarnation,
            lease=LEASE,
            clock=self.now,
        )
        self.receiver = PlainReceiver(
            replace(endpoint, transports=with_faults(endpoint.transports, self.injector)), "127.0.0.1", CHUNK_BYTES
        )
        kind = self.rng.choice(["tcp", "shm"])
        self.sender = PlainSender(replace(endpoint, transports=with_faults(choose(kind), self.injector)))
        self.server = GrpcHost(self.receiver.servicer, port)
        self._patience_s = 0.0
        self.scheduler = SimpleNamespace(is_draining=False, load=lambda: SimpleNamespace(running=4))
        self._program = SimpleNamespace(
            context=SimpleNamespace(
                config=SimpleNamespace(worker_id=name),
                incarnation=self.incarnation,
                endpoint=self.server.endpoint,
                now=self.now,
                post=self._calls.put,
                metrics=Metrics.off(),
            ),
            kv=self.kv,
            blocks=self.blocks,
            fingerprint=facts,
            scheduler=self.scheduler,
            limits=SimpleNamespace(hash_seed=b""),
            disk=None,
            counts=Counter(),
            log_fields=SimpleNamespace(of=lambda key: {}),
            outbox=SimpleNamespace(report=self._report),
            act=self._act,
        )
        peers, sender = Peers(endpoint, self.receiver), cast(Sender, self.sender)
        self.pulls = Pulls(cast(AnyProgram, self._program), peers, sender)
        self.fetches = Fetches(self.kv, [self.pulls], lambda uncached, cached: self._patience_s)
        self._program.fetches = self.fetches
        self.receiver.servicer.give = self.pulls.give
        self.hangs_until_s = 0.0
        self.others: list[PrefixSource] = []  # also of processes that are gone

    def now(self) -> float:
        return time.monotonic() + self._clock_s

    def as_source(self, num_tokens: int) -> PrefixSource:
        return PrefixSource(
            worker_id=self.name,
            incarnation=self.incarnation,
            endpoint=self.server.endpoint,
            num_tokens=num_tokens,
            predicted_s=0.0,
        )

    def prompt(self) -> None:
        super().prompt()
        prompt = self._waiting[next(reversed(self._waiting))]
        prompt.attempt = replace(prompt.attempt, source=self.rng.choice(self.others))

    def _source(self, name: str) -> FetchSource:
        return self.pulls

    def turn(self) -> None:
        if time.monotonic() < self.hangs_until_s:
            return
        while len(self._waiting) < 4:
            self.prompt()
        self._patience_s = self.rng.choice([0.05, 1.0, 5.0])
        self._act(self.fetches.expire(time.monotonic()))
        self.advance()
        self.pulls.answer()
        if self.scheduler.is_draining and not self.rng.randrange(10):
            self.scheduler.is_draining = False
        match self.rng.randrange(400):
            case 0:
                self.hangs_until_s = time.monotonic() + self.rng.random() * HANGS_S
                self.result.faults["a worker hangs"] += 1
            case 1:
                self.scheduler.is_draining = True
                self.pulls.end_given()
                self.result.faults["a worker drains"] += 1
            case 3:
                self._clock_s += self.rng.choice([-0.05, 0.2, 1.0, 3600.0])
                self.result.faults["a clock jumps"] += 1

    def _report(self, ended: Any) -> None:
        if ended.error:
            words = " ".join(word for word in ended.error.split() if not any(one.isdigit() for one in word))
            self.result.faults[f"not pulled: {words[:60]}"] += 1

    def check(self) -> None:
        self.fetches.check()
        self.blocks.check(holders=[*self.fetches.held(), *self.kv.lent.values()])

    def close(self, *, is_killed: bool = True) -> None:
        """Like the end of a process, of which the memory is looked at."""
        self.server.stop()
        self.pulls.close()
        self.receiver.close()
        self.sender.close()
        self.quiet()
        until_s = time.monotonic() + END_S
        while self.kv.lent:
            assert time.monotonic() < until_s, (
                f"what was given is never taken back: {self.kv.lent}, sends {self.sender.open_keys}"
            )
            self._pump(0.05)
        self.check()
        if self.blocks.num_referenced:
            self.result.wrong.append(f"{self.blocks.num_referenced} blocks of {self.name} are lost")
        for block_hash in self.blocks.snapshot().stored:
            [block] = self.blocks.match([block_hash])
            if self.pool.read(block) != content_of(block_hash):
                self.result.wrong.append(f"block {block} of {self.name} is wrong at its end")
        for kind, count in self.injector.counts.items():
            self.result.faults[f"frames: {kind.value}"] += count


class PullStorm:
    def __init__(self, seed: int) -> None:
        self.result = TierResult()
        self._former_threads = set(threading.enumerate())
        self._seed, self._rng = seed, random.Random(seed)
        self._texts = make_texts(self._rng, FEW_TEXTS)
        self._num_started = 0
        self._workers = [self._start(f"w{number}") for number in range(NUM_WORKERS)]

    def _start(self, name: str, port: int = 0) -> PullWorker:
        self._num_started += 1
        return PullWorker(name, self._num_started, self._seed, self.result, self._texts, port)

    def _restart(self, number: int) -> None:
        before = self._workers[number]
        with socket.socket() as held:  # as by the launcher: another process could take the port meanwhile
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", before.server.port))
            before.close()
            self._workers[number] = self._start(before.name, self._rng.choice([0, before.server.port]))
        self.result.restarts += 1

    def _introduce(self) -> None:
        """Tells each worker of the others; what they have is not always true."""
        for one in self._workers:
            sources = [each.as_source(self._rng.choice([24, 24, 8])) for each in self._workers if each is not one]
            one.others = [*one.others[-1:], *sources]  # one of before, which may be gone

    def run(self, num_operations: int, progress: Callable[[TierResult], None] = lambda result: None) -> TierResult:
        began_s = time.monotonic()
        while self.result.operations < num_operations:
            self._introduce()
            for _ in range(TURNS):
                for worker in self._workers:
                    worker.turn()
                time.sleep(0.001)  # for the threads
            for worker in self._workers:
                worker.check()
            if not self._rng.randrange(4):
                self._restart(self._rng.randrange(NUM_WORKERS))
            self.result.seconds = time.monotonic() - began_s
            progress(self.result)
        for worker in self._workers:
            worker.close()
        until_s = time.monotonic() + END_S
        while lost := lost_threads(self._former_threads):
            if time.monotonic() > until_s:
                self.result.wrong += lost
                break
            time.sleep(0.01)
        return self.result


def report(num_operations: int, seed: int) -> int:
    """The exit status."""
    logging.disable(logging.WARNING)  # every injected fault would be a line

    def progress(result: TierResult) -> None:
        print(
            f"\rpulls: {result.operations} blocks, {result.restarts} restarts, {len(result.wrong)} wrong   ",
            end="",
            file=sys.stderr,
            flush=True,
        )

    result = PullStorm(seed).run(num_operations, progress)
    print(file=sys.stderr)
    counts = {
        "blocks to pull": result.operations,
        "pulled and verified": result.filled,
        "missed": result.missed,
        "pulls": result.fetches,
        "prompts": result.prompts,
        "restarts": result.restarts,
        "wrong or lost": len(result.wrong),
        "seconds": round(result.seconds),
    }
    print(table([list(counts), [str(one) for one in counts.values()]]), "\n")
    print(table([["fault", "times"], *([name, str(count)] for name, count in sorted(result.faults.items()))]))
    for line in result.wrong[:20]:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(result.wrong))
