"""How activations and weights are rounded."""

from __future__ import annotations

from typing import Final

LEAST_SCALE: Final = 1e-12  # a token of zeros would divide by zero
LEVELS: Final = 127  # int8 without -128, so that rounding is symmetric
ZERO_POINT: Final = 128  # VNNI multiplies unsigned by signed

# So many results show whether two bfloat16 products add in the same order: rounding hides all but one in ten thousand
# of the differences between their float32 sums.
BFLOAT16_TRIAL: Final = 2**19
