"""Chooses when a prompt's KV is sent: by chunks as they are computed, the last chunk by groups of layers, or all KV at
the end. Pure.

KV that is sent early arrives early, but at a cost. Each part is a further message. If a transfer shares cores or memory
bandwidth with the engine, each byte sent during a step makes that step longer. Plans are compared by the predicted time
until the receiver has all KV:

    price(plan) = exposed_s(plan) + slowdown_s_per_byte * bytes hidden + MESSAGE_S * messages

The cheapest plan is chosen. KV is sent early only if that saves MARGIN of the transfer cost, and more than the usual
variation of compute times.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from pdserve.core.cost.latency import TYPICAL_TRANSFER_BYTES, CostPrior, Fit, LinkModel
from pdserve.core.cost.overlap import grouped_s
from pdserve.core.effects import StepAccount

MESSAGE_S: Final = 1e-4  # cost of a further part at both ends; measured (docs/overlap.md)
DEVICE_MESSAGE_S: Final = 5e-4  # between GPUs: launches, events and messages of both ends; estimated, not measured
MARGIN: Final = 0.1  # required gain, as a share of the exposed time of sending at the end
STEP_SHARE: Final = 0.02  # required gain, as a share of the compute time, which varies by as much
MAX_GROUPS: Final = 8
# One in this many prompts that would be sent at the end is sent early, to measure the slowdown again.
REVISIT: Final = 32
MAX_FAILED: Final = 2  # consecutive failed transfers in layer groups, after which a link's blocks are sent whole
# Prompts that are then sent whole before groups are tried again. Each further failure doubles the number.
WHOLE_PROMPTS: Final = 32
MAX_WHOLE_PROMPTS: Final = 1024
MAX_LINKS: Final = 256


@dataclass(frozen=True, slots=True)
class PushPlan:
    """How one prompt's KV is sent."""

    is_early: bool  # finished blocks are sent while the rest of the prompt is computed
    groups: int = 1  # equal ranges of layers in which the last chunk is sent

    @property
    def name(self) -> str:
        return "layers" if self.groups > 1 else "chunk" if self.is_early else "end"


AT_END: Final = PushPlan(is_early=False)
BY_CHUNK: Final = PushPlan(is_early=True)


@dataclass(slots=True)
class _Failures:
    """Failed transfers in layer groups on one link."""

    in_a_row: int = 0
    num_whole: int = 0  # prompts that are sent whole before groups are tried again


@final
class PushRule:
    """Chooses plans for one prefill worker, and learns from each step and each finished transfer.

    If transfers in layer groups fail repeatedly on a link, groups are not used there for some time, because failed
    transfers give no measurement to learn from.
    """

    def __init__(
        self,
        cost: CostPrior,
        *,
        block_size: int,
        block_bytes: int,
        num_layers: int,
        max_batch_tokens: int,
        choice: str = "auto",
        message_s: float = MESSAGE_S,
    ) -> None:
        """`choice` is as in WorkerConfig.push; values other than auto are for measurements. `message_s` is the cost of
        a message."""
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._chunk = max_batch_tokens
        self._choice = choice
        self._message_s = message_s
        self.groups = [one for one in range(2, min(num_layers, MAX_GROUPS) + 1) if num_layers % one == 0]
        cost = cost.sane()
        self._step = Fit(
            (cost.prefill_base_s, cost.prefill_per_token_s, cost.prefill_per_token_context_s, 0.0),
            (1.0, 512.0, 512.0 * 1024.0, TYPICAL_TRANSFER_BYTES),
        )
        self._links: OrderedDict[str, LinkModel] = OrderedDict()
        self._any_link = LinkModel()  # the assumption for an unmeasured link
        self.num_withheld = 0  # prompts that were sent whole because groups had failed
        self._failures: OrderedDict[str, _Failures] = OrderedDict()  # links whose last transfer in groups failed
        self._num_late = 0

    @property
    def slowdown_s_per_byte(self) -> float:
        """Seconds by which each byte sent during a step makes it longer."""
        return self._step.coefficients[3]

    def link(self, receiver: str) -> LinkModel:
        return self._links.get(receiver, self._any_link)

    def choose(
        self, receiver: str, *, cached: int, num_tokens: int, receiver_cached_blocks: int, may_divide: bool = True
    ) -> PushPlan:
        """The plan for a prompt whose first `cached` tokens are in the cache.

        The receiver already has `receiver_cached_blocks` leading blocks. With `may_divide`, it accepts blocks in
        groups of layers.
        """
        if self._choice == "end":
            return AT_END
        priced = self.prices(
            receiver, cached=cached, num_tokens=num_tokens, receiver_cached_blocks=receiver_cached_blocks
        )
        if not may_divide or self._must_leave_whole(receiver):
            priced = {push: price for push, price in priced.items() if push.groups == 1}
        at_end_s = priced.pop(AT_END)
        if self._choice == "chunk":
            return BY_CHUNK
        early = min(priced, key=lambda push: priced[push])
        if self._choice == "layers":
            return max(priced, key=lambda push: push.groups)
        computing_s = self._parts(cached, num_tokens, receiver_cached_blocks)[-1][0]
        if at_end_s - priced[early] >= max(MARGIN * at_end_s, STEP_SHARE * computing_s):
            return early
        self._num_late += 1
        return BY_CHUNK if self._num_late % REVISIT == 0 and num_tokens - cached > self._chunk else AT_END

    def prices(
        self, receiver: str, *, cached: int, num_tokens: int, receiver_cached_blocks: int
    ) -> dict[PushPlan, float]:
        """Seconds until the receiver has all KV, in addition to the compute time: for sending at the end, and for each
        early plan."""
        slowdown_s_per_byte, message_s = self.slowdown_s_per_byte, self._message_s
        link = self.link(receiver)
        latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_s
        parts = self._parts(cached, num_tokens, receiver_cached_blocks)
        total = sum(num_bytes for _, num_bytes in parts)
        last_ready_s, last_bytes = parts[-1]
        computing_s = last_ready_s - parts[-2][0] if len(parts) > 1 else last_ready_s
        backlog_s = 0.0  # time for which the link still sends earlier chunks when the last one is computed
        waiting = total
        for ready_s, num_bytes in parts[:-1]:
            backlog_s = max(backlog_s, waiting / bandwidth - (last_ready_s - ready_s))
            waiting -= num_bytes
        prices = {AT_END: latency_s + total / bandwidth + message_s}
        for groups in (1, *self.groups):
            exposed_s = max(backlog_s, grouped_s(last_bytes, computing_s, groups, bandwidth))
            hidden = max(0.0, total - exposed_s * bandwidth)
            messages = len(parts) - 1 + groups
            push = PushPlan(is_early=True, groups=groups)
            prices[push] = latency_s + exposed_s + slowdown_s_per_byte * hidden + message_s * messages
        return prices

    def stepped(self, account: StepAccount, step_s: float, moved_bytes: int) -> None:
        """Learns from a step that took `step_s`, during which so many bytes of KV were sent."""
        if account.prefill_tokens:
            self._step.observe((1.0, account.prefill_tokens, account.prefill_token_context, moved_bytes), step_s)

    def sent(self, receiver: str, exposed_bytes: int, exposed_s: float) -> None:
        """Learns that a transfer took `exposed_s` for the bytes that remained when its prompt was computed."""
        link = self._links.get(receiver)
        if link is None:
            link = self._links[receiver] = LinkModel(self._any_link.latency_s, self._any_link.bandwidth_bytes_s)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)
        self._links.move_to_end(receiver)
        link.observe(exposed_bytes, exposed_s)
        self._any_link.observe(exposed_bytes, exposed_s)

    def ended(self, receiver: str, push: PushPlan, *, is_whole: bool) -> None:
        """Learns that a transfer was completed (`is_whole`) or failed. Not called for cancelled transfers."""
        if push.groups == 1:
            return
        if is_whole:
            self._failures.pop(receiver, None)
            return
        failures = self._failures.setdefault(receiver, _Failures())
        self._failures.move_to_end(receiver)
        if len(self._failures) > MAX_LINKS:
            self._failures.popitem(last=False)
        failures.in_a_row += 1
        if failures.in_a_row >= MAX_FAILED:
            doublings = min(failures.in_a_row - MAX_FAILED, 10)
            failures.num_whole = min(WHOLE_PROMPTS << doublings, MAX_WHOLE_PROMPTS)

    def _must_leave_whole(self, receiver: str) -> bool:
        """Whether layer groups must not be used for this prompt. Counts such prompts."""
        failures = self._failures.get(receiver)
        if failures is None or not failures.num_whole:
            return False
        failures.num_whole -= 1
        self.num_withheld += 1
        return True

    def _parts(self, cached: int, num_tokens: int, receiver_cached_blocks: int) -> list[tuple[float, float]]:
        """(time from the start of the computation, bytes) of the KV that becomes final with each step of the prompt
        alone."""
        base_s, per_token_s, per_token_context_s, _ = self._step.coefficients
        size = self._block_size
        ends = [cached, *range(cached + self._chunk, num_tokens, self._chunk), num_tokens]
        ready_s, done = 0.0, max(receiver_cached_blocks, cached // size)
        parts = (
            [(0.0, float(done - receiver_cached_blocks) * self._block_bytes)] if done > receiver_cached_blocks else []
        )
        for start, end in pairwise(ends):
            count = end - start
            ready_s += base_s + per_token_s * count + per_token_context_s * count * (start + count / 2)
            now_done = max(done, -(-end // size) if end == num_tokens else end // size)
            parts.append((ready_s, float(now_done - done) * self._block_bytes))
            done = now_done
        return parts
