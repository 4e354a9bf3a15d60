"""The most jobs that one machine can finish by their deadlines. Pure.

Source: M. Moore, Management Science 15 (1968), for equal release times; H. Kise, T. Ibaraki and H. Mine, Operations
Research 26 (1978), for release times whose order is that of the deadlines (agreeable); Lawler, Annals of Operations
Research 26 (1990), treats all release times with preemption, in O(n^5).

Jobs are added in order of their deadlines. If the last one would be late, the job is removed without which the others
end earliest. With agreeable deadlines no order is better than that of the deadlines, and preemption does not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

# Jobs that are considered together. The sum over groups of jobs is a bound too, because each group has the machine for
# itself; so the time is in proportion to the number of jobs.
GROUP: Final = 1000
ROUNDING: Final = 1e-9  # relative, in favour of the jobs


class DeadlineJob(NamedTuple):
    release: float
    deadline: float
    work: float


def most_in_time(jobs: Iterable[DeadlineJob]) -> int:
    """At least the number of jobs that can be finished in time, and exactly it for agreeable deadlines in one group.

    Deadlines that are not agreeable are extended until they are.
    """
    ordered = sorted(jobs)
    return sum(_most(ordered[at : at + GROUP]) for at in range(0, len(ordered), GROUP))


def _most(jobs: list[DeadlineJob]) -> int:
    kept: list[DeadlineJob] = []
    starts: list[float] = []  # of `kept`
    end = deadline = 0.0
    for job in jobs:
        deadline = max(deadline, job.deadline)
        before = end
        kept.append(job)
        starts.append(max(end, job.release))
        end = starts[-1] + job.work
        if end <= deadline + ROUNDING * abs(deadline):
            continue
        index = _cheapest(kept, starts, end, before)
        del kept[index], starts[index]
        end = before
        if index < len(kept):
            end = starts[index - 1] + kept[index - 1].work if index else 0.0
            for later in range(index, len(kept)):
                starts[later] = max(end, kept[later].release)
                end = starts[later] + kept[later].work
    return len(kept)


def _cheapest(kept: list[DeadlineJob], starts: list[float], end: float, before: float) -> int:
    """The job without which the others end earliest.

    Without job j the later ones start earlier by its work, but none before its release.
    """
    last = len(kept) - 1
    found, gain = last, end - before
    slack = starts[last] - kept[last].release
    for index in range(last - 1, -1, -1):
        if slack <= gain:
            break
        if min(kept[index].work, slack) > gain:
            found, gain = index, min(kept[index].work, slack)
        slack = min(slack, starts[index] - kept[index].release)
    return found
