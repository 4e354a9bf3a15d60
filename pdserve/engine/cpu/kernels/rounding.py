"""How activations and weights are rounded."""

from __future__ import annotations

from typing import Final

LEAST_SCALE: Final = 1e-12  # a token of zeros would divide by zero
LEVELS: Final = 127  # int8 without -128, so that rounding is symmetric
ZERO_POINT: Final = 128  # VNNI multiplies unsigned by signed

# So many results show whether two bfloat16 products add in the same order: rounding hides all but one in ten thousand
# of the differences between their float32 sums.
BFLOAT16_TRIAL: Final = 2**19

INT4_BYTES: Final = 0.6  # at most, of a 4-bit weight with its share of the scales and zeros
WEIGHTS_AT_ONCE: Final = 2**20  # that are converted at a time: as many as fit into the cache
