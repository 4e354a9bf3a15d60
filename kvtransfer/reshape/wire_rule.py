"""Chooses the dtype in which KV is sent between pools of floats: unchanged, or int8 if the link is the bottleneck.
Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, final

# Bytes of floats per second that both sides can convert on one core (docs/transfer.md#speed). A faster link is not the
# bottleneck.
CONVERTED_BYTES_S: Final = 1.0e9
LEAST_BYTES: Final = 1 << 20  # smaller transfers do not measure a link's bandwidth
REVISIT: Final = 64  # one in this many transfers is exact, to measure whether the link is still slow
MAX_PAIRS: Final = 256
_WEIGHT: Final = 0.3  # weight of the newest transfer


@final
class WireRule:
    """The rule of one prefill worker. It learns from exact transfers."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._bandwidth: OrderedDict[str, float] = OrderedDict()
        self._num_quantised = 0

    def is_quantised(self, receiver: str) -> bool:
        """Whether the next transfer to that endpoint is sent as int8."""
        if self._choice != "auto":
            return self._choice == "int8"
        if self._bandwidth.get(receiver, CONVERTED_BYTES_S) >= CONVERTED_BYTES_S:
            return False
        self._num_quantised += 1
        return self._num_quantised % REVISIT != 0

    def sent(self, receiver: str, num_bytes: int, busy_s: float) -> None:
        """Learns that an exact transfer was busy for `busy_s`."""
        if num_bytes < LEAST_BYTES or busy_s <= 0.0:
            return
        seen = num_bytes / busy_s
        self._bandwidth[receiver] = seen + (1.0 - _WEIGHT) * (self._bandwidth.get(receiver, seen) - seen)
        self._bandwidth.move_to_end(receiver)
        if len(self._bandwidth) > MAX_PAIRS:
            self._bandwidth.popitem(last=False)
