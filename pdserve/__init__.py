"""The Python SDK of pdserve: everything that a caller of a cluster needs.

    from pdserve import Client, Slo

Importing this package loads no other module. Each name is loaded at first use, and none of them imports torch, ray,
redis or opentelemetry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from pdserve.core.installation import VERSION

if TYPE_CHECKING:
    from pdserve.client.aio import AsyncClient as AsyncClient
    from pdserve.client.aio import AsyncStream as AsyncStream
    from pdserve.client.beam import Beam as Beam
    from pdserve.client.connect import Tls as Tls
    from pdserve.client.results import Choice as Choice
    from pdserve.client.results import Completion as Completion
    from pdserve.client.results import Piece as Piece
    from pdserve.client.results import Timings as Timings
    from pdserve.client.results import Usage as Usage
    from pdserve.client.retries import Retries as Retries
    from pdserve.client.sync import Client as Client
    from pdserve.client.sync import Stream as Stream
    from pdserve.core.errors import Cancelled as Cancelled
    from pdserve.core.errors import ConfigError as ConfigError
    from pdserve.core.errors import ContextLengthExceeded as ContextLengthExceeded
    from pdserve.core.errors import DeadlineExceeded as DeadlineExceeded
    from pdserve.core.errors import InternalError as InternalError
    from pdserve.core.errors import InvalidRequest as InvalidRequest
    from pdserve.core.errors import KvLost as KvLost
    from pdserve.core.errors import NotFound as NotFound
    from pdserve.core.errors import NoWorkers as NoWorkers
    from pdserve.core.errors import Overloaded as Overloaded
    from pdserve.core.errors import PdserveError as PdserveError
    from pdserve.core.errors import PermissionDenied as PermissionDenied
    from pdserve.core.errors import QuotaExceeded as QuotaExceeded
    from pdserve.core.errors import Unauthenticated as Unauthenticated
    from pdserve.core.errors import Unavailable as Unavailable
    from pdserve.core.errors import UnknownMethod as UnknownMethod
    from pdserve.core.types import Slo as Slo

__version__ = VERSION

_HOMES: Final = {
    "pdserve.client.sync": ("Client", "Stream"),
    "pdserve.client.aio": ("AsyncClient", "AsyncStream"),
    "pdserve.client.beam": ("Beam",),
    "pdserve.client.connect": ("Tls",),
    "pdserve.client.results": ("Choice", "Completion", "Piece", "Timings", "Usage"),
    "pdserve.client.retries": ("Retries",),
    "pdserve.core.types": ("Slo",),
    "pdserve.core.errors": (
        "Cancelled",
        "ConfigError",
        "ContextLengthExceeded",
        "DeadlineExceeded",
        "InternalError",
        "InvalidRequest",
        "KvLost",
        "NoWorkers",
        "NotFound",
        "Overloaded",
        "PdserveError",
        "PermissionDenied",
        "QuotaExceeded",
        "Unauthenticated",
        "Unavailable",
        "UnknownMethod",
    ),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
