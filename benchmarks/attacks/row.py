"""What one row of `python -m benchmarks.attack` is, and what it may know of the cluster that it attacks.

A row is a module of this folder with a constant `ROW`. Its function attacks a live cluster as a stranger would: from
this host, with what a stranger can learn (addresses, process ids), without a secret. A row that needs a caller with a
token says so in its `needs` and takes `target.token`. It ends within `target.seconds` and cleans up after itself.
The benchmark itself sends legitimate requests meanwhile and compares each answer with the one given in peace.

    ROW = Row(number=6, name="protobufs that do not parse", attack=attack)

    def attack(target: Target) -> CheckResult:
        before = target.metric("router", names.REJECTED...)
        ...
        return CheckResult(attempts=200, rejected=200, counted=..., errors=Counter({"INVALID_ARGUMENT": 200}))
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackTarget:
    """A live cluster: one router, one prefill worker (p0) and one decode worker (d0), with a token for callers."""

    cluster: Running
    token: str
    seconds: float  # that a row may take
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
        """The sum of the samples of `metric` (its Prometheus name) in process `name` that carry these labels."""
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
    """What an attack achieved. `complaints` is empty where the row's required behaviour was seen."""

    attempts: int
    rejected: int  # attempts that ended in the typed error that the row requires
    counted: float | None = None  # rise of the counter of rejections; None where the row has no counter
    errors: Counter[str] = field(default_factory=Counter)  # status or error type -> count
    note: str = ""
    complaints: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRow:
    number: int  # as in the section B
    name: str
    attack: Callable[[AttackTarget], AttackResult]
    needs: str = ""  # "token" where the attacker is a caller with a token
    is_slow: bool = False  # left out unless named by --only
    has_tls: bool = False  # also attacks a cluster with TLS


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed the non-blocking socket. What it still sent is dropped."""
    try:
        while one.recv(4096):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        pass
    return True
