"""Measures the cost of one decision of the router: `python -m benchmarks.decision [--workers 64 1024] [--seconds 2]`.

Measures RouterState.handle(RequestArrived) with every worker loaded (an eighth prefill, the rest decode, and half and
half), full scoring and explanations on. It measures CPU time of one thread, so other work on the machine matters only
through shared caches and cores. The request's other messages are handled outside the measured time, so that the load
stays constant.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import (
    FirstToken,
    Granted,
    Load,
    Prefill,
    Released,
    Reserve,
    TokenRow,
    TokensArrived,
    TransferEnded,
)
from pdserve.core.types import FinishReason, Role, Sampling, Slo, TokenOut
from router.state.interface import RequestArrived, RouterSettings, WorkerConnected
from router.state.state import RouterState

GRANT = b"opaque to the router"
RESIDENTS = 8  # per decode worker
COLUMNS = ("mean", "p10", "p50", "p95", "p99")


class Bench:
    def __init__(self, prefills: int, decodes: int, policy: str) -> None:
        self.rng = random.Random(0)
        self.now_s = 0.0
        self.state = RouterState(RouterSettings(policy=policy))
        self.serial = 0
        names = [(f"p{i}", Role.PREFILL) for i in range(prefills)] + [(f"d{i}", Role.DECODE) for i in range(decodes)]
        self.names = [name for name, _ in names]
        for name, role in names:
            self.state.handle(
                WorkerConnected(
                    worker_id=name,
                    incarnation=name,
                    role=role,
                    block_size=16,
                    num_blocks=20_000,
                    max_context_tokens=131_072,
                    max_batch=256,
                    max_batch_tokens=8192,
                    inbox_depth=16,
                    block_bytes=2**21,
                    endpoint=name,
                    pulls_kv=True,
                ),
                self.now_s,
            )
        self.beat()
        for _ in range(decodes * RESIDENTS):
            self.run_one(finish=False)

    def beat(self) -> None:
        for name in self.names:
            self.state.handle(Load(worker_id=name, steps=1, free_blocks=15_000), self.now_s)

    def run_one(self, *, finish: bool = True) -> tuple[float, bool]:
        """Seconds of the decision, and whether it placed the request at once."""
        self.serial += 1
        self.now_s += 1e-4
        if self.serial % 200 == 0:
            self.beat()
        name = f"r{self.serial}"
        cached = {worker: self.rng.randint(0, 40) for worker in self.rng.sample(self.names, min(8, len(self.names)))}
        event = RequestArrived(
            request_id=name,
            num_prompt_tokens=self.rng.randint(500, 4000),
            sampling=Sampling(max_tokens=64),
            slo=Slo(),
            deadline_s=600.0,
            cached_blocks=cached,
        )
        began_s = time.thread_time()
        commands = self.state.handle(event, self.now_s)
        took_s = time.thread_time() - began_s
        reserve = next((one for one in commands if isinstance(one, Reserve)), None)
        if reserve is not None:
            self._answer(reserve, finish)
        return took_s, reserve is not None

    def _answer(self, reserve: Reserve, finish: bool) -> None:
        name, attempt, decode = reserve.request_id, reserve.attempt, reserve.worker_id
        state, now_s = self.state, self.now_s
        grant = None if reserve.is_local else GRANT
        sent = state.handle(Granted(key=AttemptKey(decode, name, attempt), grant=grant), now_s)
        prefill = next((one.worker_id for one in sent if isinstance(one, Prefill)), None)
        token = TokenOut(token_id=1)
        index = 0
        if prefill is not None:
            state.handle(FirstToken(key=AttemptKey(prefill, name, attempt), token=token), now_s)
            state.handle(
                TransferEnded(
                    key=AttemptKey(decode, name, attempt), is_committed=True, transfer_s=0.01, num_bytes=10**8
                ),
                now_s,
            )
            state.handle(Released(key=AttemptKey(prefill, name, attempt)), now_s)
            index = 1
        last = FinishReason.STOP if finish else None
        row = TokenRow(key=AttemptKey(decode, name, attempt), output_index=index, tokens=(token,), finish=last)
        state.handle(TokensArrived(worker_id=decode, rows=(row,)), now_s)
        if finish:
            state.handle(Released(key=AttemptKey(decode, name, attempt)), now_s)


def measure(prefills: int, decodes: int, policy: str, seconds: float) -> None:
    bench = Bench(prefills, decodes, policy)
    gc.collect()
    gc.disable()
    times: list[float] = []
    placed = 0
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        took_s, is_placed = bench.run_one()
        times.append(took_s)
        placed += is_placed
    gc.enable()
    times.sort()
    shown = [statistics.fmean(times), *(times[int(len(times) * share)] for share in (0.1, 0.5, 0.95, 0.99))]
    print(
        f"{policy:<12} {prefills:>4} {decodes:>4} {len(times):>9} {placed / len(times):>7.0%}"
        + "".join(f"{1e6 * one:>9.0f}" for one in shown)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--policies", nargs="+", default=["goodput", "least-ttft", "round-robin", "colocated"])
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds")
    print(f"{'policy':<12} {'P':>4} {'D':>4} {'decisions':>9} {'placed':>7}" + "".join(f"{one:>9}" for one in COLUMNS))
    for policy in options.policies:
        for workers in options.workers:
            for prefills in sorted({max(1, workers // 8), workers // 2}):
                measure(prefills, workers - prefills, policy, options.seconds)


if __name__ == "__main__":
    main()
