"""What the rows of `python -m benchmarks.attack` share: the attacked cluster, what a row finds, and callers beside it.

A row is a function that attacks a live cluster from this host like a process of another user: it may use addresses and
process ids, but no secret. If the attacker is a caller with a token, the row's `needs` is "token", and it uses
`target.token`. It ends within `target.seconds` and cleans up after itself. Meanwhile the benchmark sends legitimate
requests, and compares each answer with the answer without an attack.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

from pdserve import Client, PdserveError, Retries
from pdserve.launch.running import Running

SCRAPE_S: Final = 10.0
MAX_WAIT_S: Final = 0.3  # of a request of others
JOIN_S: Final = 120.0
PAUSE_S: Final = 0.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackTarget:
    """A live cluster: one router, one prefill worker (p0) and one decode worker (d0), with a token for callers."""

    cluster: Running
    token: str
    seconds: float  # time limit of a row
    metrics_ports: Mapping[str, int]  # process name -> port of its /metrics
    ca: str | None = None  # file with the cluster's CA, if it has TLS

    @property
    def router(self) -> str:
        """HOST:PORT that callers use."""
        return self.cluster.target

    def address(self, name: str) -> str:
        """HOST:PORT of a worker's gRPC server."""
        return self.cluster.address(name)

    def pid(self, name: str) -> int:
        return self.cluster.pid("router" if name == "gateway" else name)  # it runs in the router's process

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of the samples of `metric` (its Prometheus name) in process `name` that have these labels."""
        where = f"http://127.0.0.1:{self.metrics_ports[name]}/metrics"
        with urllib.request.urlopen(where, timeout=SCRAPE_S) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((metric + " ", metric + "{")) and all(one in line for one in wanted)
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """The result of an attack. `complaints` is empty if the cluster behaved as the row requires."""

    attempts: int
    rejected: int  # attempts that ended with the typed error that the row requires
    counted: float | None = None  # increase of the counter of rejections; None if the row has no counter
    errors: Counter[str] = field(default_factory=Counter)  # status or error type -> count
    note: str = ""
    complaints: Sequence[str] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRow:
    number: int
    name: str
    attack: Callable[[AttackTarget], AttackResult]
    needs: str = ""  # "token" if the attacker is a caller with a token
    is_slow: bool = False  # left out unless named by --only
    has_tls: bool = False  # also attacks a cluster with TLS


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed the non-blocking socket. Unread data is dropped."""
    try:
        while one.recv(4096):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        pass
    return True


@final
class LogWatch:
    """Counts tracebacks that the cluster has logged since this was made."""

    def __init__(self, target: AttackTarget) -> None:
        self._lines = target.cluster.lines
        self._start = len(self._lines)

    def complaints(self) -> list[str]:
        count = sum("Traceback (most recent call last)" in line for line in self._lines[self._start :])
        return [f"{count} tracebacks were logged"] if count else []


@final
class Beside:
    """Asks again and again, as another caller, while its block runs."""

    def __init__(self, ask: Callable[[], object], pause_s: float = PAUSE_S) -> None:
        """`ask` raises if the answer is missing or wrong."""
        self._ask, self._pause_s = ask, pause_s
        self._stop = threading.Event()
        self._has_ended_one = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self.took_s: list[float] = []  # of correct answers
        self.failures: list[str] = []

    @property
    def longest_s(self) -> float:
        return max(self.took_s, default=JOIN_S)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.took_s or [0.0])

    def complaints(self, what: str, most_s: float) -> list[str]:
        """`what` was asked, in the plural."""
        found = []
        if self.failures:
            found.append(f"{len(self.failures)} {what} failed, the first with {self.failures[0]}")
        if self.longest_s > most_s:
            found.append(f"one of the {what} took {self.longest_s:.2f} s, over {most_s:g} s")
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        # The caller has its connection before the attack begins.
        self._has_ended_one.wait(JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            began_s = time.monotonic()
            try:
                self._ask()
                self.took_s.append(time.monotonic() - began_s)
            except Exception as error:  # a row complains of it, whatever it is
                self.failures.append(f"{type(error).__name__}: {error}")
            finally:
                self._has_ended_one.set()


@contextlib.contextmanager
def callers(
    count: int, router: str, token: str | None, call: Callable[[Client, int], object]
) -> Iterator[Counter[str]]:
    """Clients that all call, each time with the next number, until the block is left; how often which end came."""
    errors: Counter[str] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()
    numbers = itertools.count()

    def run() -> None:
        with Client(router, token=token, retries=Retries(limit=0)) as client:
            while not is_over.is_set():
                said = "served"
                try:
                    call(client, next(numbers))
                except PdserveError as error:
                    said = error.reason
                with lock:
                    errors[said] += 1

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for one in threads:
        one.start()
    try:
        yield errors
    finally:
        is_over.set()
        for one in threads:
            one.join(JOIN_S)


OPTIONS: Final[dict[str, Any]] = {"max_tokens": 12, "ignore_eos": True}
PROMPTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("def fib(n):", {"temperature": 0.0}),
    ("import json\n\n\nclass Encoder(" * 6, {"temperature": 0.8, "seed": 7}),
    ("# Return the sum of two numbers\n", {"temperature": 0.0}),
    ('"""A queue.\n\n' * 20, {"temperature": 0.7, "top_p": 0.9, "seed": 3}),
)


@contextlib.contextmanager
def legitimate_traffic(
    target: str, token: str, ca: str | None, expected: Sequence[tuple[int, ...]]
) -> Iterator[Beside]:
    """Requests of a legitimate caller. Each answer must equal the answer without an attack."""
    with Client(target, token=token, tls=ca, retries=Retries(limit=0)) as client:
        numbers = itertools.cycle(range(len(PROMPTS)))

        def ask() -> None:
            number = next(numbers)
            if answer(client, number) != expected[number]:
                raise ValueError("a wrong answer")

        with Beside(ask) as beside:
            yield beside


def answers_in_peace(target: str, token: str, ca: str | None = None) -> list[tuple[int, ...]]:
    with Client(target, token=token, tls=ca) as client:
        return [answer(client, number) for number in range(len(PROMPTS))]


def answer(client: Client, number: int) -> tuple[int, ...]:
    prompt, options = PROMPTS[number]
    return tuple(client.generate(prompt, **OPTIONS, **options).token_ids)
