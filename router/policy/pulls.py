"""Whether a worker should pull the KV of a prompt's prefix from another worker instead of computing it. Pure.

    recompute    max(queue, reads of its own tiers) + prefill of all tokens that the worker lacks
    pull         max(queue, seconds of the pull) + prefill of the tokens that the source lacks too

To each, the engine time that it takes from later requests is added. Both are compared for the few candidates of a
placement that are compared in detail. A pull takes the time of the link for its own bytes and for those that are on
their way at either end, and what a pull takes besides: the request to the source, and the source's running step.

The source is the usable worker that gives the most of the prompt. What it reads from its own tiers before is a part of
the pull.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pdserve.core.attempt import PULLS_GIVEN, PULLS_TAKEN, shareable_blocks
from pdserve.core.kv.pulls import MAX_BYTES
from router.policy.interface import Links, PolicyInput, PullChoice
from router.state.view import WorkerView

# The cost of a second of a worker's time, in seconds of delay for this request: on average one later request is
# delayed.
WORK_WEIGHT: Final = 1.0

_record: Final = tuple.__new__  # makes a NamedTuple from a tuple; half the time of its constructor

PULL_SHARE: Final = 0.1  # engine time that a second of pulling takes from both workers together


class Pull(NamedTuple):
    """A pull by one worker, and what it replaces."""

    choice: PullChoice
    rest_s: float  # prefill of what then remains


def source_of(
    cached_tokens: Mapping[str, int],
    workers: Mapping[str, WorkerView],
    is_usable: Callable[[WorkerView], bool],
    now_s: float,
) -> WorkerView | None:
    """Of the workers that may receive requests and give KV now, the one with the most of the prompt."""

    def gives(view: WorkerView) -> bool:
        is_open = view.pulls_closed_until_s <= now_s and view.totals.gives < PULLS_GIVEN
        return view.hello.pulls_kv and is_open and is_usable(view)

    by_tokens = cached_tokens.__getitem__
    first = workers[max(cached_tokens, key=by_tokens)]
    if gives(first):
        return first
    others = [worker_id for worker_id in cached_tokens if gives(workers[worker_id])]
    return workers[max(others, key=by_tokens)] if others else None


def pullable_tokens(cached_tokens: Mapping[str, int], source: WorkerView, num_tokens: int) -> int:
    """Of a prompt of `num_tokens`, in full blocks; at least one token must be computed."""
    size = source.hello.block_size
    return min(cached_tokens[source.worker_id] // size, shareable_blocks(num_tokens, size)) * size


def pull_of(
    request: PolicyInput,
    source: WorkerView,
    cached: Mapping[str, int],
    view: WorkerView,
    work_s: float,
    queue_s: float,
    links: Links,
    now_s: float,
    slowdown: float = 1.0,
) -> Pull | None:
    """`work_s`: prefill of all tokens that the worker lacks, after `queue_s`. `slowdown`: of a prefill that shares its
    steps with decode rows, and included in `work_s`. None if the worker cannot pull, or if the source has no more."""
    prefix, held, totals = request.source_tokens, request.kept_on(view) if cached else 0, view.totals
    if prefix <= held or totals.pulls >= PULLS_TAKEN:
        return None
    if view.pull_rests and view.pull_rests.get(source.worker_id, (now_s, 0))[0] > now_s:
        return None
    hello, theirs = view.hello, source.hello
    size, block_bytes = hello.block_size, hello.block_bytes
    if not hello.pulls_kv or theirs.block_size != size or theirs.block_bytes != block_bytes:
        return None
    if theirs.weights != hello.weights:
        return None
    before, giving = totals.pulling_tokens, source.totals.giving_tokens
    if giving > before:
        before = giving
    num_bytes = (before + prefix - held) // size * block_bytes
    if before and num_bytes > MAX_BYTES:  # the worker would not ask, or the source would refuse
        return None
    latency_s, per_byte_s = links(source.worker_id, view.worker_id).coefficients
    reads_s = request.source_read_s
    pull_s = reads_s + source.pulls.typical_s + latency_s + per_byte_s * num_bytes
    rest_s = slowdown * view.prefill_s(request.num_tokens - prefix, prefix)
    waits_s = pull_s - queue_s if pull_s > queue_s else 0.0
    if cached and (own := request.reads.get(view.worker_id)) is not None:  # what it would read itself otherwise
        waits_s -= own.wait_s(queue_s)
    recompute_s = work_s - rest_s
    is_pulled = waits_s + WORK_WEIGHT * PULL_SHARE * pull_s < (1.0 + WORK_WEIGHT) * recompute_s
    if recompute_s < 0.0:
        recompute_s = 0.0
    choice = _record(PullChoice, (source.worker_id, prefix - held, prefix, pull_s, recompute_s, is_pulled, reads_s))
    return _record(Pull, (choice, rest_s))


def least_rest_s(request: PolicyInput, view: WorkerView) -> float:
    """Prefill of what remains after a pull of all that the source has; `view` is any prefill worker."""
    return view.prefill_s(request.num_tokens - request.source_tokens, request.source_tokens)
