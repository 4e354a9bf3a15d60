"""What each shared store does: it keeps objects of one size under names.

Calls raise OSError, whose text contains no credentials. No call returns more bytes than an object has. Workers
write and remove at the same time, so an object may be gone at any moment, and one that is being written is not found.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Final, Protocol
from urllib.parse import unquote

from pdserve.core.urls import hide_password

CALL_S: Final = 2.0  # until a silent server counts as broken
FULL: Final = (errno.ENOSPC, errno.EDQUOT)  # of the OSError if an object has no room
ROOT: Final = "pdserve-kv"  # the folder, or the prefix of keys, of all rooms


class ObjectStore(Protocol):
    """Names are 32 hexadecimal digits. Called on several threads."""

    @property
    def most_got(self) -> int:
        """How many objects one call of `get` should ask for."""
        ...

    def num_found(self, names: Sequence[str]) -> int:
        """How many of the leading names have an object. A store may ask for only some of the names, so a later read may
        still find none."""
        ...

    def are_there(self, names: Sequence[str]) -> list[bool]: ...

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """None: there is none, or it has another size."""
        ...

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None: ...

    def make_room(self) -> None:
        """Removes the oldest objects beyond the bound, from time to time. If one of FULL was raised, some of the oldest
        in any case. May take long."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Those that are there."""
        ...

    def close(self) -> None: ...


def without_credentials(text: str, url: str) -> str:
    """`text` without the user and password of `url`, which errors of some clients contain."""
    userinfo = url.partition("://")[2].rpartition("@")[0]  # not by urlsplit, which refuses some URLs
    password = userinfo.partition(":")[2]
    for word in (url, userinfo, password, unquote(password)):
        if word:
            text = text.replace(word, "***")
    return hide_password(text)
