"""Threads that build layers in parallel while a model is loaded.

Each computes alone, without torch's own threads. Those synchronise at every operation, which costs more than it gains
on a busy machine, and layers are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch

_MOST: Final = 8  # each holds matrices that are being converted


@contextmanager
def load_threads(num_threads: int = 0) -> Iterator[Executor]:
    """0: as many as torch uses, at most eight."""
    of_torch = torch.get_num_threads()
    count = num_threads or min(of_torch, _MOST)
    try:
        with ThreadPoolExecutor(count, "load", initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(of_torch)  # torch's number of threads is one setting for the whole process
