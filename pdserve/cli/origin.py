"""Where a result comes from: the version and commit of pdserve, and the machine that computed it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import pdserve

_ROOT: Final = Path(pdserve.__file__).parents[1]
_TIMEOUT_S: Final = 2.0
_CPU_INFO: Final = Path("/proc/cpuinfo")


def origin() -> str:
    """One line for the caption of a chart."""
    return f"{version()}; computed on {machine()}."


def version() -> str:
    """With the commit, if pdserve runs from a checkout; `-dirty` if files in it have changed."""
    name = f"pdserve {pdserve.__version__}"
    commit = _commit(_ROOT)
    return f"{name}, commit {commit}" if commit else name


def machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"


def _commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
