"""Random changes of a live cluster under load: `python -m benchmarks.changes [--sequences 30] [--seed 1]`.

A cluster of the engine toy with two routers serves clients of the SDK and of gRPC without retries in a closed loop,
while random sequences of scale, role, roll, restart, drain, undrain, and SIGKILL of a worker or a router are made, also
a SIGKILL during a change. At most one process is dead at a time. After each sequence, the cluster is scaled to two
workers of each role, the load ends, and is checked from outside:

- each token is the computed one, each call of the SDK has its whole answer, and other calls end with a typed error at
  most; a call without retries may fail only if a router was killed;
- each router knows the same four workers, by four names, with their roles;
- no request is left, and every block of each worker is free or cached;
- the launcher has the child processes that it had, and neither it nor a router has more open files than before.

The exit status is 1 if one of these does not hold. `tests/unit/simulator/test_random_changes.py` is the same for the
simulated cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

import psutil  # type: ignore[import-untyped]

from benchmarks.harness import unrest
from benchmarks.kill_storm_calls import By
from benchmarks.toy_load import Sent, ToyClients, toy_requests
from pdserve import AsyncClient, Client, PdserveError, Retries
from pdserve.core.errors import ChangeFailed, ConfigError, InvalidRequest, NotFound, Unavailable
from pdserve.core.types import Role
from pdserve.launch.running import Running

SIZE: Final = 2  # workers of each role at the end of a sequence
ROUTERS: Final = 2
PROMPTS: Final = (20, 100, 200, 300)
ANSWER: Final = 48  # tokens
FLAGS: Final = (
    *("--model", "toy", "--prefill", str(SIZE), "--decode", str(SIZE), "--routers", str(ROUTERS)),
    *("--set", "worker.toy_step_s=0.02", "--set", "worker.drain_s=5"),
    *(
        "--set",
        "router.slo_ttft_s=120",
        "--set",
        "router.slo_tpot_s=20",
    ),  # a small cluster is slow, and rejects nothing
)
SETTINGS: Final = ("", "[worker]\nheartbeat_s = 0.2\n", "[worker]\nheartbeat_s = 0.25\n")
WITHIN_S: Final = 120.0  # for a process that was killed, and for a change to end
REST_S: Final = 60.0
SPARE_FILES: Final = 12  # ports of slots that were added, and what is open for a moment
POLL_S: Final = 0.1
OURS: Final = Retries(limit=0, resume_s=0.0)


@dataclass(slots=True)
class Account:
    """What was made and seen."""

    made: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    resumed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    files: dict[int, list[int]] = field(default_factory=dict)  # process id -> open files after each sequence

    def judge(self, sequence: int, sent: list[Sent], has_killed_router: bool) -> None:
        for one in sent:
            self.requests += 1
            self.resumed += one.is_resumed
            if one.wrong:
                self.wrong.append(f"sequence {sequence}: {one.wrong}")
            if one.error is not None:
                self.errors[one.error_text] += 1
                is_typed = isinstance(one.error, PdserveError)
                if not is_typed or one.request.by is By.SDK or not has_killed_router:
                    self.wrong.append(f"sequence {sequence}: {one.error_text}")


@final
class Operator:
    """Makes one sequence."""

    def __init__(self, cluster: Running, client: AsyncClient, draw: random.Random, made: Counter[str]) -> None:
        self._cluster, self._client, self._draw, self._made = cluster, client, draw, made
        self.has_killed_router = False

    async def sequence(self) -> None:
        for _ in range(self._draw.randint(2, 4)):
            kind = self._draw.choice(("scale", "role", "roll", "restart", "drain", "undrain", "worker", "router"))
            print(f"changes: {kind}", file=sys.stderr, flush=True)
            match kind:
                case "drain" | "undrain":
                    await self._drain(is_undone=kind == "undrain")
                case "worker" | "router":
                    await self._kill(kind)
                case _:
                    await self._change_and_kill(kind)
        for name in await self._names():
            with contextlib.suppress(NotFound):
                await self._client.undrain(name)
        ends_s = time.monotonic() + WITHIN_S
        while await self._change("scale", lambda: self._client.scale(prefill=SIZE, decode=SIZE)) != "made":
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the cluster does not return to {SIZE} workers of each role")
            await asyncio.sleep(POLL_S)

    async def _names(self) -> list[str]:
        return [one.worker_id for one in (await self._again(self._client.topology)).workers]

    async def _again(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Repeats the call while its router has been killed."""
        ends_s = time.monotonic() + WITHIN_S
        while True:
            try:
                return await call()
            except Unavailable:
                if time.monotonic() > ends_s:
                    raise
                await asyncio.sleep(POLL_S)

    # -- changes -------------------------------------------------------------------------------------------------

    async def _change_and_kill(self, kind: str) -> None:
        draw, client = self._draw, self._client
        names = await self._names()
        call: Callable[[], Coroutine[Any, Any, None]]
        match kind:
            case "scale":
                prefill, decode = draw.randint(0, 3), draw.randint(1, 3)
                call = lambda: client.scale(prefill=prefill, decode=decode)  # noqa: E731
            case "role":
                worker_id, role = draw.choice(names), draw.choice(list(Role))
                call = lambda: client.set_role(worker_id, role)  # noqa: E731
            case "roll":
                surge, settings = draw.choice((0, 1)), draw.choice(SETTINGS)
                call = lambda: client.roll(surge=surge, settings=settings)  # noqa: E731
            case _:
                surge, chosen = draw.choice((0, 1)), [draw.choice(names)]
                call = lambda: client.roll(chosen, surge=surge)  # noqa: E731
        changing = asyncio.create_task(self._change(kind, call))
        if draw.random() < 0.3:
            await asyncio.sleep(draw.uniform(0.2, 3.0))
            await self._kill(draw.choice(("worker", "router")))
        await changing

    async def _change(self, kind: str, call: Callable[[], Coroutine[Any, Any, None]]) -> str:
        """How it ended. Waits for an earlier change that goes on after its router was killed."""
        ends_s = time.monotonic() + WITHIN_S
        while True:
            try:
                await call()
                end = "made"
            except Unavailable as error:
                if "another change" in error.message and time.monotonic() < ends_s:
                    await asyncio.sleep(POLL_S)
                    continue
                end = "without its router"
            except ChangeFailed as error:
                print(f"changes: {kind}: {error.message}", file=sys.stderr, flush=True)
                end = "stopped"
            except (ConfigError, InvalidRequest, NotFound):
                end = "refused"
            self._made[kind if end == "made" else f"{kind}, {end}"] += 1
            return end

    # -- operators and crashes -----------------------------------------------------------------------------------

    async def _drain(self, *, is_undone: bool) -> None:
        """Not of the only decode worker that serves."""
        workers = (await self._again(self._client.topology)).workers
        serving = [one.worker_id for one in workers if one.role is Role.DECODE and not one.is_drained]
        worker_id = self._draw.choice([one.worker_id for one in workers])
        if not is_undone and serving == [worker_id]:
            return
        call = self._client.undrain if is_undone else self._client.drain
        with contextlib.suppress(NotFound):
            await self._again(lambda: call(worker_id))
        self._made["undrain" if is_undone else "drain"] += 1

    async def _kill(self, kind: str) -> None:
        """Returns when the process has been started again, or the worker was ended by a change."""
        routers = [f"router-{number}" for number in range(ROUTERS)]
        name = self._draw.choice(routers if kind == "router" else await self._names())
        pid = self._cluster.pid(name)
        if pid not in {one.pid for one in psutil.Process(self._cluster.process.pid).children()}:
            return  # a change has ended it, and its number may be another's
        os.kill(pid, signal.SIGKILL)
        self._made[f"kill of a {kind}"] += 1
        self.has_killed_router |= kind == "router"
        ends_s = time.monotonic() + WITHIN_S
        while not await self._is_back(name, pid, is_router=kind == "router"):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{name} did not come back within {WITHIN_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _is_back(self, name: str, pid: int, *, is_router: bool) -> bool:
        if is_router:
            return self._cluster.pid(name) != pid
        seen = {one.worker_id: one for one in (await self._again(self._client.topology)).workers}
        return name not in seen or (self._cluster.pid(name) != pid and seen[name].is_connected)


@contextlib.asynccontextmanager
async def load(target: str, draw: random.Random, at_once: int) -> AsyncIterator[list[Sent]]:
    """Requests of so many callers until the end of the block, and then their last answers."""
    is_over = False
    async with ToyClients.connected(target) as clients:
        requests: Iterator[Any] = toy_requests(draw, PROMPTS, ANSWER, (By.SDK, By.SDK, By.PLAIN))

        async def call() -> None:
            while not is_over:
                await clients.send(next(requests))

        calling = [asyncio.create_task(call()) for _ in range(at_once)]
        try:
            yield clients.sent
        finally:
            is_over = True
            await asyncio.gather(*calling)


async def make(cluster: Running, number: int, args: argparse.Namespace, account: Account) -> None:
    draw = random.Random(f"{args.seed} {number}")
    async with AsyncClient(cluster.target, retries=OURS) as client:
        operator = Operator(cluster, client, draw, account.made)
        async with load(cluster.target, random.Random(f"load {args.seed} {number}"), args.at_once) as sent:
            await operator.sequence()
    account.judge(number, sent, operator.has_killed_router)


# --- checks from outside --------------------------------------------------------------------------------------


def each_router(target: str) -> dict[str, Client]:
    """A client of each router: the kernel chooses one for a connection."""
    found: dict[str, Client] = {}
    ends_s = time.monotonic() + WITHIN_S
    while len(found) < ROUTERS:
        client = Client(target, retries=OURS)
        try:
            name = client.topology().router_id
        except Unavailable:
            name = ""
        if name and name not in found:
            found[name] = client
        else:
            client.close()
        if time.monotonic() > ends_s:
            raise TimeoutError(f"only {list(found)} answer")
    return found


def check(cluster: Running, number: int, account: Account, children: int) -> None:
    wrong = []
    for name, client in each_router(cluster.target).items():
        if left := unrest(client, 2 * SIZE, REST_S):
            wrong.append(f"{name}: {left}")
        workers = client.topology().workers
        names = Counter(one.worker_id for one in workers)
        roles = Counter(one.role for one in workers)
        if len(names) != 2 * SIZE or roles != dict.fromkeys(Role, SIZE):
            wrong.append(f"{name}: workers {sorted(names.elements())}, {dict(roles)}")
        client.close()
    launcher = psutil.Process(cluster.process.pid)
    if (there := len(launcher.children())) != children:
        wrong.append(f"the launcher has {there} child processes, and had {children}")
    routers = [cluster.pid(f"router-{member}") for member in range(ROUTERS)]
    for pid in (cluster.process.pid, *routers):
        seen, process = account.files.setdefault(pid, []), psutil.Process(pid)
        ends_s = time.monotonic() + REST_S
        while seen and process.num_fds() > seen[0] + SPARE_FILES and time.monotonic() < ends_s:
            time.sleep(POLL_S)  # connections are closed late
        seen.append(process.num_fds())
        if seen[-1] > seen[0] + SPARE_FILES:
            wrong.append(f"process {pid} has {seen[-1]} open files, and had {seen[0]}")
    account.wrong += [f"sequence {number}: {one}" for one in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=6, help="callers (6)")
    args = parser.parse_args()
    account, began_s = Account(), time.monotonic()
    with Running.start(*FLAGS, env={"OMP_NUM_THREADS": "1"}) as cluster:
        children = len(psutil.Process(cluster.process.pid).children())
        for number in range(args.sequences):
            asyncio.run(make(cluster, number, args, account))
            check(cluster, number, account, children)
            print(f"changes: {number + 1} sequences, {account.requests} requests", file=sys.stderr, flush=True)
        files = {"launcher": account.files[cluster.process.pid]}
        files |= {str(pid): seen for pid, seen in account.files.items() if pid != cluster.process.pid and len(seen) > 1}
    print(f"{args.sequences} sequences in {time.monotonic() - began_s:.0f} s, {account.requests} requests")
    print("made: " + ", ".join(f"{name} {count}" for name, count in sorted(account.made.items())))
    print(f"{account.resumed} calls resumed by the SDK")
    print("open files, first and last: " + ", ".join(f"{name} {seen[0]} {seen[-1]}" for name, seen in files.items()))
    for text, count in account.errors.most_common():
        print(f"{count} x {text}")
    for line in account.wrong[:100]:
        print("WRONG:", line)
    print(f"{len(account.wrong)} wrong")
    return int(bool(account.wrong))


if __name__ == "__main__":
    sys.exit(main())
