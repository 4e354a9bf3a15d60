"""Row 5: 24 callers send slow grammars, each a new one; meanwhile another caller sends new, quick grammars.

Before the fix, a new grammar of the other caller waited 7 to 15 s for the only checker.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import Counter
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve import Client, PdserveError, Retries
from pdserve.telemetry import metric_names

NUM_CALLERS: Final = 24
MAX_WAIT_S: Final = 3.0
PAUSE_S: Final = 0.2
JOIN_S: Final = 60.0


def attack(target: AttackTarget) -> AttackResult:
    before = target.metric("router", metric_names.REQUEST_ERRORS.name)
    errors: Counter[str] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()
    numbers = itertools.count()

    def slow() -> None:
        with Client(target.router, token=target.token, retries=Retries(limit=0)) as client:
            while not is_over.is_set():
                said = "served"
                try:
                    client.generate(
                        "x", max_tokens=1, json_schema={"type": "integer", "multipleOf": 999_983 + 2 * next(numbers)}
                    )
                except PdserveError as error:
                    said = error.reason
                with lock:
                    errors[said] += 1

    with Client(target.router, token=target.token) as client:
        client.generate("x", max_tokens=1, regex="[a-z]{1,2}")  # starts the first process that checks
    callers = [threading.Thread(target=slow, daemon=True) for _ in range(NUM_CALLERS)]
    for caller in callers:
        caller.start()
    took_s: list[float] = []
    failures: list[str] = []
    ends_s = time.monotonic() + target.seconds
    with Client(target.router, token=target.token, retries=Retries(limit=0)) as client:
        while time.monotonic() < ends_s:
            time.sleep(PAUSE_S)
            began_s = time.monotonic()
            try:
                client.generate("x", max_tokens=1, regex=f"[a-z]{{1,{3 + len(took_s) + len(failures)}}}")
            except PdserveError as error:
                failures.append(error.reason)
            took_s.append(time.monotonic() - began_s)
    is_over.set()
    for caller in callers:
        caller.join(JOIN_S)
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name) - before
    rejected = errors["INVALID_REQUEST"] + errors["OVERLOADED"]
    complaints = []
    if rejected + errors["served"] != errors.total():  # some numbers make a quick schema
        complaints.append(f"{errors.total() - rejected - errors['served']} slow grammars had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    if failures:
        complaints.append(f"{len(failures)} quick grammars of another caller failed, the first with {failures[0]}")
    if max(took_s) > MAX_WAIT_S:
        complaints.append(f"a quick grammar of another caller took {max(took_s):.1f} s, over {MAX_WAIT_S:g} s")
    return AttackResult(
        attempts=errors.total(),
        rejected=rejected,
        counted=counted,
        errors=errors,
        note=(
            f"{len(took_s)} new quick grammars of another took {statistics.median(took_s) * 1e3:.0f} ms in the median, "
            f"{max(took_s) * 1e3:.0f} ms at most"
        ),
        complaints=tuple(complaints),
    )


ROW = AttackRow(number=5, name="slow grammars of 24 callers", attack=attack, needs="token")
