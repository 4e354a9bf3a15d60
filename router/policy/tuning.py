"""The constants of the goodput policy, with their reasons; the same for all traffic, models and machines. Pure."""

from __future__ import annotations

from typing import Final

# The cost of a second of a worker's time, in seconds of delay for this request: on average one later request is
# delayed.
WORK_WEIGHT: Final = 1.0

# Share of a target that must be saved by waiting for a busy worker instead of starting elsewhere now, and by a local
# placement instead of a remote one. Predictions are not more accurate than that.
WORTH_WAITING: Final = 0.03

# Share of the TTFT target before the predicted end of a decode worker's prompt at which the next one is sent.
EARLY_SHARE: Final = 0.15

# How long a late request waits, in TTFT targets, for a placement that makes no other request miss its target. Then it
# takes any placement, so waiting is bounded.
PATIENCE: Final = 2.0

# How many of the cheapest workers of each role are compared in detail. The others are compared by their cached sums.
PREFILLS_PAIRED: Final = 3
DECODES_PAIRED: Final = 4
LOCALS_PRICED: Final = 3

TRANSFER_TIE_S: Final = 1e-3  # transfers that differ by less count as equally cheap
OPTIONS_SHOWN: Final = 6  # in explanations
