"""What a bearer token may contain. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import ConfigError

MAX_TOKEN_CHARS: Final = 4096


def is_token(token: str) -> bool:
    """Headers of HTTP and metadata of gRPC carry printable ASCII only, and lose spaces at the ends."""
    return 0 < len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable() and token == token.strip()


def check_token(name: str, token: str) -> None:
    """Raises ConfigError, which does not repeat the token."""
    if not is_token(token):
        raise ConfigError(
            name,
            "a value that no header can carry",
            f"1 to {MAX_TOKEN_CHARS} characters of printable ASCII, without spaces at the ends",
        )
