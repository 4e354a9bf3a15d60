"""Which running answers leave a draining decode worker, when, and whether their KV is sent. Pure.

A draining worker gets no new requests, and its running answers move to other workers, so that the drain does not take
as long as the longest of them. An answer moves as after a lost worker (endings.py): its attempt is cancelled, and the
stream continues at the exact next token. The client notices a gap between two tokens. The next attempt gets its KV in
one of two ways, whichever is predicted to end the answer first:

- **sent**: the draining worker takes the part of a prefill worker whose cache has the whole text. It computes at most
  the last block again, samples the next token, and sends the KV to the new worker.
- **recomputed**: a prefill worker, or the new decode worker, computes the prompt and the output so far. Any failure to
  send leads here.

The rules:

- An answer moves only to a placement that can start now. If there is none, it stays, and the policy is asked again.
- It moves if the rest of it takes at least MIN_GAIN times as long as the gap. If it ends soon, it stays until then. It
  also stays if only the gap would make it miss its deadline.
- For PATIENCE_S, waiting requests go first, and an answer stays if only the gap would make it miss its TPOT target. An
  answer whose KV is sent needs no prefill worker, so it waits only for requests that wait for a decode worker.
- At most one answer for each prefill worker is recomputed at a time (for each decode worker if there is no prefill
  worker), and the KV of SENDS_AT_ONCE answers of a worker is sent, the longest first. An answer is recomputed when its
  next token arrives, and sent when its KV has arrived too.
- An attempt after the first must have made progress, so an answer does not move from worker to worker without tokens.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple, final

from pdserve.core.cost.latency import LONGEST_S
from router.policy.availability import LONGEST_WAIT_S, unloaded_estimate
from router.policy.interface import Choice, Decision, Obstacle, PolicyInput
from router.state import placing
from router.state.attempts import INNOCENT_TOKENS
from router.state.cluster_state import ClusterState
from router.state.endings import Migrate, apply_ending
from router.state.fleet import able, policy_input_of
from router.state.interface import Command
from router.state.lifecycle import CAN_MIGRATE, Stage
from router.state.request import Request
from router.state.view import WorkerView

MIN_GAIN: Final = 2.0  # predictions of a gap and of the length of an answer are not more accurate than that
PATIENCE_S: Final = 5.0  # from the beginning of the drain
RETRY_S: Final = 0.05  # after no prefill worker was free, if none becomes free earlier
MAX_ASKED: Final = 4  # answers about which the policy is asked after one event; a decision is expensive
SENDS_AT_ONCE: Final = 4  # of one worker: enough to hide the latency of steps, and few that share its bandwidth


def migrate(cluster: ClusterState) -> list[Command]:
    """Moves the answers that can leave a draining worker now. Tokens of such a worker call it again soon."""
    if cluster.migrating:
        _drop_arrived(cluster)
    draining = cluster.fleet.draining(cluster.now_s)
    if not draining:
        return []
    prefills, decodes = cluster.fleet.usable(cluster.now_s)
    return _Migration(cluster, prefills, decodes).run(draining) if decodes else []


def _drop_arrived(cluster: ClusterState) -> None:
    """Forgets the requests that have a token of their new attempt and, if their KV is sent, their KV."""
    for request_id in list(cluster.migrating):
        request = cluster.requests[request_id]
        if len(request.output) > request.attempt_output and not (
            request.stage is Stage.MOVING and cluster.sender_of(request)
        ):
            cluster.migrating.discard(request_id)


class _Answer(NamedTuple):
    """An answer on a draining worker, and what is expected there."""

    request: Request
    view: WorkerView
    rest_tokens: float
    rest_s: float


class _Option(NamedTuple):
    """A placement that can start now."""

    decision: Decision
    gap_s: float
    moved_s: float  # until the end of the answer
    how: str


@final
class _Migration:
    """One pass over the answers on draining workers."""

    def __init__(self, cluster: ClusterState, prefills: list[WorkerView], decodes: list[WorkerView]) -> None:
        self._cluster = cluster
        self._prefills = prefills
        self._decodes = decodes
        self._has_waiting = len(cluster.queue) + cluster.num_bound > 0
        # When an event may last have made room on a worker that computes prompts.
        self._freed_s = max((view.freed_s for view in prefills or decodes), default=-math.inf)
        senders = [cluster.sender_of(cluster.requests[one]) for one in cluster.migrating]
        self._num_sending = Counter(filter(None, senders))
        self._room = len(prefills or decodes) - senders.count("")  # for answers to recompute
        asked_s = cluster.migration_asked_s
        # Not after each event.
        self._may_ask = cluster.now_s >= asked_s + RETRY_S / MAX_ASKED or self._freed_s >= asked_s

    def run(self, draining: list[WorkerView]) -> list[Command]:
        cluster = self._cluster
        commands: list[Command] = []
        answers = [one for view in draining if self._may_any_leave(view) for one in self._movable(view)]
        answers.sort(key=lambda one: (-one.rest_s, one.request.serial))
        num_asked = 0
        for answer in answers:
            if num_asked == MAX_ASKED:
                break
            may_send, may_recompute = self._may_send(answer), self._may_recompute(answer.view)
            if not may_send and not may_recompute:
                continue
            num_asked += 1
            request = answer.request
            request.asked_s, request.waits_for = cluster.now_s, Obstacle.NONE
            option = self._best(answer, may_send=may_send, may_recompute=may_recompute)
            if option is not None and self._is_worth_it(answer, option):
                commands += self._move(answer, option)
            elif request.waits_for is Obstacle.PREFILL:  # perhaps only for this answer
                request.stays_until_s = cluster.now_s + RETRY_S
                cluster.migration_asked_s = cluster.now_s
            else:  # the next passes consider others
                request.stays_until_s = cluster.now_s + LONGEST_WAIT_S
        return commands

    @functools.cached_property
    def _is_decode_short(self) -> bool:
        """Whether one of the next requests waits for decode room. The head of the queue is not free of charge."""
        requests = self._cluster.requests
        waiting = islice(self._cluster.queue, placing.LOOKAHEAD)
        return any(requests[one].waits_for in (Obstacle.DECODE, Obstacle.ROOM) for one in waiting)

    def _movable(self, view: WorkerView) -> list[_Answer]:
        cluster = self._cluster
        found = []
        for request_id, attempt in view.reservations:
            request = cluster.requests[request_id]
            least = 1 if request.num_tried <= 1 else INNOCENT_TOKENS
            if (
                request.attempt == attempt
                and request.stage in CAN_MIGRATE
                and request.placement is not None
                and request.placement.decode_worker == view.worker_id
                and len(request.output) - request.attempt_output >= least
                and self._is_due(request)
            ):
                rest_tokens = _rest_tokens(cluster, request)
                found.append(_Answer(request, view, rest_tokens, min(rest_tokens * view.load.step_s, LONGEST_S)))
        return found

    def _is_due(self, request: Request) -> bool:
        if request.stays_until_s <= self._cluster.now_s:
            return True
        return request.waits_for is Obstacle.PREFILL and self._freed_s >= request.asked_s

    def _is_urgent(self, view: WorkerView) -> bool:
        return self._cluster.now_s - view.drains_since_s >= PATIENCE_S

    def _may_any_leave(self, view: WorkerView) -> bool:
        """Before anything is computed for each answer: this is asked after each event."""
        may_send = view.hello.sends_kv and self._num_sending[view.worker_id] < SENDS_AT_ONCE
        return may_send or self._may_recompute(view)

    def _may_recompute(self, view: WorkerView) -> bool:
        is_first = not self._has_waiting or self._is_urgent(view)
        return is_first and self._may_ask and self._room > 0

    def _may_send(self, answer: _Answer) -> bool:
        request, view, cluster = answer.request, answer.view, self._cluster
        adapter = request.facts.adapter
        return (
            view.hello.sends_kv
            and view.heard_s > cluster.now_s - cluster.fleet.silence_s
            and self._num_sending[view.worker_id] < SENDS_AT_ONCE
            and (not adapter or adapter in view.adapters)
            # A failed transfer is a lost attempt, which must not be the request's last one.
            and request.lost_attempts + 1 < cluster.settings.max_attempts
            and (self._is_urgent(view) or not self._is_decode_short)
        )

    def _best(self, answer: _Answer, *, may_send: bool, may_recompute: bool) -> _Option | None:
        """The option that is predicted to end the answer first. None: it cannot start elsewhere now."""
        cluster, request, facts, view = self._cluster, answer.request, answer.request.facts, answer.view
        most = min(facts.num_prompt_tokens + facts.sampling.max_tokens, view.max_tokens)
        decodes = able(request, self._decodes, max(most, request.num_tokens + 1), cluster.fleet.fits_all)
        if not decodes:
            return None  # no other worker can hold the whole answer
        # Its last token has no KV yet.
        request.holds(view.worker_id, (request.num_tokens - 1) // view.hello.block_size)
        asked = policy_input_of(request, cluster.fleet, cluster.lengths, cluster.now_s, answer.rest_tokens)
        again = self._recomputed(answer, asked, decodes) if may_recompute else None
        if again is not None:  # the new worker is the same in either way, so the predictions differ in the way alone
            decodes = [one for one in decodes if one.worker_id == again.decision.decode_worker]
        sent = self._sent(answer, asked, decodes) if may_send else None
        options = [one for one in (sent, again) if one is not None]
        return min(options, key=lambda one: one.moved_s, default=None)

    def _recomputed(self, answer: _Answer, asked: PolicyInput, decodes: list[WorkerView]) -> _Option | None:
        cluster, request = self._cluster, answer.request
        prefills = able(request, self._prefills, request.num_tokens, cluster.fleet.fits_all)
        decision = cluster.policy(asked, prefills, decodes, cluster.now_s)
        if decision.bound_to and self._is_urgent(answer.view):  # before the requests in that worker's queue
            decision = cluster.policy(replace(asked, bound_to=decision.bound_to), prefills, decodes, cluster.now_s)
        if decision.choice not in placing.STARTS:
            request.waits_for = decision.obstacle
            return None
        gap_s, tpot_s = self._predicted(answer, decision, self._prefills)
        return _Option(decision, gap_s, gap_s + answer.rest_tokens * tpot_s, "it is recomputed")

    def _sent(self, answer: _Answer, asked: PolicyInput, decodes: list[WorkerView]) -> _Option | None:
        """The draining worker as a prefill worker without other requests, after its present step."""
        cluster, now_s, view = self._cluster, self._cluster.now_s, answer.view
        source = WorkerView(view.hello, now_s)
        source.cost = view.cost
        source.free_at_s = now_s + min(view.rest_of_step_s(now_s), source.batch_s)
        decision = cluster.policy(asked, [source], decodes, now_s)
        if decision.choice is not Choice.REMOTE:
            return None
        target = cluster.fleet.workers[decision.decode_worker]
        lacking = target.blocks_for(asked.num_tokens - asked.cached_on(target))
        link = cluster.fleet.link(view.worker_id, target.worker_id)
        gap_s, tpot_s = self._predicted(answer, decision, [source])
        gap_s += link.transfer_s(lacking * target.hello.block_bytes)
        return _Option(decision, gap_s, gap_s + answer.rest_tokens * tpot_s, "its KV is sent")

    def _predicted(self, answer: _Answer, decision: Decision, prefills: list[WorkerView]) -> tuple[float, float]:
        """The gap until the next token, and the seconds per token after it. A policy may predict nothing."""
        if decision.candidates:
            chosen = decision.candidates[0]
            return chosen.ttft_s, chosen.tpot_s
        tokens = answer.request.num_tokens
        cached = {one.worker_id: tokens - 1 for one in prefills if one.worker_id == answer.view.worker_id}
        unloaded = unloaded_estimate(tokens, answer.rest_tokens, cached, prefills, self._decodes)
        return unloaded.ttft_s, unloaded.tpot_s

    def _is_worth_it(self, answer: _Answer, option: _Option) -> bool:
        """Whether the answer should move to this placement."""
        cluster, request, rest_s = self._cluster, answer.request, answer.rest_s
        if rest_s < MIN_GAIN * option.gap_s:
            return False
        if _only_fits(rest_s, option.moved_s, request.deadline_left_s(cluster.now_s)):
            return False
        assert request.first_token_s is not None, "an answer that can migrate has a token"
        num_tokens = len(request.output) + answer.rest_tokens - 1.0
        target_left_s = request.first_token_s + num_tokens * request.facts.slo.tpot_s - cluster.now_s
        return self._is_urgent(answer.view) or not _only_fits(rest_s, option.moved_s, target_left_s)

    def _move(self, answer: _Answer, option: _Option) -> list[Command]:
        cluster, request, view, decision = self._cluster, answer.request, answer.view, option.decision
        state = "drained" if view.is_drained else "draining"
        reason = (
            f"moved from {view.worker_id}, which is {state}: the rest would take about {answer.rest_s:.3f} s there; "
            f"{option.how}; {decision.reason}"
        )
        if decision.prefill_worker == view.worker_id:
            self._num_sending[view.worker_id] += 1
        else:
            self._room -= 1
        commands = apply_ending(cluster, Migrate(request))
        return commands + placing.start(cluster, request, replace(decision, reason=reason))


def _only_fits(rest_s: float, moved_s: float, left_s: float | None) -> bool:
    """Whether the rest of an answer takes at most `left_s` on its present worker, and longer if it moves."""
    return left_s is not None and rest_s <= left_s < moved_s


def _rest_tokens(cluster: ClusterState, request: Request) -> float:
    """The expected number of tokens until the answer ends. One that has exceeded the expected length is expected to
    become twice as long as it is, within its limit."""
    num_tokens, most = len(request.output), request.facts.sampling.max_tokens
    expected = cluster.lengths.remaining(request.facts, num_tokens)
    return expected if expected > 1.0 else float(max(min(num_tokens, most - num_tokens), 1))
