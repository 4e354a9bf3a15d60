"""Every constant of the goodput policy, with its reason. The same for all traffic, models and machines. Pure."""

from __future__ import annotations

from typing import Final

# Of a promised time per token: decode workers are filled up to here one after the other, and beyond it evenly. An
# answer's context grows and its neighbours' do; a quarter is what steps differ by over one answer's life.
PACK_SLACK: Final = 0.25

# What a second of a worker's time costs, in seconds of delay of this request: one request comes after it on average.
WORK_WEIGHT: Final = 1.0

# Relative; a model that errs more than this is not believed less. Else a noisy machine would stand half empty.
WIDEST_BAND: Final = 0.25

# Share of a promise that waiting for a busy worker must save over starting elsewhere at once, and that a decode worker
# must save over a prefill worker to read a prompt: predictions are no better than that.
WORTH_WAITING: Final = 0.03

# Promised TTFTs that a request which has lost its own waits for room that costs nobody else a promise. Then it takes
# any: waiting is bounded.
PATIENCE: Final = 2.0

# The cheapest of each role that are priced in detail; the rest only by the sums that every worker keeps.
PREFILLS_PAIRED: Final = 3
DECODES_PAIRED: Final = 4
LOCALS_PRICED: Final = 3

TRANSFER_TIE_S: Final = 1e-3  # transfers that differ by less are equally cheap
WAYS_SHOWN: Final = 6  # in explanations
