"""Counts what Triton would compile, without compiling or running it.

    with count_compiled() as compiled: ...; compiled.variants()

Tensors are on the CPU and uninitialised. A kernel's cache key follows Triton's own rules. A tensor's address is its
offset in its storage, because torch's storages on a GPU begin at multiples of 512 bytes.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter, jit


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor: its dtype and its address. Storages begin at multiples of 512, as torch's do."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@cache
def _target() -> Any:
    return make_backend(GPUTarget("cuda", 90, 32))


def cache_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Triton compiles again if this changes: the arguments' types and alignments, whether they are 1 or multiples of
    16, the values of constants, and options."""
    options = kernel.kwargs if isinstance(kernel, interpreter.InterpretedFunction) else vars(kernel)
    plain = options.get("do_not_specialize") or ()
    unaligned = options.get("do_not_specialize_on_alignment") or ()
    signature = inspect.signature(kernel.fn)
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
    key: list[Any] = [kernel.fn.__qualname__]
    for name, parameter in signature.parameters.items():
        value = bound.arguments[name]
        if "constexpr" in str(parameter.annotation):
            key.append((name, value))
            continue
        if isinstance(value, Tensor):
            value = Pointer(value.dtype, 512 + value.storage_offset() * value.dtype.itemsize)
        key.append((name, native_specialize_impl(_target(), value, False, name not in plain, name not in unaligned)))
    return (*key, *sorted((name, value) for name, value in kwargs.items() if name not in signature.parameters))


@dataclass
class Compiled:
    """`keys`: what Triton would have compiled so far, in order."""

    keys: dict[tuple[Any, ...], None] = field(default_factory=dict)

    def variants(self) -> dict[str, int]:
        """The number of compiled variants of each kernel."""
        return dict(Counter(name for name, *_ in self.keys))


@contextmanager
def count_compiled() -> Iterator[Compiled]:
    compiled = Compiled()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.keys[cache_key(self, args, kwargs)] = None

    with mock.patch.object(jit.JITFunction, "run", run), mock.patch.object(interpreter.InterpretedFunction, "run", run):
        yield compiled
