"""The sampling of the sequences in a device's block tables, as arrays by sequence slot.

Each Sampling is read once, instead of in every step.
"""

# Shapes: S sequence slots, B rows.

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.gpu.kernels.cutoff import EVERYTHING
from pdserve.engine.sampling.sampler import may_ban

KEEP_ALL: Final = int(EVERYTHING.value)  # a floor that min_p does not raise


@dataclass(frozen=True)
class Draws:
    """The sampling of each row, on the device, [B] each. Unused rows may contain anything."""

    seed: Tensor  # int64: its bits
    position: Tensor  # int64: number of tokens before
    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int32; 0 is off
    top_p: Tensor  # float64; 1 is off
    floor: Tensor  # int32: floor_key(min_p)


def floor_key(min_p: float) -> int:
    """The deepest key that min_p keeps: a token must be at least min_p times as likely as the best."""
    if min_p <= 0.0:
        return KEEP_ALL
    key: int = struct.unpack("<i", struct.pack("<f", max(0.0, -math.log(min_p))))[0]
    return key


FIELDS: Final[tuple[tuple[str, Any, float], ...]] = (  # also the values of padding rows
    ("seed", np.int64, 0),
    ("top_p", np.float64, 1.0),
    ("top_k", np.int32, 0),
    ("floor", np.int32, floor_key(0.0)),
    ("temperature", np.float32, 0.0),
)


@final
class Samplings:
    def __init__(self, num_seq_slots: int) -> None:
        self._held: list[Sampling | None] = [None] * num_seq_slots
        self._fields = {name: np.zeros(num_seq_slots, kind) for name, kind, _ in FIELDS}
        self.is_resampled_S = np.zeros(num_seq_slots, bool)  # needs more than the graph's sampling at every token
        self.is_bound_S = np.zeros(num_seq_slots, bool)  # needs a grammar's mask and nothing else beyond the graph
        self.needs_history_S = np.zeros(num_seq_slots, bool)
        self.min_tokens_S = np.zeros(num_seq_slots, np.int64)
        self.has_logprobs_S = np.zeros(num_seq_slots, bool)

    def update(self, seq_slots: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Sets the sampling of `seq_slots[i]` to `samplings[i]`."""
        held = self._held
        for seq_slot, sampling in zip(seq_slots, samplings, strict=True):
            if held[seq_slot] is not sampling:
                self._set(seq_slot, sampling)

    def logprobs(self, seq_slots: Sequence[int]) -> list[int | None]:
        """The requested logprobs of each."""
        return [None if one is None else one.logprobs for one in map(self._held.__getitem__, seq_slots)]

    def field(self, name: str, seq_slot_B: Any) -> Any:
        return self._fields[name][seq_slot_B]

    def _set(self, seq_slot: int, sampling: Sampling) -> None:
        self._held[seq_slot] = sampling
        fields = self._fields
        fields["seed"][seq_slot] = np.uint64(sampling.seed).astype(np.int64)
        fields["top_p"][seq_slot], fields["top_k"][seq_slot] = sampling.top_p, sampling.top_k
        fields["floor"][seq_slot], fields["temperature"][seq_slot] = floor_key(sampling.min_p), sampling.temperature
        self.is_resampled_S[seq_slot] = needs_resampling(sampling)
        self.is_bound_S[seq_slot] = is_bound(sampling)
        self.needs_history_S[seq_slot] = sampling.needs_history
        self.min_tokens_S[seq_slot] = sampling.min_tokens
        self.has_logprobs_S[seq_slot] = sampling.logprobs is not None


def needs_resampling(sampling: Sampling) -> bool:
    """Whether rows must be sampled again after a graph, or need top logprobs, for any length of their output."""
    return bool(sampling.needs_history or sampling.adjusts_logits or sampling.logprobs or sampling.allowed_token_ids)


def is_bound(sampling: Sampling) -> bool:
    """Whether a grammar masks the row, and the graph's sampling supports everything else that the row needs."""
    return sampling.grammar is not None and not (
        may_ban(sampling) or sampling.adjusts_logits or sampling.logprobs is not None
    )
