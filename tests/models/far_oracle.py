"""The oracle in a process of its own: vLLM changes classes of transformers in the process that imports it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final, final

from torch import Tensor

from tests.oracle import Oracle

#: As in tests/oracle.py, where float32 errs by up to 7e-6. By vLLM's fused experts, one gap of 3.2e-5 was decided
#: otherwise, in 1,560 tokens of granite-moe-shared.
TIE: Final = 5e-5


@final
class FarOracle:
    def __init__(self, folder: Path, make: Callable[[Path], Oracle] = Oracle) -> None:
        self._folder, self._make = folder, make

    def assert_exact(self, *args: Any, **named: Any) -> None:
        self._call("assert_exact", args, {"tie": TIE} | named)

    def assert_logprobs(self, *args: Any, **named: Any) -> None:
        self._call("assert_logprobs", args, named)

    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        found: Tensor = self._call("logits", (tokens, first), {})
        return found

    def _call(self, name: str, args: Any, named: Any) -> Any:
        return _process().submit(_judge, self._make, self._folder, name, args, named).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@cache
def _oracle_of(make: Callable[[Path], Oracle], folder: Path) -> Oracle:
    """In the other process."""
    return make(folder)


def _judge(make: Callable[[Path], Oracle], folder: Path, name: str, args: Any, named: Any) -> Any:
    result = getattr(_oracle_of(make, folder), name)(*args, **named)
    return result if name == "logits" else None
