"""Hides secrets in URLs. Pure."""

from __future__ import annotations

import re
from typing import Final

# Up to the last @, because a password may contain an unescaped / or @.
_USERINFO: Final = re.compile(r"(?<=//).*(?=@)", re.DOTALL)
_QUERY: Final = re.compile(r"(?<=[?&]password=)[^&]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    """`url` with *** in place of its user and password."""
    return _QUERY.sub("***", _USERINFO.sub("***", url))


def has_password(url: str) -> bool:
    return hide_password(url) != url


def place(url: str) -> str:
    """HOST:PORT of `url`, or the path of a Unix socket; empty if it has neither."""
    scheme, _, rest = url.partition("://")
    rest = rest.rpartition("@")[2].partition("?")[0]
    return rest if scheme == "unix" else rest.partition("/")[0]
