"""The interface of one row of `python -m benchmarks.attack`, and the facts about the attacked cluster that it may use.

A row is a module of this folder with a constant `ROW`. Its function attacks a live cluster from this host like a
process of another user: it may use addresses and process ids, but no secret. If the attacker is a caller with a token,
the row's `needs` is "token", and it uses `target.token`. It ends within `target.seconds` and cleans up after itself.
Meanwhile the benchmark sends legitimate requests, and compares each answer with the answer without an attack.

    ROW = AttackRow(number=6, name="protobufs that do not parse", attack=attack)

    def attack(target: AttackTarget) -> AttackResult:
        before = target.metric("router", names.REJECTED...)
        ...
        return AttackResult(attempts=200, rejected=200, counted=..., errors=Counter({"INVALID_ARGUMENT": 200}))
"""

from __future__ import annotations

import socket
import ssl
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from pdserve.launch.running import Running

SCRAPE_S: Final = 10.0
MAX_WAIT_S: Final = 0.3  # of a request of others


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
        return self.cluster.pid(name)

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
    complaints: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRow:
    number: int  # as in the section B
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
