"""Requests of a legitimate caller during an attack. Each answer must equal the answer without an attack."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

from pdserve import Client, Retries

OPTIONS: Final[dict[str, Any]] = {"max_tokens": 12, "ignore_eos": True}
PAUSE_S: Final = 0.05
JOIN_S: Final = 120.0
PROMPTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("def fib(n):", {"temperature": 0.0}),
    ("import json\n\n\nclass Encoder(" * 6, {"temperature": 0.8, "seed": 7}),
    ("# Return the sum of two numbers\n", {"temperature": 0.0}),
    ('"""A queue.\n\n' * 20, {"temperature": 0.7, "top_p": 0.9, "seed": 3}),
)


@final
@dataclass(slots=True)
class CallTally:
    exact: int = 0
    wrong: int = 0
    failed: int = 0
    took_s: list[float] = field(default_factory=list)
    first_failure: str = ""


@final
class LegitimateTraffic:
    """Sends one request after another from `start` until the block is left; `tally` says how they ended."""

    def __init__(self, target: str, token: str, expected: list[tuple[int, ...]], ca: str | None = None) -> None:
        self._client = Client(target, token=token, tls=ca, retries=Retries(limit=0))
        self._expected = expected
        self._stop = threading.Event()
        self._has_ended_one = threading.Event()
        self._thread = threading.Thread(target=self._run, name="legitimate", daemon=True)
        self.tally = CallTally()

    def __enter__(self) -> Self:
        self._thread.start()
        # The caller has its connection before the attack begins.
        self._has_ended_one.wait(JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        self._client.close()

    def _run(self) -> None:
        for number in itertools.cycle(range(len(PROMPTS))):
            if self._stop.wait(PAUSE_S):
                return
            began_s = time.monotonic()
            try:
                tokens = answer(self._client, number)
            except Exception as error:  # the tally reports it, whatever it is
                self.tally.failed += 1
                self.tally.first_failure = self.tally.first_failure or f"{type(error).__name__}: {error}"
                continue
            finally:
                self._has_ended_one.set()
            self.tally.took_s.append(time.monotonic() - began_s)
            if tokens == self._expected[number]:
                self.tally.exact += 1
            else:
                self.tally.wrong += 1


def answer(client: Client, number: int) -> tuple[int, ...]:
    prompt, options = PROMPTS[number]
    return tuple(client.generate(prompt, **OPTIONS, **options).token_ids)


def answers_in_peace(target: str, token: str, ca: str | None = None) -> list[tuple[int, ...]]:
    with Client(target, token=token, tls=ca) as client:
        return [answer(client, number) for number in range(len(PROMPTS))]
