"""Commands from other threads to a sender's connection. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.plan import PartLayout
from kvtransfer.protocol.transport import Sent
from pdserve.core.kv.kv_shape import Grant, TransferKey

OnSent = Callable[[Sent], None]
# Called with the source blocks of a transfer that are no longer read.
OnRead = Callable[[TransferKey, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Start:
    grant: Grant
    on_end: OnSent
    deadline_at_s: float | None
    groups: int = 1
    layout: PartLayout | None = None  # None: blocks cannot be converted to the receiver's shape
    error: str = ""  # if not empty, it has failed already


@dataclass(frozen=True, slots=True)
class Push:
    key: TransferKey
    blocks: tuple[tuple[int, int], ...]
    epochs: tuple[int, ...]  # epochs of the source blocks when they were pushed
    is_last: bool
    groups: range | None  # groups of layers; None: all
    after: Fence | None = None  # device work that may still write the blocks


@dataclass(frozen=True, slots=True)
class Abort:
    key: TransferKey
    error: str = ""  # empty: the owner no longer needs the transfer
