"""Row 20: another user binds the port of a process that has crashed, before it is restarted.

Needs root, to act as a second user. A cluster of its own is killed part by part, because the benchmark's must not be
restarted. Before the fix, the first bind succeeded and the gateway sent the attacker its callers' tokens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.running import Running

STRANGER: Final = 54_321  # a user id that owns nothing
SKIPPED: Final = "skipped: only root can act as a second user (sudo python -m benchmarks.attack --only 20)"
# Runs until its standard input is closed, and prints how often each attempt ended in what.
_TAKE: Final = """
import errno, json, os, select, socket, sys
user, port = map(int, sys.argv[1:])
os.setgroups([]); os.setgid(user); os.setuid(user)
ends, first = {}, True
while first or not select.select([sys.stdin], [], [], 0.005)[0]:
    first = False
    for host in ("127.0.0.1", "0.0.0.0", "::1", "::"):
        for options in range(4):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options & 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options >> 1)
                try:
                    one.bind((host, port)); one.listen(); end = "ok"
                except OSError as error:
                    end = errno.errorcode[error.errno]
            ends[end] = ends.get(end, 0) + 1
print(json.dumps(ends))
"""


def as_stranger(port: int) -> subprocess.Popen[str]:
    """Another user, who binds the port with all options until its standard input is closed."""
    command = [sys.executable, "-c", _TAKE, str(STRANGER), str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def attack(target: AttackTarget) -> AttackResult:
    if os.geteuid() != 0:
        return AttackResult(attempts=0, rejected=0, note=SKIPPED)
    errors: Counter[str] = Counter()
    with Running.start("--model", "toy", "--http", "0") as victim:
        for name in ("router", "gateway", "p0", "d0"):
            pid, port = victim.pid(name), int(victim.address(name).rpartition(":")[2])
            with as_stranger(port) as stranger:
                os.kill(pid, signal.SIGKILL)
                victim.wait_restarted(name, pid)
                errors.update(json.loads(stranger.communicate()[0]))
    taken = errors["ok"]
    return AttackResult(
        attempts=errors.total(),
        rejected=errors["EADDRINUSE"],
        errors=errors,
        complaints=(f"{taken} binds to a port of the cluster succeeded",) if taken else (),
    )


ROW = AttackRow(number=20, name="the port of a crashed process, by another user", attack=attack)
