"""How commands on this host find the CA of a cluster that `pdserve up --tls auto` has started here.

The folder with the cluster's certificates is an OwnedFolder: only its user can read it, and it ends with its launcher.
It holds a file for each port of the cluster. Standard library only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from pdserve.core.setting import CA
from pdserve.owned_folder import PREFIX, temporary_folders

PURPOSE: Final = "tls"
_PORT: Final = "port-{port}"


def announce(folder: Path, ports: tuple[int, ...]) -> None:
    """Clients of these ports on this host then find the CA in `folder`."""
    for port in ports:
        (folder / _PORT.format(port=port)).touch(mode=0o600)


def local_ca(port: str) -> str:
    """The path of the CA of this user's cluster that serves `port`; empty if there is none."""
    if not port.isdecimal() or len(port) > 5:
        return ""
    for parent in temporary_folders():
        for folder in parent.glob(f"{PREFIX}{PURPOSE}-*"):
            if _is_ours(folder) and (folder / _PORT.format(port=int(port))).exists():
                return str(folder / CA)
    return ""


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write there: another user could offer a CA of its own."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
