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
    allowed_s = longest_gap_s = least_target_s = math.inf
    tpot_s = longest_s = None
    token_s = spare_s = most_spare_s = 0.0
    for each in decoding:
        attempt = each.attempt
        # Most sequences have the targets of the one before them, so this is computed once.
        if attempt.tpot_s != tpot_s or attempt.itl_s != longest_s:
            tpot_s, longest_s = attempt.tpot_s, attempt.itl_s
            if tpot_s is not None:
                token_s = DUE_SHARE * tpot_s
                spare_s = max(0.0, token_s - PACE * decode_s)
                most_spare_s = (HORIZON - 1) * spare_s
                longest_gap_s = min(
                    longest_gap_s, LONGEST_GAP * max(tpot_s, decode_s) if longest_s is None else longest_s
                )
        if tpot_s is None:
            continue
        num_tokens = len(each.tokens)
        num_output, left = num_tokens - each.prompt_len, each.ends_at - num_tokens
        # The time until the next token is due, and what the tokens after it can make up for.
        slack_s = each.first_token_at_s + num_output * token_s - now_s
        slack_s += most_spare_s if left >= HORIZON else (left - 1) * spare_s
        if slack_s < token_s:
            # Per token, until the end.
            left = max(left, 1)
            mean_s = (each.first_token_at_s + (num_output - 1 + left) * tpot_s - now_s) / left
            if mean_s < decode_s:
                continue
            slack_s = min(token_s, mean_s)
        if slack_s < allowed_s:
            allowed_s = slack_s
        if token_s < least_target_s:
            least_target_s = token_s
    if longest_gap_s == math.inf:
        return Allowance(None)
    gain_s = least_target_s - decode_s if least_target_s < math.inf else 0.0
    return Allowance(min(allowed_s, longest_gap_s), longest_gap_s, gain_s)
