"""Row 10: secrets in /proc, on the command line and in the environment of every process of the cluster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.ports import session_of


def attack(target: AttackTarget) -> AttackResult:
    found: Counter[str] = Counter()
    complaints = []
    pids = {name: session_of(pid) for name, pid in target.cluster.pids().items()}
    environ = {pid: _read(pid, "environ") for group in pids.values() for pid in group}
    secrets = {"the callers' token": target.token.encode()}
    for text in environ.values():
        for variable in text.split(b"\0"):
            if variable.startswith(b"PDSERVE_CLUSTER_SECRET="):
                secrets["the cluster's secret"] = variable.partition(b"=")[2]
    if len(secrets) < 2:
        complaints.append(f"of two secrets only {sorted(secrets)} could be looked for")
    for name, group in pids.items():
        for pid in group:
            line = _read(pid, "cmdline")
            for what, secret in secrets.items():
                found["looked"] += 2
                if secret in line:
                    complaints.append(f"{what} is on the command line of {name}")
                if secret in environ[pid] and not _may_know(name, what):
                    complaints.append(f"{what} is in the environment of {name}")
    attempts = found["looked"]
    return AttackResult(attempts=attempts, rejected=attempts - len(complaints), complaints=tuple(complaints))


def _may_know(name: str, what: str) -> bool:
    """The router knows both, workers only the cluster's, Redis none."""
    return name == "router" or (name != "redis" and what != "the callers' token")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it has ended


ROW = AttackRow(number=10, name="secrets in /proc", attack=attack)
