"""The command `pdserve`: sub-commands that parse flags, call other packages and print.

A file holds one sub-command, or several of one subject, and imports what it needs when it runs. The commands for
recordings and for simulations are in router/recording and simulator/commands. Read `main.py` first, then `generate.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""
