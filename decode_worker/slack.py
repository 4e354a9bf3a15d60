"""How long a step may take so that its decode rows still meet their TPOT targets. Pure.

TPOT is a mean over an answer, so each token has a due time: the n-th token after the first is due n TPOT targets after
the first. A sequence that is ahead of its due times has slack for one long step. So has a sequence that can catch up
afterwards, because steps without prompt tokens are shorter than its target. A sequence that is further behind must be
faster than its target, on average, until its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from decode_worker.decode_sequence import DecodeSequence
from pdserve.core.step_rule import DUE_SHARE, LONGEST_GAP, Allowance

HORIZON: Final = 16  # tokens in which a sequence must catch up; with more, its answer would depend on later load
PACE: Final = 1.2  # assumed time of each of these tokens, in decode steps, because other prompts also need chunks


def step_allowance(decoding: Sequence[DecodeSequence], now_s: float, decode_s: float) -> Allowance:
    """The longest step that starts at `now_s` and lets each of `decoding` meet its TPOT target.

    `decode_s` is the time of a step of these rows alone. A sequence that would be late even if it only decoded until
    its end, or whose target is shorter than `decode_s`, limits the step only by its longest gap.
    """
    allowed_s = longest_gap_s = gain_s = math.inf
    for each in decoding:
        tpot_s = each.attempt.tpot_s
        if tpot_s is None:
            continue
        longest_s = each.attempt.itl_s
        own_s = LONGEST_GAP * max(tpot_s, decode_s) if longest_s is None else longest_s
        longest_gap_s = min(longest_gap_s, own_s)
        token_s, num_output = DUE_SHARE * tpot_s, each.num_output
        left = max(each.ends_at - len(each.tokens), 1)
        slack_s = each.first_token_at_s + num_output * token_s - now_s  # time until the next token is due
        spare_s = token_s - PACE * decode_s
        if spare_s > 0.0:
            slack_s += (min(left, HORIZON) - 1) * spare_s
        if slack_s >= token_s:
            own_s = min(own_s, slack_s)
            gain_s = min(gain_s, token_s - decode_s)
        else:
            # Per token, until the end.
            mean_s = (each.first_token_at_s + (num_output - 1 + left) * tpot_s - now_s) / left
            if mean_s >= decode_s:
                own_s = min(own_s, token_s, mean_s)
                gain_s = min(gain_s, token_s - decode_s)
        allowed_s = min(allowed_s, own_s)
    if allowed_s == math.inf:
        return Allowance(None)
    return Allowance(allowed_s, longest_gap_s, gain_s if gain_s < math.inf else 0.0)
