"""The command `pdserve`: sub-commands that parse flags, call other packages and print.

A file holds one sub-command, or several of one subject, and imports what it needs when it runs. The commands for
recordings and for simulations are in router/recording and simulator/commands. Read `main.py` first, then `generate.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table, whose first row is its head. Pure."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
