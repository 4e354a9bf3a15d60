"""Threads that build layers side by side while a model is loaded.

Each computes alone, without torch's own threads: those wait for one another at every step, which on a machine that
others use as well costs more than it gains, and layers are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch

_MOST: Final = 8  # each holds matrices on their way to their final form


@contextmanager
def load_threads(num_threads: int = 0) -> Iterator[Executor]:
    """0: as many as torch computes with, at most eight."""
    of_torch = torch.get_num_threads()
    count = num_threads or min(of_torch, _MOST)
    try:
        with ThreadPoolExecutor(count, "load", initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(of_torch)  # for the threads of torch this is one setting in all of the process
