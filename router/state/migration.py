"""Which running answers leave a draining decode worker, and when. Pure.

A draining worker gets no new requests, and its running answers move to other workers, so that the drain does not take
as long as the longest of them. An answer moves as after a lost worker (endings.py): its attempt is cancelled, and the
next one recomputes the prompt and the output so far, so the stream continues at the exact next token. The client
notices a gap between two tokens. The rules:

- An answer moves only to a placement that can start now. If there is none, it stays, and the policy is asked again.
- It moves if the rest of it takes at least MIN_GAIN times as long as the gap. If it ends soon, it stays until then. It
  also stays if only the gap would make it miss its deadline.
- For PATIENCE_S, waiting requests go first, and an answer stays if only the gap would make it miss its TPOT target.
- At most one answer for each prefill worker moves at a time (for each decode worker if there is no prefill worker), the
  longest first. It has moved when its next token arrives.
- An attempt after the first must have made progress, so an answer does not move from worker to worker without tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple, final

from pdserve.core.cost.latency import LONGEST_S
from router.policy.availability import LONGEST_WAIT_S, unloaded_estimate
from router.policy.interface import Choice, Decision, Obstacle
from router.state import placing
from router.state.attempts import INNOCENT_TOKENS
from router.state.cluster_state import ClusterState
from router.state.endings import Migrate, apply_ending
from router.state.fleet import able, policy_input_of
from router.state.interface import Command
from router.state.lifecycle import CAN_MIGRATE
from router.state.request import Request
from router.state.view import WorkerView

MIN_GAIN: Final = 2.0  # predictions of a gap and of the length of an answer are not more accurate than that
PATIENCE_S: Final = 5.0  # from the beginning of the drain
RETRY_S: Final = 0.05  # after no prefill worker was free
MAX_ASKED: Final = 4  # answers about which the policy is asked after one event; a decision is expensive
STARTS: Final = (Choice.REMOTE, Choice.LOCAL)


def migrate(cluster: ClusterState) -> list[Command]:
    """Moves the answers that can leave a draining worker now. Tokens of such a worker call it again soon."""
    if cluster.migrating:
        _drop_arrived(cluster)
    draining = cluster.fleet.draining(cluster.now_s)
    if not draining or cluster.now_s < cluster.migrate_after_s:
        return []
    prefills, decodes = cluster.fleet.usable(cluster.now_s)
    room = len(prefills or decodes) - len(cluster.migrating)
    if not decodes or room <= 0:
        return []
    return _Migration(cluster, prefills, decodes).run(draining, room)


def _drop_arrived(cluster: ClusterState) -> None:
    """Forgets the requests that have a token of their new attempt."""
    for request_id in list(cluster.migrating):
        request = cluster.requests[request_id]
        if len(request.output) > request.attempt_output:
            cluster.migrating.discard(request_id)


class _Answer(NamedTuple):
    """An answer on a draining worker, and what is expected there."""

    request: Request
    view: WorkerView
    rest_tokens: float
    rest_s: float


@final
class _Migration:
    """One pass over the answers on draining workers."""

    def __init__(self, cluster: ClusterState, prefills: list[WorkerView], decodes: list[WorkerView]) -> None:
        self._cluster = cluster
        self._prefills = prefills
        self._decodes = decodes
        self._has_waiting = len(cluster.queue) + cluster.num_bound > 0

    def run(self, draining: list[WorkerView], room: int) -> list[Command]:
        cluster = self._cluster
        commands: list[Command] = []
        answers = [one for view in draining for one in self._movable(view)]
        answers.sort(key=lambda one: (-one.rest_s, one.request.serial))
        for answer in answers[:MAX_ASKED]:
            if room <= 0:
                return commands
            decision = self._decide(answer)
            if decision is not None and decision.obstacle is Obstacle.PREFILL:  # perhaps only for this answer
                answer.request.stays_until_s = cluster.now_s + RETRY_S
                cluster.migrate_after_s = cluster.now_s + RETRY_S / MAX_ASKED  # not after each event
            elif decision is not None and decision.choice in STARTS and self._is_worth_it(answer, decision):
                commands += self._move(answer, decision)
                room -= 1
            else:  # the next passes consider others
                answer.request.stays_until_s = cluster.now_s + LONGEST_WAIT_S
        return commands

    def _movable(self, view: WorkerView) -> list[_Answer]:
        cluster = self._cluster
        if self._has_waiting and not self._is_urgent(view):
            return []
        found = []
        for request_id, attempt in view.reservations:
            request = cluster.requests[request_id]
            least = 1 if request.num_tried <= 1 else INNOCENT_TOKENS
            if (
                request.attempt == attempt
                and request.stage in CAN_MIGRATE
                and len(request.output) - request.attempt_output >= least
                and request.stays_until_s <= cluster.now_s
            ):
                rest_tokens = _rest_tokens(cluster, request)
                found.append(_Answer(request, view, rest_tokens, min(rest_tokens * view.load.step_s, LONGEST_S)))
        return found

    def _is_urgent(self, view: WorkerView) -> bool:
        return self._cluster.now_s - view.drains_since_s >= PATIENCE_S

    def _decide(self, answer: _Answer) -> Decision | None:
        """Asks the policy for a placement. None: no other worker can hold the whole answer."""
        cluster, request, facts = self._cluster, answer.request, answer.request.facts
        fits_all = cluster.fleet.fits_all
        most = min(facts.num_prompt_tokens + facts.sampling.max_tokens, answer.view.max_tokens)
        decodes = able(request, self._decodes, max(most, request.num_tokens + 1), fits_all)
        if not decodes:
            return None
        prefills = able(request, self._prefills, request.num_tokens, fits_all)
        asked = policy_input_of(request, cluster.fleet, cluster.lengths, cluster.now_s, answer.rest_tokens)
        return cluster.policy(asked, prefills, decodes, cluster.now_s)

    def _is_worth_it(self, answer: _Answer, decision: Decision) -> bool:
        """Whether the answer should move to this placement, whose first token ends the gap."""
        cluster, request, rest_s = self._cluster, answer.request, answer.rest_s
        gap_s, tpot_s = self._predicted(answer, decision)
        moved_s = gap_s + answer.rest_tokens * tpot_s
        if rest_s < MIN_GAIN * gap_s or _only_fits(rest_s, moved_s, request.deadline_left_s(cluster.now_s)):
            return False
        assert request.first_token_s is not None, "an answer that can migrate has a token"
        num_tokens = len(request.output) + answer.rest_tokens - 1.0
        target_left_s = request.first_token_s + num_tokens * request.facts.slo.tpot_s - cluster.now_s
        return self._is_urgent(answer.view) or not _only_fits(rest_s, moved_s, target_left_s)

    def _predicted(self, answer: _Answer, decision: Decision) -> tuple[float, float]:
        """The gap, and the seconds per token after it. A policy may predict nothing."""
        if decision.candidates:
            chosen = decision.candidates[0]
            return chosen.ttft_s, chosen.tpot_s
        request = answer.request
        unloaded = unloaded_estimate(request.num_tokens, answer.rest_tokens, {}, self._prefills, self._decodes)
        return unloaded.ttft_s, unloaded.tpot_s

    def _move(self, answer: _Answer, decision: Decision) -> list[Command]:
        cluster, request, view = self._cluster, answer.request, answer.view
        state = "drained" if view.is_drained else "draining"
        reason = (
            f"moved from {view.worker_id}, which is {state}: the rest would take about {answer.rest_s:.3f} s there; "
            f"{decision.reason}"
        )
        commands = apply_ending(cluster, Migrate(request))
        return commands + placing.start(cluster, request, replace(decision, reason=reason))


def _only_fits(rest_s: float, moved_s: float, left_s: float | None) -> bool:
    """Whether the rest of an answer takes at most `left_s` on its present worker, and longer if it moves."""
    return left_s is not None and rest_s <= left_s < moved_s


def _rest_tokens(cluster: ClusterState, request: Request) -> float:
    """The expected number of tokens until the answer ends. One that has exceeded the expected length is expected to
    become twice as long as it is, within its limit."""
    num_tokens, most = len(request.output), request.facts.sampling.max_tokens
    expected = cluster.lengths.expected(most, num_tokens)
    return expected if expected > 1.0 else float(max(min(num_tokens, most - num_tokens), 1))
