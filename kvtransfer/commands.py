"""What other threads ask of a sender's connection. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.device import Fence
from kvtransfer.parts import Lanes
from kvtransfer.transport import Grant, Sent, TransferKey

OnSent = Callable[[Sent], None]
OnRead = Callable[[TransferKey, Sequence[int]], None]  # these source blocks of a transfer are read no more


@dataclass(frozen=True, slots=True)
class Start:
    grant: Grant
    on_end: OnSent
    deadline_at_s: float | None
    groups: int = 1
    lanes: Lanes | None = None  # None: of a receiver that is not for us
    error: str = ""  # it has failed already


@dataclass(frozen=True, slots=True)
class Push:
    key: TransferKey
    blocks: tuple[tuple[int, int], ...]
    lives: tuple[int, ...]  # of the source blocks when they were pushed
    is_last: bool
    groups: range | None  # of layers; None: all
    after: Fence | None = None  # what may still write the blocks, where they lie on a device


@dataclass(frozen=True, slots=True)
class Abort:
    key: TransferKey
    error: str = ""  # why it has failed; empty: the owner needs it no more
