"""Row 21: names that all users of a host share are taken before a cluster starts.

The attacker binds the abstract socket names of all ports that a launcher chooses from. Before the fix, `up` found no
port and did not start.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.child import StartFailed
from pdserve.launch.running import Running

PORTS: Final = range(20_000, 32_768)


def attack(target: AttackTarget) -> AttackResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    complaints: list[str] = []
    with contextlib.ExitStack() as taken:
        num_names = 0
        for port in PORTS:
            with contextlib.suppress(OSError):
                one = taken.enter_context(socket.socket(socket.AF_UNIX))
                one.bind(f"\0pdserve.port.{port}")
                num_names += 1
        try:
            with Running.start("--model", "toy", "--http", "0"):
                pass
        except StartFailed as error:
            complaints.append(f"the cluster did not start: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return AttackResult(
        attempts=1,
        rejected=0 if complaints else 1,
        note=f"{num_names} of {len(PORTS)} abstract names were taken",
        complaints=tuple(complaints),
    )


ROW = AttackRow(number=21, name="names that all users share", attack=attack)
