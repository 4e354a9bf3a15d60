"""Defaults of `pdserve simulate` and `pdserve plan`, shown in their help."""

from __future__ import annotations

from typing import Final

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
WORKERS: Final = 1  # of each role
SLO_TTFT_S: Final = 1.0
SLO_TPOT_S: Final = 0.02
