"""Row 9: the launcher is killed. Looks for left processes and shared memory.

Attacks a cluster of its own, because the benchmark's cluster must keep running. A folder whose owner was killed must be
deleted by the next start, and a folder of a running owner must stay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.running import Running
from pdserve.owned_folder import OwnedFolder

END_S: Final = 10.0
_SHARED: Final = Path("/dev/shm")
_ORPHAN: Final = (
    "import os, signal; from pdserve.owned_folder import OwnedFolder as F; F.make('ray'); os.kill(os.getpid(), 9)"
)


def attack(target: AttackTarget) -> AttackResult:
    with tempfile.TemporaryDirectory(prefix="pdserve-attack-") as parent:
        folder = Path(parent)
        env = {"TMPDIR": parent}
        shared = set(_SHARED.glob("*"))
        cluster = Running.start("--model", "toy", env=env)
        pids = cluster.pids()
        cluster.kill()
        _until(lambda: all(_has_ended(pid) for pid in pids.values()))
        complaints = [f"{name} outlived its launcher" for name, pid in pids.items() if not _has_ended(pid)]
        left = [path for path in set(_SHARED.glob("*")) - shared if "pdserve" in path.name]
        complaints += [f"{path} remained" for path in left]
        subprocess.run([sys.executable, "-c", _ORPHAN], env={**os.environ, **env}, check=False)
        orphans = list(folder.iterdir())  # the killed launcher's sockets, and the folder of _ORPHAN
        living = OwnedFolder.make("ray", folder)
        with Running.start("--model", "toy", env=env):
            if any(orphan.exists() for orphan in orphans):
                complaints.append("the next start left a folder without an owner")
            if not living.path.exists():
                complaints.append("the next start removed a folder of a living owner")
        living.remove()
    attempts = len(pids) + len(orphans) + 1
    return AttackResult(attempts=attempts, rejected=max(0, attempts - len(complaints)), complaints=tuple(complaints))


def _until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + END_S
    while not holds() and time.monotonic() < ends_s:
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    """A zombie has ended; its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


ROW = AttackRow(number=9, name="SIGKILL of a launcher", attack=attack)
