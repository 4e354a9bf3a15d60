"""Checks that a command with a full-screen display has a terminal."""

from __future__ import annotations

import sys

from pdserve.core.errors import ConfigError


def require_terminal(otherwise: str) -> None:
    """Raises ConfigError if standard output is not a terminal. `otherwise` names what a program would call instead."""
    if not sys.stdout.isatty():
        raise ConfigError("stdout", "no terminal", f"a terminal; {otherwise}")
