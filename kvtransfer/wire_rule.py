"""As what KV travels between pools of floats: as it is, or as int8 where the link is what takes the time. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, final

# Both ends convert beside the link, about this many bytes of floats a second on one core (benchmarks/conversion.py):
# a link that carries more is not what takes the time.
CONVERTED_BYTES_S: Final = 1.0e9
LEAST_BYTES: Final = 1 << 20  # less says nothing of a link's bandwidth
REVISIT: Final = 64  # of so many transfers one is exact, to see whether the link is still slow
MAX_PAIRS: Final = 256
_WEIGHT: Final = 0.3  # of the newest transfer


@final
class WireRule:
    """Of one prefill worker; learns from exact transfers."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._bandwidth: OrderedDict[str, float] = OrderedDict()
        self._num_quantised = 0

    def is_quantised(self, receiver: str) -> bool:
        """Whether the next transfer to that endpoint travels as int8."""
        if self._choice != "auto":
            return self._choice == "int8"
        if self._bandwidth.get(receiver, CONVERTED_BYTES_S) >= CONVERTED_BYTES_S:
            return False
        self._num_quantised += 1
        return self._num_quantised % REVISIT != 0

    def sent(self, receiver: str, num_bytes: int, busy_s: float) -> None:
        """An exact transfer had bytes under way for `busy_s`."""
        if num_bytes < LEAST_BYTES or busy_s <= 0.0:
            return
        seen = num_bytes / busy_s
        self._bandwidth[receiver] = seen + (1.0 - _WEIGHT) * (self._bandwidth.get(receiver, seen) - seen)
        self._bandwidth.move_to_end(receiver)
        if len(self._bandwidth) > MAX_PAIRS:
            self._bandwidth.popitem(last=False)
