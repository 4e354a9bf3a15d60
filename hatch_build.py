"""Hatch calls this when a wheel is built: writes the commit that it is built from into it (pdserve/build.py).

PDSERVE_BUILD replaces the commit where there is no checkout, as in a container.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildFile(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = os.environ.get("PDSERVE_BUILD", "") or commit(Path(self.root))
        if version == "editable" or not build:  # an editable installation reads its checkout
            return
        file = Path(self.directory) / "build.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(build, encoding="utf-8")
        build_data["force_include"][str(file)] = "pdserve/build.txt"


def commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
