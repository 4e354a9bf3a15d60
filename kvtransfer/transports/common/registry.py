"""Finds the transports: one file in kvtransfer/transports each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Final

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.protocol.device import Fence
from kvtransfer.transports.common.interface import Transport
from pdserve.config import STAGED, TRANSPORT_FILES
from pdserve.core.errors import ConfigError, InternalError
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool


def _find() -> dict[int, Transport]:
    """By number, the preferred one first. Imported by name, so that a transport is added by its file alone."""
    found: list[Transport] = []
    for name in TRANSPORT_FILES:
        transport = getattr(importlib.import_module(f"kvtransfer.transports.{name}"), "TRANSPORT", None)
        if transport is None:
            raise InternalError(
                f"kvtransfer/transports/{name}.py is no transport: remove it if an older version left it"
            )
        found.append(transport)
    assert [one.name for one in found] == list(TRANSPORT_FILES), "a transport has the name of its file"
    by_kind = {one.kind: one for one in sorted(found, key=lambda one: one.order)}
    assert len(by_kind) == len(found), f"two transports have one number: {[(one.name, one.kind) for one in found]}"
    return by_kind


TRANSPORTS: Final = _find()
NAMES: Final = ("auto", *(one.name for one in TRANSPORTS.values() if not one.name.endswith(STAGED)))  # of a setting


def choose(name: str, *, is_on_host: bool = True) -> tuple[Transport, ...]:
    """The transports of a setting, the preferred first; auto: all that this system supports for such a pool.

    tcp for a pool on a GPU is tcp_staged, which `auto` includes for every pool. Raises ConfigError.
    """
    if name != "auto" and name not in TRANSPORT_FILES:
        raise ConfigError("transport", name, "one of " + ", ".join(NAMES))
    fitting = [one for one in TRANSPORTS.values() if (one.is_for_hosts if is_on_host else one.is_for_devices)]
    if name == "auto":
        found = tuple(one for one in fitting if not one.why_not(is_on_host=is_on_host))
        if not found:
            reasons = "; ".join(f"{one.name}: {one.why_not(is_on_host=is_on_host)}" for one in fitting)
            raise ConfigError("transport", name, f"a system that has one ({reasons})")
        return found
    chosen = next((one for one in fitting if one.name in (name, name + STAGED)), None)
    if chosen is None:
        where = "in host memory" if is_on_host else "on a GPU"
        allowed = ", ".join(dict.fromkeys(one.name.removesuffix(STAGED) for one in fitting))
        raise ConfigError("transport", name, f"{allowed}: the KV pool is {where}")
    if why_not := chosen.why_not(is_on_host=is_on_host):
        raise ConfigError("transport", name, f"another on this system: {why_not}")
    return (chosen,)


def prepare(
    pool: KvPool, transports: Sequence[Transport], runs: Sequence[StridedExtent] = (), limits: CopyLimits | None = None
) -> None:
    """Transport.prepare of each, for a pool on a GPU. Raises ConfigError if they cannot move its blocks."""
    if not pool.is_on_host:
        if pool.runs_per_block != 1:
            names = ", ".join(one.name for one in transports)
            expected = f"1 for a pool on a GPU, where each block is one run of bytes for {names}"
            raise ConfigError("kv_pool.runs_per_block", pool.runs_per_block, expected)
        for transport in transports:
            transport.prepare(pool, runs, limits)


def fence_of(pool: KvPool, transports: Sequence[Transport]) -> Fence | None:
    """The work that the pool's device has queued so far; None for a pool in host memory."""
    if pool.is_on_host:
        return None
    return next((fence for one in transports if (fence := one.fence(pool)) is not None), None)


def name_of(kind: int) -> str:
    return TRANSPORTS[kind].name if kind in TRANSPORTS else str(int(kind))


def names_of(numbers: Iterable[int]) -> str:
    return ", ".join(name_of(kind) for kind in numbers)
