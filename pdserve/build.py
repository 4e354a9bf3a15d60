"""The version and build of this installation, as hellos and calls carry them: 0.1.0+1a2b3c4d5e (PEP 440).

The build is the commit of the checkout that pdserve runs from, or that a wheel was built from (hatch_build.py). It is
read from files once, when a process starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.core.errors import ConfigError
from pdserve.core.installation import UNKNOWN_BUILD, VERSION

BUILD_FILE: Final = "build.txt"  # in a wheel, beside this module
_BUILD: Final = re.compile(r"[A-Za-z0-9.]{1,20}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
_DIGITS: Final = 10


def build_of(package: Path) -> str:
    """The build of the installation whose package `pdserve` is in this folder."""
    if commit := _commit(package.parent):
        return commit[:_DIGITS]
    built = _read(package / BUILD_FILE)
    return built if _BUILD.fullmatch(built) else UNKNOWN_BUILD


def _commit(checkout: Path) -> str:
    """The checked-out commit; empty if this is no checkout. Reads what gitrepository-layout(5) describes."""
    folder = checkout / ".git"
    if folder.is_file():  # of a further work tree, or of a submodule
        folder = checkout / _read(folder).removeprefix("gitdir: ")
    head = _read(folder / "HEAD")
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        shared = folder / _read(folder / "commondir")
        head = _read(folder / name) or _read(shared / name) or _packed(_read(shared / "packed-refs"), name)
    return head if _COMMIT.fullmatch(head) else ""


def _packed(refs: str, name: str) -> str:
    return next((line.split(" ")[0] for line in refs.splitlines() if line.endswith(f" {name}")), "")


def _read(file: Path) -> str:
    """Empty if there is no such file."""
    try:
        return read_text(file, MAX_SETTINGS_BYTES, "build").strip()
    except ConfigError:
        return ""


FULL_VERSION: Final = f"{VERSION}+{build_of(Path(__file__).parent)}"
