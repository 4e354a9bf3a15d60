"""Triton's interpreter with checks that a device makes late or never.

    with strict_interpreter(seed): ...

Every unmasked load and store must be within the storage of a tensor of the launch. Unwritten memory contains NaN, or
the largest integer. Programs run in a random order, so code that depends on the order gives a wrong result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


class OutOfBounds(RuntimeError):
    pass


class Registered:
    """The storages of one launch's tensors."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def register(self, tensors: list[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._spans = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        """`pointers`: the interpreter's addresses, with the type that they point to."""
        # Some of the interpreter's masks are integers, which numpy would treat as indices.
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, last = int(addresses.min()), int(addresses.max())
        if any(begin <= first and last + size <= end for begin, end in self._spans):
            return
        is_inside = np.zeros(addresses.shape, bool)  # whether each address belongs to a tensor of the launch
        for begin, end in self._spans:
            is_inside |= (addresses >= begin) & (addresses <= end - size)
        if not is_inside.all():
            count = int((~is_inside).sum())
            raise OutOfBounds(f"a {kind} of {addresses.size} places has {count} outside the launch's tensors")


class Shuffled:
    """Assigns a random program number to the interpreter's next program."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._dims: tuple[int, ...] = ()
        self._order: list[int] = []

    def begin(self, dims: tuple[int, ...]) -> None:
        self._dims, self._order = dims, list(range(prod(dims)))
        self._rng.shuffle(self._order)

    def place(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        _, num_y, num_z = self._dims
        at = self._order[(x * num_y + y) * num_z + z]
        return at // (num_y * num_z), at // num_z % num_y, at % num_z


@contextmanager
def strict_interpreter(seed: int = 0) -> Iterator[None]:
    interpreter = import_module("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    registered, shuffled = Registered(), Shuffled(seed)
    originals = {
        name: getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "set_grid_dim", "set_grid_idx")
    }
    init_args = executor._init_args_hst

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        registered.check("load", pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        registered.check("store", pointers, mask)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        registered.check("atomic operation", pointers, mask)
        return originals["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    def set_dim(self: Any, *dims: int) -> None:
        shuffled.begin(dims)
        originals["set_grid_dim"](self, *dims)

    def set_index(self: Any, *index: int) -> None:
        originals["set_grid_idx"](self, *shuffled.place(*index))

    def to_host(self: Any, args: Any, kwargs: Any) -> Any:
        hosts, host_kwargs = init_args(self, args, kwargs)
        registered.register([one for one in (*hosts, *host_kwargs.values()) if isinstance(one, Tensor)])
        return hosts, host_kwargs

    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills the result of torch.empty
    try:
        with (
            mock.patch.multiple(
                builder,
                create_masked_load=load,
                create_masked_store=store,
                create_atomic_rmw=atomic,
                set_grid_dim=set_dim,
                set_grid_idx=set_index,
            ),
            mock.patch.object(executor, "_init_args_hst", to_host),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)
