"""Row 25: model folders whose files are devices, pipes, endless or impossible. Each is refused with one line, at once.

The attacker has no access to the cluster: an operator starts `pdserve up` with the folder of
a stranger.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.launch.settings import bundled_model

END_S: Final = 60.0
MAX_BYTES: Final = 2**30  # of the largest child


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def _sparse(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 2**40)


def _layers(path: Path) -> None:
    known = json.loads((bundled_model() / "config.json").read_text())
    path.write_text(json.dumps(known | {"num_hidden_layers": 10**9}))


WRONG: Final[tuple[tuple[str, Callable[[Path], None]], ...]] = (
    *((name, wrong) for name in ("config.json", "tokenizer.json") for wrong in (_device, _pipe, _deep, _sparse)),
    ("config.json", _layers),
    *(("generation_config.json", wrong) for wrong in (_device, _pipe)),
)


def attack(target: AttackTarget) -> AttackResult:
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    for name, wrong in WRONG:
        with tempfile.TemporaryDirectory() as folder:
            for path in bundled_model().iterdir():
                if path.name != name:
                    Path(folder, path.name).symlink_to(path)
            wrong(Path(folder, name))
            words = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--model", folder]
            what = f"{name} {wrong.__name__[1:]}"
            try:
                ended = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
            except subprocess.TimeoutExpired:
                complaints.append(f"{what}: no end within {END_S:.0f} s")
                continue
        if ended.returncode and ": error: " in ended.stderr and "Traceback" not in ended.stderr:
            errors["MODEL"] += 1
        else:
            complaints.append(f"{what}: status {ended.returncode}, {ended.stderr[-200:]!r}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if used > MAX_BYTES:
        complaints.append(f"a child took {used} bytes")
    return AttackResult(
        attempts=len(WRONG), rejected=errors["MODEL"], errors=errors, complaints=tuple(complaints), note="no cluster"
    )


ROW: Final = AttackRow(number=25, name="model folders that are no models", attack=attack)
