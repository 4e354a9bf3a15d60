"""Stores that workers share, by their URL: Redis, a folder, or what fsspec reaches. Read `interface.py` first."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from pdserve.core.errors import ConfigError
from pdserve.core.urls import hide_password
from pdserve.engine.memory.object_stores.files import FolderStore, FsspecStore
from pdserve.engine.memory.object_stores.interface import ObjectStore, without_credentials
from pdserve.engine.memory.object_stores.redis_store import RedisStore

REDIS_SCHEMES: Final = ("redis", "rediss", "unix")


def open_object_store(url: str, room: str, object_bytes: int, most_bytes: int) -> ObjectStore:
    """Raises ConfigError. Objects of different rooms are not found by each other's workers."""
    scheme, separator, _ = url.partition("://")
    shown = hide_password(url)
    if not separator or not scheme:
        raise ConfigError("kv_store", shown, "a URL: redis://HOST:PORT/DB, file:///FOLDER or s3://BUCKET/PATH")
    if object_bytes > most_bytes:
        raise ConfigError("kv_store_bytes", most_bytes, f"at least {object_bytes}, for one block of this model")
    if scheme in REDIS_SCHEMES:
        return RedisStore(url, room, object_bytes, most_bytes)
    if scheme != "file":
        return FsspecStore(url, room, object_bytes, most_bytes)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError("kv_store", shown, f"a valid URL ({without_credentials(str(error), url)})") from None
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or path == Path("/") or not path.is_absolute():
        raise ConfigError("kv_store", shown, "file:///FOLDER, an absolute path on this host")
    try:
        return FolderStore(path, room, object_bytes, most_bytes)
    except OSError as error:
        raise ConfigError("kv_store", shown, f"a folder that this user can write to ({error.strerror})") from None
