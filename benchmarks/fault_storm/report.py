"""Counts the results of a fault storm and renders them as markdown tables. Pure except for printing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.fault_storm.cases import NO_FAULT, Case, OwnerFault
from benchmarks.harness import table_head, table_row

NEVER_VERIFIED: Final = (OwnerFault.GAP, OwnerFault.UNFINISHED, OwnerFault.OTHER_TEXT)
LATEST_S: Final = 1.0  # latest time after its deadline at which a failed transfer's memory is free
_COUNTED: Final = (
    "late_messages",
    "duplicate_chunks",
    "checksum_mismatches",
    "stamp_mismatches",
    "stale_source",
    "protocol_errors",
    "expired",
    "cut",
    "overtakings",  # copies that ended before an earlier one of another stream; 0 without devices
)


_KINDS: Final = (
    ("deadline", "deadline"),
    ("checksum", "checksum"),
    ("stamp", "stamp|reassigned|content hash"),
    ("aborted", "abort"),
    ("the device or NCCL", "NCCL|device|did not end in time"),
    ("pushed wrongly", "pushed twice|pushed, expected|leaves|did not arrive"),
    (
        "connection",
        "connection|closed|lost|protocol|header|frame|credit|restart|refused: UNAVAILABLE|did not (take|accept)|Errno|"
        "silent|sent nothing|heartbeat|lease",
    ),
    ("told by the peer", "gave up|refused|does not expect"),
)


def kind_of(error: str) -> str:
    """A short category for an error's text."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, error)), "other: " + error[:60])


@dataclass(slots=True, kw_only=True)
class Result:
    transport: str
    seed: int
    transfers: int = 0
    seconds: float = 0.0
    kills: int = 0
    cuts: int = 0  # of the network of a process
    quarantined: int = 0
    rests: int = 0  # how often all processes were checked at rest
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # (fault, how the transfer ended)
    late_s: list[float] = field(default_factory=list)  # from a failed side's deadline until its memory was free
    latest: list[tuple[float, str]] = field(default_factory=list)  # the five longest, with the process
    stats: dict[str, dict[str, int]] = field(default_factory=dict)  # of each process, since it was last started
    wrong: list[str] = field(default_factory=list)
    most: dict[str, tuple[int, int]] = field(default_factory=dict)  # descriptors and threads at the first rest

    def take(self, case: Case, sent: str, received: str, why: str, took_s: float) -> None:
        """Counts a transfer that has ended on both sides."""
        self.transfers += 1
        number, label = case.number, case.label
        if sent == "sent" and received not in ("verified", "process died"):
            self.wrong.append(f"transfer {number} ({label}) was acknowledged and {received}")
        if received == "verified" and case.fault in NEVER_VERIFIED:
            self.wrong.append(f"transfer {number} ({label}) was committed")
        if why.startswith("other"):
            self.wrong.append(f"transfer {number} ({label}) failed for a reason that is not known: {why}")
        end = "committed" if received == "verified" else why or received
        self.ends[label, end] += 1

    def freed(self, late_s: float, who: str) -> None:
        """Records when one side of a failed transfer freed its memory."""
        self.late_s.append(late_s)
        self.latest = sorted([*self.latest, (late_s, who)], reverse=True)[:5]

    def at_rest(self, name: str, stats: dict[str, int], facts: tuple[int, int]) -> None:
        self.stats[name] = stats
        descriptors, threads = facts
        before = self.most.setdefault(name, facts)
        if descriptors > before[0] + 40 or threads > before[1] + 40:
            self.wrong.append(f"{name} has {descriptors} descriptors and {threads} threads, at first {before}")

    def lateness(self) -> tuple[float, float, float, float]:
        values = sorted(self.late_s) or [0.0]
        return tuple(values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99, 0.999, 1.0))  # type: ignore[return-value]


def table(results: Sequence[Result]) -> list[str]:
    """Rows are faults, columns are outcomes; all transports together."""
    ends: Counter[tuple[str, str]] = Counter()
    for one in results:
        ends.update(one.ends)
    outcomes = ["committed", *sorted({end for _, end in ends} - {"committed"})]
    lines = [table_head(["fault", "transfers", *outcomes])]
    for label in [NO_FAULT, *sorted({label for label, _ in ends} - {NO_FAULT})]:
        counts = [ends[label, outcome] for outcome in outcomes]
        lines.append(table_row([label, sum(counts), *(count or "" for count in counts)]))
    return lines


def verdict(result: Result) -> list[str]:
    p50, p99, p999, most = result.lateness()
    rate = result.transfers / max(result.seconds, 1e-9)
    stats = ", ".join(
        f"{sum(one[name] for one in result.stats.values())} {name.replace('_', ' ')}" for name in _COUNTED
    )
    return [
        f"{result.transport}, seed {result.seed}: {result.transfers} transfers in {result.seconds:.0f} s "
        f"({rate:.0f}/s), {result.kills} processes killed, {result.cuts} cables pulled, "
        f"{result.quarantined} quarantined",
        f"  at rest, {result.rests} times: {len(result.wrong)} wrong bytes, leaks or hangs",
        f"  {len(result.late_s)} failed sides freed after their deadline by: p50 {p50 * 1e3:.0f} ms, "
        f"p99 {p99 * 1e3:.0f} ms, p99.9 {p999 * 1e3:.0f} ms, max {most * 1e3:.0f} ms",
        *(f"    {late_s:.3f} s: {who}" for late_s, who in result.latest),
        f"  {stats}",
        *(f"  WRONG: {one}" for one in result.wrong[:40]),
    ]


def print_result(result: Result) -> None:
    for line in [*verdict(result), "", *table([result]), ""]:
        print(line)


def misses(results: Iterable[Result], most_s: float = LATEST_S) -> list[str]:
    """Why the storm fails, a line for each bar that was missed."""
    found = []
    for one in results:
        latest_s = one.lateness()[-1]
        if one.wrong:
            found.append(f"{one.transport}: {len(one.wrong)} wrong bytes, leaks or hangs")
        if latest_s > most_s:
            found.append(
                f"{one.transport}: memory was freed {latest_s:.3f} s after a deadline, the limit is {most_s:g} s; "
                "a machine with fewer cores than busy processes may miss it"
            )
    return found
