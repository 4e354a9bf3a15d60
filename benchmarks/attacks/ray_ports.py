"""Row 11: the ports of the Ray cluster that `up --ray` starts. Slow, because it starts one.

Its processes must listen on loopback only, its control plane must reject a caller without the token, and only its user
may read that token.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.ports import listeners, session_of
from pdserve.launch.running import Running

START_S: Final = 300.0
ASK_S: Final = 60.0
_STRANGER: Final = "import sys, ray; ray.init(sys.argv[1], logging_level='ERROR'); print('in')"


def attack(target: AttackTarget) -> AttackResult:
    errors: Counter[str] = Counter()
    complaints = []
    with Running.start("--model", "toy", "--ray", timeout_s=START_S) as cluster:
        pids = session_of(cluster.pid("ray"))
        found = listeners(pids)
        complaints += [f"{one} can be reached by others" for one in found if not one.is_on_loopback]
        errors["on loopback"] = sum(one.is_on_loopback for one in found)
        if not {"gcs_server", "raylet"} <= {one.process for one in found}:
            complaints.append(f"gcs_server and raylet are not among {sorted({one.process for one in found})}")
        [control] = [one for one in found if one.process == "gcs_server"]
        errors[said := _ask_without_token(f"127.0.0.1:{control.port}")] += 1
        if said == "OK":
            complaints.append("Ray's control plane let a stranger in without a token")
        folder = _token_folder(pids)
        if folder is None or folder.stat().st_mode & 0o077:
            complaints.append("Ray's token is not in a folder of its user alone")
    return AttackResult(
        attempts=len(found) + 2, rejected=len(found) + 2 - len(complaints), errors=errors, complaints=tuple(complaints)
    )


def _ask_without_token(address: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "HOME": "/nonexistent"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _STRANGER, address],
            env=environ,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer"
    return "OK" if "in" in done.stdout.split() else "rejected"


def _token_folder(pids: list[int]) -> Path | None:
    for pid in pids:
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(b"RAY_AUTH_TOKEN_PATH="):
                return Path(one.partition(b"=")[2].decode()).parent
    return None


ROW = AttackRow(number=11, name="ports of a local Ray", attack=attack, is_slow=True)
