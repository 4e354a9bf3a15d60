"""engine.ops on a CPU, with the functions whose results are rounded."""

from __future__ import annotations

from pdserve.engine.ops import add_rms_norm, gelu_mul, rms_norm, silu_mul
from pdserve.engine.rounded_ops import ROUNDED

__all__ = ["ROUNDED", "add_rms_norm", "gelu_mul", "rms_norm", "silu_mul"]
