"""Row 22: a log folder and a recording's folder, in which the attacker has made links, a pipe and readable files."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.child import StartFailed
from pdserve.launch.running import Running


def attack(target: AttackTarget) -> AttackResult:
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as parent:
        victim = Path(parent, "victim")
        victim.write_text("precious")
        makes: tuple[Callable[[Path], object], ...] = (
            lambda file: os.symlink(victim, file),
            lambda file: os.link(victim, file),
            os.mkfifo,
        )
        for number, make in enumerate(makes):
            logs = Path(parent, f"logs{number}")
            logs.mkdir(mode=0o777)
            for name in ("p0.log", "run.jsonl"):
                make(logs / name)
            flags = [("--log-dir", str(logs))]
            if number != 1:  # an older recording is renamed, so a hard link is not written to
                flags.append(("--record", str(logs / "run.jsonl")))
            for flag in flags:
                try:
                    with Running.start("--model", "toy", *flag):
                        complaints.append(f"{flag[0]} wrote through a file of kind {number}")
                except StartFailed as error:
                    errors["ConfigError" if ": got " in str(error) else str(error)] += 1
        if victim.read_text() != "precious":
            complaints.append("the file behind the links has changed")
        logs = Path(parent, "logs")
        logs.mkdir(mode=0o777)
        with Running.start("--model", "toy", "--log-dir", str(logs), "--record", str(logs / "run.jsonl")):
            readable = [one.name for one in logs.iterdir() if one.stat().st_mode & 0o077]
        complaints += [f"others can read {name}" for name in readable]
    return AttackResult(
        attempts=errors.total(), rejected=errors["ConfigError"], errors=errors, complaints=tuple(complaints)
    )


ROW = AttackRow(number=22, name="links and pipes in the folder of logs", attack=attack)
