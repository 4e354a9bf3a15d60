"""Names of the router's placement policies, for modules that must not import the router. Pure."""

from __future__ import annotations

from typing import Final

POLICIES: Final = (
    "goodput",
    "least-ttft",
    "round-robin",
    "least-loaded",
    "colocated",
    "dynamo",
    "lmetric",
    "mooncake",
)
