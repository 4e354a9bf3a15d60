"""Lets the first call of any function of the product fail, and finds what this process has left open then."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]
#: Where an error is injected. What the tests need themselves is in none of them.
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("pdserve", "kvtransfer", "prefill_worker", "decode_worker", "router"))


class Injected(Exception):
    """No part of the product expects it."""


class Open:
    """What this process has open."""

    def __init__(self) -> None:
        self._threads, self._descriptors = set(threading.enumerate()), self._all_descriptors()

    def until_nothing_is_left(self, where: str) -> None:
        gc.collect()  # of what an error refers to
        until_s = time.monotonic() + WAIT_S
        while left := self._left():
            assert time.monotonic() < until_s, f"after an error in {where}: {left}"
            time.sleep(0.005)

    def _left(self) -> list[str]:
        threads = [one.name for one in threading.enumerate() if one not in self._threads]
        return [one for one in threads if not one.startswith("fake-")] + sorted(
            self._all_descriptors() - self._descriptors
        )

    @staticmethod
    def _all_descriptors() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                found.add(f"{name} is {os.readlink(f'/proc/self/fd/{name}')}")
            except OSError:  # that of the listing
                continue
        return found


def calls_of(act: Callable[[], Any]) -> tuple[Any, list[CodeType]]:
    """The result, and each function of PACKAGES that this thread calls meanwhile, but for those that close."""
    seen: dict[CodeType, None] = {}

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            seen.setdefault(frame.f_code)

    sys.setprofile(look)
    try:
        return act(), [code for code in seen if code.co_name != "close"]
    finally:
        sys.setprofile(None)


def fail_in(code: CodeType, act: Callable[[], Any]) -> Any:
    """The first call of the function raises Injected."""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            sys.setprofile(None)
            raise Injected

    sys.setprofile(look)
    try:
        return act()
    finally:
        sys.setprofile(None)


def name_of(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_firstlineno} {code.co_qualname}"
