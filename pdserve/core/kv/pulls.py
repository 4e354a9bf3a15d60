"""The bounds of what a worker pulls from others and gives to them, and when it asks again for a part. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from pdserve.core.attempt import PULLS_GIVEN, PULLS_TAKEN, Attempt, AttemptKey
from pdserve.core.kv.fetch import Fetch, Fetches
from pdserve.core.types import Sampling

MAX_BYTES: Final = 2**30  # on their way in one direction; a pull alone may have more
LONGEST_S: Final = 60.0  # of one pull, also if its prompt waits longer
ASK_S: Final = 10.0  # for the source's answer, which may wait for its running step and its disk
_READER: Final = -1  # the session of `reader`
#: A step with a row of so many tokens takes long enough to answer other workers in the middle of it. Shorter rows are
#: left to the engines' kernels for whole steps.
LONG_QUERIES: Final = 64


def num_pullable(
    attempt: Attempt, num_missing: int, first: int, *, taken: Collection[int], block_size: int, block_bytes: int
) -> int:
    """How many blocks the attempt's source can be asked for, after its first `first` ones. `taken`: the blocks of each
    pull by this worker."""
    source = attempt.source
    if source is None or len(taken) >= PULLS_TAKEN:
        return 0
    found = max(0, min(num_missing, source.num_tokens // block_size - first))
    return 0 if taken and (sum(taken) + found) * block_bytes > MAX_BYTES else found


def pull_ends_at_s(attempt: Attempt, now_s: float) -> float:
    """When a pull that begins now must end."""
    latest_s = now_s + LONGEST_S
    return latest_s if attempt.deadline_at_s is None else min(latest_s, attempt.deadline_at_s)


def reader(number: int) -> Attempt:
    """The attempt for which a worker reads its disk to give the blocks."""
    return Attempt(key=AttemptKey(_READER, str(number), 1), prompt_ids=(), sampling=Sampling())


def may_give(given: Collection[int], num_blocks: int, block_bytes: int) -> bool:
    """`given`: the blocks of each pull that this worker gives."""
    return len(given) < PULLS_GIVEN and (not given or (sum(given) + num_blocks) * block_bytes <= MAX_BYTES)


def is_part_worthwhile(
    fetches: Fetches, fetch: Fetch, num_found: int, *, block_size: int, now_s: float, ends_at_s: float
) -> bool:
    """Whether to ask again for the first `num_found` blocks of a refused pull: whether that is predicted to be sooner
    than to compute them, and before the pull must end."""
    pull_s = now_s - fetch.started_s + fetch.predicted_s * num_found / len(fetch.blocks)
    computed_s = fetches.left_s((fetch.first + num_found) * block_size, fetch.first * block_size) or math.inf
    return pull_s < min(computed_s, ends_at_s - now_s)
