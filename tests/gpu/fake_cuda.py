"""Fake CUDA devices: torch's fake tensors, with its own rules for shapes, strides and devices, but without memory.

    with fake_cuda(num_devices=2) as cuda: ...

A tensor's device is cuda:N, so the code runs as on a GPU. Triton kernels do not run. Each launch is recorded with the
devices of its tensors and the current device of its thread, on which Triton would launch it. torch needs a CUDA build
to index a device tensor from Python, so indexing calls the underlying operators.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter, jit

from pdserve.engine import build_engine, dummy

H200_BYTES = 141 * 10**9


class WrongDevice(RuntimeError):
    """Triton's error for a tensor on another device: a pointer argument cannot be accessed."""


@dataclass
class FakeCuda:
    """`launches`: the kernels' names. `current`: the device of each thread, 0 until it is set."""

    num_devices: int
    current: threading.local = field(default_factory=threading.local)
    launches: list[str] = field(default_factory=list)

    def set_device(self, device: Any) -> None:
        index = torch.device(device).index if not isinstance(device, int) else device
        assert index is not None
        assert 0 <= index < self.num_devices, f"there is no cuda:{index}"
        self.current.index = index

    def current_device(self) -> int:
        return int(getattr(self.current, "index", 0))

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        here = torch.device("cuda", self.current_device())
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        for place, value in enumerate((*args, *kwargs.values())):
            if isinstance(value, Tensor) and value.device != here:
                raise WrongDevice(
                    f"{name} is launched on {here}: argument {place} lies on {value.device} (cannot be accessed)"
                )
        self.launches.append(name)


class WithoutGuards(TorchFunctionMode):
    """Replaces calls that first set the current device by their underlying operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OF_HOST and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is Tensor.__getitem__:
            return index(*args)
        if func is Tensor.__setitem__:
            return put(*args)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_(*args, **kwargs)
        if func is Tensor.to and not isinstance(args[0], FakeTensor):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])  # a real tensor would become a constant
        if func is Tensor.contiguous:
            x: Tensor = args[0]
            return x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)
        if kwargs.pop("pin_memory", False):  # host memory is real, because the host writes it
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            name = _OPERATORS.get(func.__name__, func.__name__)
            operator = getattr(torch.ops.aten, name, None)
            if operator is None or not any(one in str(error) for one in _NO_CUDA):
                raise
            return operator(*args, **kwargs)


_OPERATORS = {"__invert__": "bitwise_not", "__matmul__": "matmul"}
#: What torch says without CUDA, and with CUDA but without a driver.
_NO_CUDA = ("not linked with support for cuda", "CUDA driver version is insufficient", "no CUDA-capable device")
_OF_HOST = (Tensor.__getitem__, Tensor.view, Tensor.numpy)


def index(x: Tensor, key: Any) -> Tensor:
    x, tensors = _view(x, key)
    return torch.ops.aten.index(x, tensors) if tensors else x


def put(x: Tensor, key: Any, value: Any) -> None:
    x, tensors = _view(x, key)
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    if tensors:
        torch.ops.aten.index_put_(x, tensors, value.to(x.dtype))
    else:
        torch.ops.aten.copy_(x, value)


def _view(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that the basic part of a key selects, and the tensors of its advanced part by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    given = sum(one is not None and one is not Ellipsis for one in keys)
    if any(one is Ellipsis for one in keys):
        at = next(place for place, one in enumerate(keys) if one is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.dim() - given)
    dim, tensors = 0, {}
    for one in keys:
        if one is None:
            x = torch.ops.aten.unsqueeze(x, dim)
        elif isinstance(one, slice):
            if one != slice(None):
                x = torch.ops.aten.slice(x, dim, one.start, one.stop, one.step or 1)
        elif isinstance(one, Tensor):
            tensors[dim] = one
        else:
            x = torch.ops.aten.select(x, dim, int(one))
            continue
        dim += 1
    return x, [tensors.get(at) for at in range(max(tensors) + 1)] if tensors else []


class Inline(Executor):
    """Runs each call immediately."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def one_thread(num_threads: int = 0) -> Iterator[Executor]:
    yield Inline()


@contextmanager
def fake_cuda(num_devices: int = 1) -> Iterator[FakeCuda]:
    cuda = FakeCuda(num_devices)
    facts = SimpleNamespace(multi_processor_count=132, name="stand-in")
    stands_in = {
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: facts,
        "mem_get_info": lambda device=None: (H200_BYTES, H200_BYTES),
        "set_device": cuda.set_device,
        "current_device": cuda.current_device,
    }
    with ExitStack() as stack:
        for name, call in stands_in.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, call))
        for kernels in (jit.JITFunction, interpreter.InterpretedFunction):

            def run(self: Any, *args: Any, **kwargs: Any) -> None:
                cuda.launch(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(kernels, "run", run))
        # One thread creates the weights, because a fake device exists only in its own thread.
        stack.enter_context(mock.patch.object(dummy, "_fill_chunk"))
        stack.enter_context(mock.patch.object(dummy, "load_threads", one_thread))
        stack.enter_context(mock.patch.object(build_engine, "dummy_hash", return_value="made up"))
        # Weights and pools of real sizes need no memory, because tensors of the host are fake as well.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(WithoutGuards())
        yield cuda
