"""The constants of the goodput policy, with their reasons; the same for all traffic, models and machines. Pure."""

from __future__ import annotations

from typing import Final

# The cost of a second of a worker's time, in seconds of delay of this request: on average it delays one later request.
WORK_WEIGHT: Final = 1.0

# Share of a target that waiting for a busy worker must save compared with starting elsewhere now, and that a local
# placement must save compared with a remote one. Predictions are not more accurate than that.
WORTH_WAITING: Final = 0.03

# TTFT targets for which a late request waits for a placement that makes no other request miss. After that it takes any,
# so waiting is bounded.
PATIENCE: Final = 2.0

# Number of the cheapest workers of each role that are compared in detail; the others only by their cached sums.
PREFILLS_PAIRED: Final = 3
DECODES_PAIRED: Final = 4
LOCALS_PRICED: Final = 3

TRANSFER_TIE_S: Final = 1e-3  # transfers that differ by less are equally cheap
OPTIONS_SHOWN: Final = 6  # in explanations
