"""The flag `--plot FILE` of commands that draw charts: an SVG file or an HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pdserve.core.errors import ConfigError

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
        print(f"wrote {args.plot}", file=sys.stderr)
