"""Row 3: another user tries to reach the embedded Redis, or to take its place, so that the router connects to a worker
of the attacker's.

Needs root, to act as a second user. The next line of defence is not reached here and is tested in
tests/unit/router_io/test_forged_workers.py: a registered worker receives nothing before it has proven the secret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.taken_port import STRANGER

SKIPPED: Final = "skipped: only root can act as a second user (sudo python -m benchmarks.attack --only 3)"
# Prints how each attempt ended.
_TRY: Final = """
import errno, json, os, socket, sys
user, path = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setgid(user); os.setuid(user)
folder = os.path.dirname(path)
attempts = {
    "connect": lambda: socket.socket(socket.AF_UNIX).connect(path),
    "bind": lambda: socket.socket(socket.AF_UNIX).bind(path),
    "bind beside it": lambda: socket.socket(socket.AF_UNIX).bind(path + "2"),
    "unlink": lambda: os.unlink(path),
    "list the folder": lambda: os.listdir(folder),
    "open the folder to others": lambda: os.chmod(folder, 0o777),
    "move the folder": lambda: os.rename(folder, folder + "-moved"),
}
ends = {}
for name, attempt in attempts.items():
    try:
        attempt(); ends[name] = "ok"
    except OSError as error:
        ends[name] = errno.errorcode[error.errno]
print(json.dumps(ends))
"""


def as_stranger(path: str) -> dict[str, str]:
    """How the attempts of another user against the socket file `path` end."""
    command = [sys.executable, "-c", _TRY, str(STRANGER), path]
    ends: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return ends


def attack(target: AttackTarget) -> AttackResult:
    if os.geteuid() != 0:
        return AttackResult(attempts=0, rejected=0, note=SKIPPED)
    ends = as_stranger(target.address("redis"))
    errors = Counter(ends.values())
    return AttackResult(
        attempts=errors.total(),
        rejected=errors["EACCES"] + errors["EPERM"],
        errors=errors,
        complaints=tuple(f"another user could {name}" for name, end in ends.items() if end == "ok"),
    )


ROW = AttackRow(number=3, name="another user and the embedded Redis", attack=attack)
