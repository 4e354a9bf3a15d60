"""Chooses the prompt chunks of a step, and allocates and frees the memory of prompts. Pure: time is passed as `now_s`.

A prompt waits in the inbox, is computed in chunks, and keeps its blocks until its KV has been sent. prefill_sequence.py
has its stages, and pdserve/core/cost/step_rule.py decides which prompt comes first. If the first token is also the last
one, the KV is not sent.

All blocks of a prompt are allocated when its computation starts, so memory cannot run out half-way. From then on a
sender may read them, so they are freed only after `sent` was called. When a prompt starts, prefill_worker/pushing.py
decides at which points its finished blocks are passed to the sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from pdserve.core.attempt import (
    Attempt,
    AttemptKey,
    EndRule,
    FailureKind,
    RefusalReason,
    blocks_for,
    grant_error,
)
from pdserve.core.cost.step_rule import Pending, PromptOrder, divide, due_at_s
from pdserve.core.effects import (
    BlocksDone,
    PrefillEffect,
    PromptScored,
    SendAborted,
    SendStarted,
    StepAccount,
    TransferLost,
)
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import Fetches
from pdserve.core.protocol import AttemptFailed, FirstToken, Load, Refused, Released
from pdserve.core.types import TokenOut
from pdserve.engine.interface import RowOut
from prefill_worker.prefill_sequence import PrefillMove, PrefillSequence, PrefillStage, PrefillStep
from prefill_worker.pushing import PushRule


@final
class PrefillScheduler:
    def __init__(
        self,
        *,
        kv: KvCache,
        prompt_order: PromptOrder,
        inbox_depth: int,
        end_rule: EndRule,
        pushing: PushRule,
        fetches: Fetches | None = None,
    ) -> None:
        self._kv = kv
        self._fetches = fetches
        self.blocks = kv.blocks
        self.pushing = pushing
        self._block_size = kv.block_size
        self.order = prompt_order
        self._inbox_depth = inbox_depth
        self._end_rule = end_rule
        self._prompts: dict[AttemptKey, PrefillSequence] = {}
        self._waiting: dict[AttemptKey, PrefillSequence] = {}  # both in order of arrival
        self._computing: dict[AttemptKey, PrefillSequence] = {}
        self._is_full = False  # in the last plan, there was no memory for the next prompt
        self.is_draining = False

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._prompts

    def live(self) -> list[AttemptKey]:
        return list(self._prompts)

    def stage(self, key: AttemptKey) -> PrefillStage | None:
        prompt = self._prompts.get(key)
        return None if prompt is None else prompt.stage

    @property
    def has_work(self) -> bool:
        """Whether the next plan may have rows."""
        return bool(self._computing or self._waiting)

    def load(self) -> Load:
        pending = sum(each.remaining for group in (self._waiting, self._computing) for each in group.values())
        if self._fetches:  # what is being fetched keeps this worker from nothing
            pending -= sum(map(self._fetches.num_supplied, self._waiting)) * self._block_size
        return Load(
            free_blocks=self.blocks.num_free,
            evictable_blocks=self.blocks.num_evictable,
            running=len(self._prompts) - len(self._waiting),
            waiting=len(self._waiting),
            context_tokens=sum(each.computed for each in self._computing.values()),
            pending_prefill_tokens=pending,
        )

    def offer(
        self,
        attempt: Attempt,
        *,
        receiver: str,
        receiver_cached_blocks: int,
        num_granted: int,
        granted_size: int,
        may_divide: bool,
        now_s: float,
    ) -> list[PrefillEffect]:
        """Adds a new attempt to the inbox, or returns Refused with the reason.

        The receiver's cached and granted blocks have `granted_size` tokens each. With `may_divide`, it accepts blocks
        in groups of layers.
        """
        key, size = attempt.key, self._block_size
        needed = blocks_for(attempt.num_tokens, size)
        if needed > self.blocks.num_blocks:
            return [Refused(key=key, reason=RefusalReason.TOO_LARGE)]
        if self.is_draining:
            return [Refused(key=key, reason=RefusalReason.DRAINING)]
        if attempt.is_late(now_s):
            return [Refused(key=key, reason=RefusalReason.DEADLINE)]
        if len(self._waiting) >= self._inbox_depth:
            return [Refused(key=key, reason=RefusalReason.INBOX_FULL)]
        error = grant_error(
            attempt.num_tokens,
            cached_blocks=receiver_cached_blocks,
            num_granted=num_granted,
            granted_size=granted_size,
        )
        if error:
            return [AttemptFailed(key=key, kind=FailureKind.TRANSFER, message=error), Released(key=key)]
        tokens = attempt.token_ids
        # A block that the receiver has only in part is sent whole.
        skipped = receiver_cached_blocks * granted_size // size
        hashes = attempt.extend_hashes([], tokens, size)
        prompt = PrefillSequence(
            attempt=attempt,
            receiver=receiver,
            may_divide=may_divide,
            is_moved=not self._end_rule.ends_with_next(attempt.sampling, len(attempt.output_ids), attempt.num_tokens),
            receiver_cached_blocks=skipped,
            pushed=skipped,
            tokens=tokens,
            hashes=hashes,
        )
        self._prompts[key] = self._waiting[key] = prompt
        self.order.arrived(attempt.ttft_s)
        return []

    def plan(self, now_s: float) -> tuple[PrefillStep, list[PrefillEffect]]:
        """The next step. The caller must apply the effects first. Without rows, there is nothing to compute now."""
        self._kv.advance(now_s)
        effects = self.expire(now_s)
        present = [*self._computing.values(), *self._startable(now_s, effects)]
        is_full = False  # no memory for the next prompt; smaller prompts must not overtake it

        def start(prompt: PrefillSequence) -> bool:
            nonlocal is_full
            if prompt.stage is PrefillStage.COMPUTING:
                return True
            is_full = is_full or not self._start(prompt, now_s)
            if not is_full:
                effects.extend(self._left(prompt.attempt.key))
                effects.extend(self._begun(prompt))
            return not is_full

        def longest(prompt: PrefillSequence) -> int:
            return self.order.step_tokens(prompt.computed)

        shares = divide([self._pending(each) for each in present], now_s, longest, start)
        self._is_full = is_full
        account = StepAccount(
            prefill_tokens=sum(count for _, count in shares),
            prefill_token_context=sum(count * (prompt.computed + count / 2) for prompt, count in shares),
        )
        return PrefillStep(shares=shares, account=account, block_size=self._block_size), effects

    def wants_layers(self, step: PrefillStep) -> bool:
        """Whether `stored` must be called for this step."""
        return any(prompt.push.groups > 1 and count == prompt.remaining for prompt, count in step.shares)

    def stored(self, step: PrefillStep, num_layers: int, of: int) -> list[PrefillEffect]:
        """Called while the step runs: the first `num_layers` of `of` layers are final. The last group is sent by
        `apply`, which marks it as the last."""
        effects: list[PrefillEffect] = []
        for prompt, count in step.shares:
            push = prompt.push
            done = num_layers * push.groups // of
            is_due = count == prompt.remaining and prompt.pushed_groups < done < push.groups
            if not is_due or prompt.attempt.key not in self._computing:
                continue
            # The sender needs a block's content hash with its first group.
            self._kv.mark(prompt.blocks, prompt.content_hashes(self._block_size))
            effects.append(self._pushed(prompt, len(prompt.blocks), is_last=False, end_group=done))
            prompt.pushed_groups = done
        return effects

    def apply(self, step: PrefillStep, outs: Sequence[RowOut], now_s: float) -> list[PrefillEffect]:
        """Applies the results of a step. Skips prompts that have ended in the meantime."""
        self._kv.advance(now_s)
        effects: list[PrefillEffect] = []
        for (prompt, count), out in zip(step.shares, outs, strict=True):
            key = prompt.attempt.key
            if key not in self._computing:
                continue
            start = prompt.computed
            prompt.computed += count
            size = self._block_size
            self._kv.commit(prompt.blocks, prompt.hashes, start // size, prompt.computed // size)
            if prompt.remaining == 0 and prompt.computed % size:
                self._kv.mark(prompt.blocks[-1:], prompt.content_hashes(size)[-1:])
            if out.scored:
                effects.append(PromptScored(key=key, first_position=start + 1, tokens=out.scored))
            if prompt.remaining:
                effects += self._done(prompt)
                continue
            assert len(out.sampled) == 1, "the last chunk samples one token"
            first = self._first(prompt, out.sampled[0], now_s)
            if first.finish is not None:  # no decode worker needs the KV
                effects += [first, *self.cancel(key)]
                continue
            effects += [*self._done(prompt), first]
            prompt.move(PrefillMove.COMPUTED)
            del self._computing[key]
        return effects

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[PrefillEffect]:
        return [AttemptFailed(key=key, kind=kind, message=message), *self.cancel(key)] if self._is_live(key) else []

    def cancel(self, key: AttemptKey) -> list[PrefillEffect]:
        """Abandons an attempt at any stage. Idempotent; an unknown attempt counts as released."""
        prompt = self._prompts.get(key)
        if prompt is None:
            return [Released(key=key)]
        match prompt.stage:
            case PrefillStage.ENDING | PrefillStage.RELEASED:
                return []
            case PrefillStage.WAITING:
                return self._release(key)
            case PrefillStage.COMPUTING if not prompt.is_moved:
                return self._release(key)
            case PrefillStage.COMPUTING | PrefillStage.SENDING:
                self._computing.pop(key, None)
                prompt.move(PrefillMove.ABANDONED)
                return [SendAborted(key=key)]

    def sent(
        self, key: AttemptKey, *, is_whole: bool, error: str = "", is_cancelled: bool = False
    ) -> list[PrefillEffect]:
        """The sender no longer reads blocks of the attempt: it has sent all of them, or has aborted.

        `is_cancelled`: the receiver abandoned the transfer because it is no longer needed.
        """
        prompt = self._prompts.get(key)
        if prompt is None or prompt.stage is PrefillStage.WAITING:
            return []
        if not is_cancelled and prompt.stage is not PrefillStage.ENDING:
            self.pushing.ended(prompt.receiver, prompt.push, is_whole=is_whole)
        if prompt.stage is PrefillStage.ENDING or (is_whole and prompt.stage is PrefillStage.SENDING):
            return self._release(key)
        lost = TransferLost(key=key, error=error or "the sender ended early", is_cancelled=is_cancelled)
        return [lost, *self._release(key)]

    def expire(self, now_s: float) -> list[PrefillEffect]:
        effects: list[PrefillEffect] = [] if self._fetches is None else [*self._fetches.expire(now_s)]
        for group in (self._waiting, self._computing):
            for key in [key for key, prompt in group.items() if prompt.attempt.is_late(now_s)]:
                effects += self.fail(key, FailureKind.DEADLINE, "the deadline passed before the prompt was computed")
        return effects

    def check(self) -> None:
        """Raises AssertionError unless the tables of attempts and blocks agree."""
        fetches = self._fetches
        others = [*self._kv.lent.values(), *(() if fetches is None else fetches.held())]
        self.blocks.check(holders=[*(prompt.blocks for prompt in self._prompts.values()), *others])
        if fetches is not None:
            fetches.check()
            assert {key for key in self._prompts if fetches.is_waiting(key)} <= self._waiting.keys()
        for key, prompt in self._prompts.items():
            assert (key in self._waiting) == (prompt.stage is PrefillStage.WAITING), prompt
            assert (key in self._computing) == (prompt.stage is PrefillStage.COMPUTING), prompt
            assert bool(prompt.blocks) == (prompt.stage is not PrefillStage.WAITING), prompt
        assert self._waiting.keys() | self._computing.keys() <= self._prompts.keys()

    def _startable(self, now_s: float, effects: list[PrefillEffect]) -> Iterable[PrefillSequence]:
        """The waiting prompts that do not wait for blocks of a slower tier. Adds the effects of starting fetches."""
        fetches = self._fetches
        if fetches is None:
            return self._waiting.values()
        if not self._is_full:  # a fetch must not take the memory that an earlier prompt lacks
            waiting = self._waiting.values()
            effects += fetches.consider_all(
                waiting, now_s, running_s=lambda: self._running_s(fetches), spare=0, growth=0
            )
        return [prompt for key, prompt in self._waiting.items() if not fetches.is_waiting(key)]

    def _running_s(self, fetches: Fetches) -> float:
        """Seconds to compute what is left of the prompts that have started."""
        return sum(fetches.left_s(len(each.tokens), each.computed) for each in self._computing.values())

    def _left(self, key: AttemptKey) -> Iterable[PrefillEffect]:
        """A prompt has started or ended, so no fetch runs for it."""
        return () if self._fetches is None else self._fetches.leave(key)

    def _pending(self, prompt: PrefillSequence) -> Pending[PrefillSequence]:
        computed = prompt.computed
        if prompt.stage is PrefillStage.WAITING:  # what it will find cached
            computed = self._kv.tokens_found(prompt)
        remaining_s = self.order.remaining_s(len(prompt.tokens) - computed, computed)
        return Pending(prompt, remaining_s, due_at_s(prompt.attempt, len(prompt.attempt.output_ids)))

    def _begun(self, prompt: PrefillSequence) -> list[PrefillEffect]:
        """Begins the transfer of a prompt that has started, with its blocks in the prefix cache."""
        if not prompt.is_moved:
            return []
        start = SendStarted(key=prompt.attempt.key, plan=prompt.push.name, groups=prompt.push.groups)
        return [start, *self._done(prompt)]

    def _start(self, prompt: PrefillSequence, now_s: float) -> bool:
        allocation = self._kv.allocate(len(prompt.tokens), prompt.reusable(self._block_size))
        if allocation is None:
            return False
        key = prompt.attempt.key
        prompt.blocks = allocation.blocks
        prompt.cached = prompt.computed = allocation.cached_tokens
        prompt.started_s = now_s
        if prompt.is_moved:
            prompt.push = self.pushing.choose(
                prompt.receiver,
                cached=prompt.cached,
                num_tokens=len(prompt.tokens),
                receiver_cached_blocks=prompt.receiver_cached_blocks,
                may_divide=prompt.may_divide,
            )
        prompt.move(PrefillMove.STARTED)
        del self._waiting[key]
        self._computing[key] = prompt
        return True

    def _done(self, prompt: PrefillSequence) -> list[PrefillEffect]:
        is_last = prompt.remaining == 0
        if not prompt.is_moved or (not is_last and not prompt.push.is_early):
            return []
        final = len(prompt.blocks) if is_last else prompt.computed // self._block_size
        if final <= prompt.pushed and not is_last:
            return []
        done = self._pushed(prompt, final, is_last=is_last, end_group=prompt.push.groups)
        prompt.pushed = max(prompt.pushed, final)
        return [done]

    def _pushed(self, prompt: PrefillSequence, final: int, *, is_last: bool, end_group: int) -> BlocksDone:
        return BlocksDone(
            key=prompt.attempt.key,
            blocks=tuple(
                (index - prompt.receiver_cached_blocks, prompt.blocks[index]) for index in range(prompt.pushed, final)
            ),
            is_last=is_last,
            first_group=prompt.pushed_groups,
            end_group=end_group,
            groups=prompt.push.groups,
        )

    def _first(self, prompt: PrefillSequence, token: TokenOut, now_s: float) -> FirstToken:
        attempt = prompt.attempt
        num_output = len(attempt.output_ids) + 1
        return FirstToken(
            key=attempt.key,
            token=token,
            queue_s=prompt.started_s - attempt.arrived_s,
            prefill_s=now_s - prompt.started_s,
            cached_tokens=prompt.cached,
            finish=self._end_rule.finish(attempt.sampling, token.token_id, num_output, attempt.num_tokens + 1),
        )

    def _is_live(self, key: AttemptKey) -> bool:
        prompt = self._prompts.get(key)
        return prompt is not None and prompt.stage is not PrefillStage.ENDING

    def _release(self, key: AttemptKey) -> list[PrefillEffect]:
        prompt = self._prompts.pop(key)
        prompt.move(PrefillMove.RELEASED)
        self._waiting.pop(key, None)
        self._computing.pop(key, None)
        self._kv.release(prompt.blocks, prompt.attempt.reuse_within_s)
        return [*self._left(key), Released(key=key)]
