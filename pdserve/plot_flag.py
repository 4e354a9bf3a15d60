"""What commands that compute results share: where a result comes from, and the flag `--plot`.

The origin of a result is the version and commit of pdserve, and the machine that computed it.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pdserve.core.errors import ConfigError
from pdserve.core.installation import VERSION

_ROOT: Final = Path(__file__).parents[1]
_TIMEOUT_S: Final = 2.0
_CPU_INFO: Final = Path("/proc/cpuinfo")


def origin() -> str:
    """One line for the caption of a chart."""
    return f"{version()}; computed on {machine()}."


def version() -> str:
    """With the commit, if pdserve runs from a checkout; `-dirty` if files in it have changed."""
    name = f"pdserve {VERSION}"
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


# --- --plot FILE ----------------------------------------------------------------------------------------------
# For commands that draw charts: an SVG file or an HTML page.

_PAGES: Final = (".html", ".htm")
_DRAWINGS: Final = (".svg",)


def add_plot_flag(group: Any, *names: str) -> None:
    """`names`: older names of the flag. `group` is a parser or one of its groups."""
    older = f"; also {' and '.join(names)}" if names else ""
    group.add_argument(
        "--plot",
        *names,
        dest="plot",
        metavar="FILE",
        help=f"write charts to FILE: an SVG if it ends in .svg, a page if in .html, neither needs a network{older}",
    )


def check_plot(args: argparse.Namespace) -> None:
    """Before a long run. Raises ConfigError if the name has another ending or the file cannot be written."""
    if args.plot is None:
        return
    if not args.plot.lower().endswith(_PAGES + _DRAWINGS):
        raise ConfigError("plot", args.plot, "the name of a file that ends in .svg or .html")
    try:
        Path(args.plot).open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError("file", args.plot, f"a file that can be written ({error.strerror})") from None


def write_plot(args: argparse.Namespace, *, svg: Callable[[], str], page: Callable[[], str]) -> None:
    if args.plot is not None:
        make = svg if args.plot.lower().endswith(_DRAWINGS) else page
        Path(args.plot).write_text(make(), encoding="utf-8", errors="replace")
        sys.stderr.write(f"wrote {args.plot}\n")
