"""Chooses the work of the next step, and which sequences are preempted for it. Pure: time is passed as `now_s`.

A running sequence has tokens to compute: one while it decodes, more while it prefills. Decode rows come first, and
prompt chunks get the rest of the budget. A step without prompt chunks may have drafts. Drafts use only memory that no
other sequence needs soon, and never preempt one.

The sections are: slack of decode rows, sizes of prompt chunks, drafts, and the plan of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, final

from decode_worker.decode_sequence import DecodeSequence, DecodeStage
from decode_worker.sequence_table import SequenceTable
from decode_worker.speculation import DraftRule, NgramProposer
from decode_worker.step import Continuation, DecodeStep, places_in, step_after
from pdserve.core.attempt import EndRule
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.step_rule import (
    DUE_SHARE,
    LEAST_CHUNK,
    LONGEST_GAP,
    Allowance,
    Pending,
    chunk_tokens,
    divide,
    due_at_s,
    held_share,
    is_worth_waiting,
    step_limit,
)
from pdserve.core.effects import StepAccount

# --- slack of decode rows -------------------------------------------------------------------------------------
# How long a step may take so that its decode rows still meet their TPOT targets.
#
# TPOT is a mean over an answer, so each token has a due time: the n-th token after the first is due n TPOT targets
# after the first. A sequence that is ahead of its due times has slack for one long step. So has a sequence that can
# catch up afterwards, because steps without prompt tokens are shorter than its target. A sequence that is further
# behind must be faster than its target, on average, until its end.

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


# --- sizes of prompt chunks -----------------------------------------------------------------------------------
# The worker's side of the step rule: its cost model, which learns from each step, and the sizes of chunks.


@final
class ChunkRule:
    """Chooses chunks of `least` to `most` tokens. `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, most: int, least: int = LEAST_CHUNK) -> None:
        self.cost = cost
        self._least = min(least, most)
        self._most = most

    def longest(
        self, *, rows: int, context_tokens: int, allowed_s: float | None, held_share: float = 0.0
    ) -> Callable[[int], int]:
        """For a step with `rows` decode rows over `context_tokens`: a function that gives the most tokens of one
        prompt, of which so many tokens are already computed. See pdserve.core.cost.step_rule."""
        cost, most = self.cost, self._most
        if rows == 0:
            return lambda _: most
        limit = step_limit(
            cost,
            decode_s=cost.decode_s(rows, context_tokens),
            allowed_s=allowed_s,
            held_share=held_share,
            least=self._least,
            most=most,
        )
        return lambda cached: chunk_tokens(
            cost, limit, rows=rows, context_tokens=context_tokens, cached=cached, most=most
        )

    def is_worth_waiting(
        self, allowance: Allowance, *, rows: int, context_tokens: int, wanted: int, held_share: float = 0.0
    ) -> bool:
        """Whether the next step should have no prompt tokens; see pdserve.core.cost.step_rule."""
        decode_s = self.cost.decode_s(rows, context_tokens)
        return rows > 0 and is_worth_waiting(
            self.cost, allowance, decode_s=decode_s, held_share=held_share, wanted=wanted, most=self._most
        )

    def observe(self, account: StepAccount, step_s: float) -> None:
        self.cost.observe_batch(account.timed(step_s))


# --- drafts of decode rows ------------------------------------------------------------------------------------
# N-grams from their own text, if they pay, fit into memory and are allowed.


@final
class Drafter:
    def __init__(self, rule: DraftRule, sequences: SequenceTable, end_rule: EndRule) -> None:
        self._rule = rule
        self._sequences = sequences
        self._end_rule = end_rule

    def draft(
        self, decoding: list[DecodeSequence], context_tokens: int, tpot_s: float | None
    ) -> list[list[int]] | None:
        """The drafts of each decode row, with allocated blocks; None if drafts do not pay."""
        least = self._rule.least_probability(len(decoding))
        drafts: list[list[int]] = []
        probabilities: list[list[float]] = []
        for sequence in decoding:
            if sequence.proposer is None:
                sequence.proposer = NgramProposer()
            sequence.proposer.read(sequence.tokens)
            probabilities.append(sequence.proposer.accept_probabilities(self._rule.most, least))
            drafts.append(self._cut(sequence, sequence.proposer.propose(sequence.tokens, len(probabilities[-1]))))
            del probabilities[-1][len(drafts[-1]) :]
        counts = self._rule.counts(probabilities, context_tokens=context_tokens, tpot_s=tpot_s)
        if counts is None:
            return None
        for sequence, draft, count in zip(decoding, drafts, counts, strict=True):
            del draft[self._sequences.room_for(sequence, count) :]
        return drafts if any(drafts) else None

    def _cut(self, sequence: DecodeSequence, draft: list[int]) -> list[int]:
        """Cuts drafts after a token that ends the text."""
        sampling = sequence.attempt.sampling
        room = sequence.ends_at - len(sequence.tokens) - 1
        for index, token in enumerate(draft[: max(0, room)]):
            if self._end_rule.is_end(sampling, token):
                return draft[:index]
        return draft[: max(0, room)]


# --- plan of a step -------------------------------------------------------------------------------------------

MAX_CONSECUTIVE_WAITS: Final = 16  # steps in which prompts wait for slack; new rows have none, so waits must be bounded


@final
class Planner:
    def __init__(self, sequences: SequenceTable, *, max_batch: int, chunks: ChunkRule, drafter: Drafter | None) -> None:
        self._sequences = sequences
        self._max_batch = max_batch
        self._chunks = chunks
        self._drafter = drafter
        self._is_short = False  # memory was exhausted in the last plan, so no sequence could start
        self._waits_for_slack = False  # prompts wait for a longer step than the rows allow now
        self._num_waits = 0  # consecutive steps in which prompts waited for slack
        self._num_steps = 0
        self._last: DecodeStep | None = None  # the newest step, if it had only plain decode rows
        self.is_starved = False  # there is no memory for the oldest waiting sequence

    def plan(self, now_s: float) -> DecodeStep:
        """The next step. Without rows, there is nothing to compute now."""
        sequences = self._sequences
        decoding, unfinished, self._is_short = self._grow(now_s)
        sequences.fetch(now_s, is_starved=self._is_short or self.is_starved)
        startable = sequences.startable()
        starts = [sequence.computed for sequence in decoding]
        context_tokens = sum(starts)
        prefilling: list[tuple[DecodeSequence, int]] = []
        self.is_starved = self._waits_for_slack = False
        if unfinished or startable:
            prompts, rows = [*unfinished, *startable], len(decoding)
            decode_s = self._chunks.cost.decode_s(rows, context_tokens)
            allowance = step_allowance(decoding, now_s, decode_s) if sequences.num_with_tpot else Allowance(None)
            held = held_share(context_tokens, rows, sequences.kv.blocks.num_blocks, sequences.block_size)
            wanted = sum(each.remaining for each in prompts)
            self._waits_for_slack = (
                self._num_waits < MAX_CONSECUTIVE_WAITS
                and not any(each.is_sending for each in unfinished)  # a few tokens, for which a client waits
                and self._chunks.is_worth_waiting(
                    allowance, rows=rows, context_tokens=context_tokens, wanted=wanted, held_share=held
                )
            )
            if not self._waits_for_slack:
                longest = self._chunks.longest(
                    rows=rows, context_tokens=context_tokens, allowed_s=allowance.step_s, held_share=held
                )
                prefilling = self._divide(prompts, now_s, longest, decode_s)
        self._num_waits = self._num_waits + 1 if self._waits_for_slack else 0
        drafts = None
        if self._drafter is not None and decoding and not prefilling:
            targets_s = (each.attempt.tpot_s for each in decoding if each.attempt.tpot_s is not None)
            drafts = self._drafter.draft(decoding, context_tokens, min(targets_s, default=None))
        account = StepAccount(
            decode_rows=len(decoding),
            context_tokens=context_tokens,
            prefill_tokens=sum(count for _, count in prefilling),
            prefill_token_context=sum(count * (sequence.computed + count / 2) for sequence, count in prefilling),
            draft_tokens=0 if drafts is None else sum(map(len, drafts)),
        )
        step = DecodeStep(
            decoding=decoding,
            drafts=drafts,
            prefilling=prefilling,
            account=account,
            block_size=sequences.block_size,
            number=self._next_number(),
        )
        if step.is_plain:
            last = self._last
            step.continuation = Continuation(
                before=0 if last is None else last.number,
                places=places_in(last, decoding),
                starts=starts,
                is_async=False,
            )
        self._last = step if step.is_plain else None
        return step

    def plan_after(self, step: DecodeStep) -> DecodeStep | None:
        """The step after the running `step`, before the tokens of `step` are known; None if it must wait for them."""
        sequences = self._sequences
        if self._drafter is not None or self._is_short or sequences.waiting or self._waits_for_slack:
            return None
        following = step_after(
            step,
            sequences.running,
            sequences.kv,
            number=self._next_number(),
            max_batch=self._max_batch,
        )
        if following is not None:
            self._last = following
        return following

    def dropped(self) -> None:
        """A planned step was not computed, so no step continues it."""
        self._last = None

    def _next_number(self) -> int:
        self._num_steps += 1
        return self._num_steps

    def run_length(self, step: DecodeStep) -> int:
        """How many steps with exactly these rows may follow each other, including this one; 0 if the step prefills or
        has drafts.

        The run ends when the first row ends or fills a block, so it affects other sequences only in its last step. No
        sequence may join or leave in the meantime (`num_changes`), and no sampled token may be one that ends a text.
        """
        decoding, size = step.decoding, self._sequences.block_size
        if step.prefilling or step.drafts is not None or self._is_short or self._waits_for_slack:
            return 0
        if len(decoding) != min(len(self._sequences.running), self._max_batch):
            return 0
        longest = size
        for each in decoding:
            if each.decoding_since_s is None or each.preempted_at_s is not None:
                return 0  # the next token causes other effects
            left = min(size - each.computed % size, each.ends_at - len(each.tokens))
            if left < longest:
                longest = left
        return longest if decoding else 0

    def _grow(self, now_s: float) -> tuple[list[DecodeSequence], list[DecodeSequence], bool]:
        """The sequences that decode in this step, each with a block for its next position; the running sequences with
        more positions to compute; and whether memory was exhausted."""
        decoding: list[DecodeSequence] = []
        unfinished: list[DecodeSequence] = []
        is_short = False
        sequences, size = self._sequences, self._sequences.block_size
        running = sequences.running
        if len(running) > self._max_batch:  # those whose KV is sent have come last, and need one token
            running = sorted(running, key=lambda each: not each.is_sending)
        for sequence in running[: self._max_batch]:  # oldest first; the youngest is preempted first
            computed = sequence.computed
            remaining = len(sequence.tokens) - computed
            if sequence.stage is not DecodeStage.RUNNING:
                continue  # preempted for an older sequence
            if remaining != 1:
                if remaining > 1:
                    unfinished.append(sequence)
                continue
            if computed == len(sequence.blocks) * size:
                while not sequences.grow(sequence):
                    is_short = True
                    preemptible = [each for each in sequences.running if not each.is_sending]
                    if len(preemptible) == 1:
                        break  # transfers hold the other blocks and end soon, so this sequence waits and keeps its KV
                    youngest = preemptible[-1]
                    sequences.preempt(youngest, now_s)
                    if youngest is sequence:
                        break
                if computed >= len(sequence.blocks) * size:
                    continue
            decoding.append(sequence)
        if is_short:
            unfinished = [each for each in unfinished if each.stage is DecodeStage.RUNNING]
        return decoding, unfinished, is_short

    def _divide(
        self, prompts: list[DecodeSequence], now_s: float, longest: Callable[[int], int], decode_s: float
    ) -> list[tuple[DecodeSequence, int]]:
        """The sequences to prefill. Starts waiting sequences if there is memory.

        `longest` gives the tokens of a step that computes one prompt, of which so many tokens are already computed.
        """
        sequences = self._sequences
        self.is_starved = self._is_short and bool(sequences.waiting)

        def start(sequence: DecodeSequence) -> bool:
            if sequence.stage is DecodeStage.RUNNING:
                return True
            if self.is_starved or len(sequences.running) >= self._max_batch:
                return False
            if not sequences.take_blocks(sequence):
                self.is_starved = True  # smaller sequences must not overtake it
                return False
            sequences.start(sequence, now_s)
            return True

        cost, usual, pending = self._chunks.cost, longest(prompts[0].computed), []
        for each in prompts:
            computed = sequences.computed_when_started(each)
            remaining = len(each.tokens) - computed
            remaining_s = cost.prefill_s(remaining, computed, usual) + -(-remaining // usual) * decode_s
            pending.append(Pending(each, remaining_s, due_at_s(each.attempt, each.num_output)))
        return divide(pending, now_s, lambda each: longest(each.computed), start)
