"""Repeats recorded kernel calls by one native call, as a CUDA graph does.

A step of one row calls a hundred kernels that each take some microseconds; as many pass in Python between two of them.
A program stores the numbers of all calls in one array. All threads walk through it in one parallel region, with a
barrier before and after each call that several threads share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pdserve.engine.kernels import openmp
from pdserve.engine.kernels.task import FIRST, INT64, KernelCall, TaskKernel, pointer, take

_WIDTH: Final = 32  # numbers of a call: whole cache lines, because threads count in them
_ADDRESS, _LEAST, _IS_SHARED = _WIDTH - 3, _WIDTH - 2, _WIDTH - 1


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """Machine code, and the address of the numbers that it is called with, by one thread or by all."""

    address: int
    task: int
    is_shared: bool


@final
class KernelProgram:
    def __init__(self, calls: Sequence[KernelCall], inputs: Sequence[int]) -> None:
        """`inputs` are the addresses that differ from run to run. The calls that have the last one also differ in their
        number of items and work."""
        self._records = records = np.zeros((len(calls), _WIDTH), np.int64)
        for record, call in zip(records, calls, strict=True):
            assert FIRST + len(call.numbers) <= _ADDRESS
            record[2] = call.num_items
            record[FIRST : FIRST + len(call.numbers)] = call.numbers
            record[_ADDRESS], record[_LEAST], record[_IS_SHARED] = call.address, call.least, call.work >= call.least
        self._flat, self._at = records.reshape(-1), records.ctypes.data
        is_input = self._flat[:, None] == np.array(inputs)
        self._places, self._input_of = is_input.nonzero()
        self._varying = self._places[self._input_of == len(inputs) - 1] // _WIDTH

    def run(self, inputs: Sequence[int], num_items: int, work: int) -> None:
        records, calls = self._records, self._varying
        self._flat[self._places] = np.array(inputs)[self._input_of]
        records[:, :2] = 0
        records[calls, 2] = num_items
        records[calls, _IS_SHARED] = work >= records[calls, _LEAST]
        _walk()(len(records), 1, self._at, openmp.barrier())

    def calls(self) -> list[ProgramCall]:
        """The calls of the last run, ready to be repeated one by one, for benchmarks."""
        self._records[:, :2] = 0
        return [
            ProgramCall(int(record[_ADDRESS]), record.ctypes.data, bool(record[_IS_SHARED])) for record in self._records
        ]


@intrinsic
def _call(_context: Any, address: Any, task: Any) -> Any:
    """Calls the C function at `address` with the address of its task."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        of = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], of.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@cache
def _walk() -> TaskKernel:
    """walk(num_records, work, records, barrier): addresses; a barrier of 0 if there is one thread."""

    def walk(task: Any) -> None:
        thread, num_records, first, barrier = take(task, 1), task[2], task[3], task[4]
        was_shared = np.int64(0)
        for index in range(num_records):
            at = first + 8 * _WIDTH * index
            record = carray(pointer(at, INT64), (_WIDTH,))
            is_shared = record[_IS_SHARED]
            if barrier != 0 and index > 0 and is_shared + was_shared != 0:
                _call(barrier, 0)  # takes no argument, so this one is ignored
            if is_shared != 0 or thread == 0:
                _call(record[_ADDRESS], at)
            was_shared = is_shared

    return TaskKernel(walk, "walk", least=0)
