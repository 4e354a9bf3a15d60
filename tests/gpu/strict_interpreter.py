"""Triton's interpreter with checks that a device makes late or never.

    with strict_interpreter(seed): ...

Every unmasked load and store must be within the storage of a tensor of the launch. Unwritten memory contains NaN, or
the largest integer. Programs run in a random order, so code that depends on the order gives a wrong result.

The interpreter runs one program after the other, and each one as a single thread. A device runs them at the same time,
with many threads each. So a race is an error here: a program accesses what another one writes, without atomic
operations in between that release and acquire it; or it loads what it has stored itself, without a barrier, because
another of its threads may have stored it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

MOST_PROGRAMS: Final = (2**31 - 1, 65_535, 65_535)  # of a launch on CUDA, by axis


class OutOfBounds(RuntimeError):
    pass


def check_grid(grid: Sequence[int]) -> None:
    """A device rejects larger launches, which a compiler and an interpreter accept."""
    if any(count > most for count, most in zip(grid, MOST_PROGRAMS, strict=False)):
        raise OutOfBounds(f"a launch of {tuple(grid)} programs, at most {MOST_PROGRAMS}")


class Registered:
    """The storages of one launch's tensors."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def register(self, tensors: list[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._spans = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        """`pointers`: the interpreter's addresses, with the type that they point to."""
        assert mask.data.dtype == bool, f"a {kind} has a mask of {mask.data.dtype}"  # numpy would take it for indices
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
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


class Race(RuntimeError):
    pass


class Accesses:
    """Which program has written and read each element of one launch, by the address of its first byte."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # begin, end: writer, its epoch, reader
        self._me = 0  # number of the running program, from 1
        self._epoch = 0  # grows with every program and every barrier
        self._stored_in = -1  # epoch of the program's last store
        self._released: set[int] = set()  # programs whose stores are visible after an acquire
        self._seen: set[int] = set()  # those that the running program has acquired
        self._changed: dict[tuple[int, int], set[int]] = {}  # programs that changed an element by atomic operations

    def begin(self, tensors: list[Tensor]) -> None:
        storages = {
            (one.data_ptr(), one.data_ptr() + one.nbytes()) for one in (each.untyped_storage() for each in tensors)
        }
        self._spans = {span: tuple(np.zeros(span[1] - span[0], np.int32) for _ in range(3)) for span in storages}  # type: ignore[misc]
        self._released = set()
        self._changed = {}

    def enter(self, program: int) -> None:
        self._me, self._seen, self._stored_in = program + 1, set(), -1
        self._epoch += 1

    def barrier(self) -> None:
        self._epoch += 1

    def load(self, pointers: Any, mask: Any) -> None:
        for writer, epoch, reader, at in self._at(pointers, mask):
            self._check("loads", "stored", writer[at], self._changers(writer, at))
            if ((writer[at] == self._me) & (epoch[at] == self._epoch)).any():
                raise Race("a program loads what it has stored, without a barrier")
            reader[at] = np.where((reader[at] == 0) | (reader[at] == self._me), self._me, _MANY)

    def store(self, pointers: Any, mask: Any) -> None:
        for writer, epoch, reader, at in self._at(pointers, mask):
            self._check("stores", "stored", writer[at], self._changers(writer, at))
            self._check("stores", "loaded", reader[at])
            writer[at], epoch[at] = self._me, self._epoch
            self._stored_in = self._epoch

    def atomic(self, pointers: Any, mask: Any, semantic: str) -> None:
        for writer, _, reader, at in self._at(pointers, mask):
            self._check("changes", "stored", writer[at])
            self._check("changes", "loaded", reader[at])
            for one in at.tolist():
                if writer[one] != _ATOMIC:
                    self._changed[id(writer), one] = set()
                self._changed[id(writer), one].add(self._me)
            writer[at] = _ATOMIC
        if "release" in semantic:
            if self._stored_in == self._epoch:
                raise Race("an atomic operation releases stores without a barrier after them")
            self._released.add(self._me)
        if "acq" in semantic:
            self._seen = set(self._released)

    def _changers(self, writer: Any, at: Any) -> set[int]:
        """The programs whose atomic operations an access without one must come after: the last one to change a
        counter may reset it, if it has acquired what all others have released."""
        changed = at[writer[at] == _ATOMIC].tolist()
        return set().union(*(self._changed[id(writer), one] for one in changed))

    def _check(self, does: str, did: str, programs: Any, changers: Set[int] = frozenset()) -> None:
        others = (set(np.unique(programs).tolist()) | changers) - {0, self._me, _ATOMIC} - self._seen
        if others:
            raise Race(f"a program {does} what another one has {did} ({len(others)} of them)")

    def _at(self, pointers: Any, mask: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        for (begin, end), (writer, epoch, reader) in self._spans.items():
            inside = addresses[(addresses >= begin) & (addresses < end)]
            if inside.size:
                yield writer, epoch, reader, (inside - np.uint64(begin)).astype(np.int64)


_MANY, _ATOMIC = -1, -2


class Shuffled:
    """Assigns a random program number to the interpreter's next program."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._dims: tuple[int, ...] = ()
        self._order: list[int] = []

    def begin(self, dims: tuple[int, ...]) -> None:
        self._dims, self._order = dims, list(range(prod(dims)))
        self._rng.shuffle(self._order)

    def number(self, x: int, y: int, z: int) -> int:
        _, num_y, num_z = self._dims
        return (x * num_y + y) * num_z + z

    def place(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        _, num_y, num_z = self._dims
        at = self._order[self.number(x, y, z)]
        return at // (num_y * num_z), at // num_z % num_y, at % num_z


@contextmanager
def strict_interpreter(seed: int = 0) -> Iterator[None]:
    interpreter = import_module("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    registered, shuffled, accesses = Registered(), Shuffled(seed), Accesses()
    originals = {
        name: getattr(builder, name)
        for name in (
            "create_masked_load",
            "create_masked_store",
            "create_atomic_rmw",
            "create_barrier",
            "set_grid_dim",
            "set_grid_idx",
        )
    }
    init_args = executor._init_args_hst

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        registered.check("load", pointers, mask)
        accesses.load(pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        registered.check("store", pointers, mask)
        accesses.store(pointers, mask)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, semantic: Any, *rest: Any) -> Any:
        registered.check("atomic operation", pointers, mask)
        accesses.atomic(pointers, mask, str(semantic).lower())
        return originals["create_atomic_rmw"](self, operation, pointers, value, mask, semantic, *rest)

    def barrier(self: Any, *rest: Any) -> Any:
        accesses.barrier()
        return originals["create_barrier"](self, *rest)

    def set_dim(self: Any, *dims: int) -> None:
        check_grid(dims)
        shuffled.begin(dims)
        originals["set_grid_dim"](self, *dims)

    def set_index(self: Any, *index: int) -> None:
        place = shuffled.place(*index)
        accesses.enter(shuffled.number(*place))
        originals["set_grid_idx"](self, *place)

    def to_host(self: Any, args: Any, kwargs: Any) -> Any:
        hosts, host_kwargs = init_args(self, args, kwargs)
        tensors = [one for one in (*hosts, *host_kwargs.values()) if isinstance(one, Tensor)]
        registered.register(tensors)
        accesses.begin(tensors)
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
                create_barrier=barrier,
                set_grid_dim=set_dim,
                set_grid_idx=set_index,
            ),
            mock.patch.object(executor, "_init_args_hst", to_host),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)
