"""The sampling of the sequences in a device's block tables, as arrays by seat: read from a Sampling once instead of
every step."""

# Shapes: S seats, B rows.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from pdserve.core.types import Sampling
from pdserve.engine.gpu.sampling import floor_key
from pdserve.engine.masks import may_ban

FIELDS: Final[tuple[tuple[str, Any, float], ...]] = (  # also the values of padding rows
    ("seed", np.int64, 0),
    ("top_p", np.float64, 1.0),
    ("top_k", np.int32, 0),
    ("floor", np.int32, floor_key(0.0)),
    ("temperature", np.float32, 0.0),
)


@final
class Samplings:
    def __init__(self, num_seats: int) -> None:
        self._held: list[Sampling | None] = [None] * num_seats
        self._fields = {name: np.zeros(num_seats, kind) for name, kind, _ in FIELDS}
        self.asks_S = np.zeros(num_seats, bool)  # needs more than the graph's sampling at every token
        self.is_bound_S = np.zeros(num_seats, bool)  # needs a grammar's mask and nothing else beyond the graph
        self.needs_history_S = np.zeros(num_seats, bool)
        self.min_tokens_S = np.zeros(num_seats, np.int64)
        self.has_logprobs_S = np.zeros(num_seats, bool)

    def update(self, seats: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Sets the sampling of `seats[i]` to `samplings[i]`."""
        held = self._held
        for seat, sampling in zip(seats, samplings, strict=True):
            if held[seat] is not sampling:
                self._set(seat, sampling)

    def logprobs(self, seats: Sequence[int]) -> list[int | None]:
        """The requested logprobs of each."""
        return [None if one is None else one.logprobs for one in map(self._held.__getitem__, seats)]

    def field(self, name: str, seat_B: Any) -> Any:
        return self._fields[name][seat_B]

    def _set(self, seat: int, sampling: Sampling) -> None:
        self._held[seat] = sampling
        fields = self._fields
        fields["seed"][seat] = np.uint64(sampling.seed).astype(np.int64)
        fields["top_p"][seat], fields["top_k"][seat] = sampling.top_p, sampling.top_k
        fields["floor"][seat], fields["temperature"][seat] = floor_key(sampling.min_p), sampling.temperature
        self.asks_S[seat] = asks_for_more(sampling)
        self.is_bound_S[seat] = is_bound(sampling)
        self.needs_history_S[seat] = sampling.needs_history
        self.min_tokens_S[seat] = sampling.min_tokens
        self.has_logprobs_S[seat] = sampling.logprobs is not None


def asks_for_more(sampling: Sampling) -> bool:
    """Whether rows must be sampled again after a graph, or need top logprobs, for any length of their output."""
    return bool(sampling.needs_history or sampling.adjusts_logits or sampling.logprobs or sampling.allowed_token_ids)


def is_bound(sampling: Sampling) -> bool:
    """Whether a grammar masks the row, and the row asks for nothing else that a graph does not sample."""
    return sampling.grammar is not None and not (
        may_ban(sampling) or sampling.adjusts_logits or sampling.logprobs is not None
    )
