"""The explored scenarios: pools are small, so that a second transfer reuses the blocks of the first."""

from __future__ import annotations

from typing import Any, Final

from tests.unit.kvtransfer.model.wire import Scenario


def scenario(*, blocks: int = 1, sources: int = 1, targets: int = 1, **more: Any) -> Scenario:
    """A scenario with pool sizes given in transfers."""
    return Scenario(blocks=blocks, source_blocks=sources * blocks, target_blocks=targets * blocks, **more)


# One transfer and one reuse of its blocks on both sides, with two faults at any two steps.
REUSE: Final = scenario(faults=2)
# The same with transfers of two blocks: coverage, half-done transfers, the last chunk.
REUSE_OF_TWO: Final = scenario(blocks=2, faults=1)
# Both transfers' sources at once, so that their chunks take turns; a chunk reaches memory in two writes (tcp).
BOTH_AT_ONCE: Final = scenario(sources=2, slices=2, faults=1)
# One transfer of two blocks in two writes each, with more faults.
ONE_OF_TWO: Final = scenario(blocks=2, transfers=1, slices=2, faults=3)
# Without deadlines: leases end transfers without progress.
LEASED: Final = scenario(faults=1, deadline_s=None)
# Two live transfers on different blocks, over two connections.
SIDE_BY_SIDE: Final = scenario(targets=2, faults=2)
# For every run of the tests: each of the above, with fewer faults or fewer kinds of faults.
SHORT_REUSE: Final = scenario(faults=1)
SHORT_BOTH: Final = scenario(sources=2, slices=2, faults=1, kinds=frozenset(("cut", "abort")))
SHORT_ONE_OF_TWO: Final = scenario(blocks=2, transfers=1, slices=2, faults=2)
SHORT_LEASED: Final = scenario(transfers=1, faults=2, deadline_s=None)
# For `python -m tests.unit.kvtransfer.model`, which takes minutes and gigabytes.
REUSE_WITH_MORE: Final = scenario(faults=3)
BOTH_WITH_MORE: Final = scenario(sources=2, slices=2, faults=2)

EVERY_TIME: Final = {
    "reuse, one fault": SHORT_REUSE,
    "one of two, two faults": SHORT_ONE_OF_TWO,
    "one, no deadline": SHORT_LEASED,
}
#: For `make test-slow`: a fifth of the time of all the others.
SLOW: Final = {"both at once, cut or given up": SHORT_BOTH}
DEEP: Final = {
    **EVERY_TIME,
    **SLOW,
    "reuse": REUSE,
    "both at once": BOTH_AT_ONCE,
    "one of two": ONE_OF_TWO,
    "no deadline": LEASED,
    "reuse of two": REUSE_OF_TWO,
    "side by side": SIDE_BY_SIDE,
    "both at once, more": BOTH_WITH_MORE,
    "reuse, more": REUSE_WITH_MORE,
}
