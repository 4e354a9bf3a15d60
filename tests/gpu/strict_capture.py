"""Graph capture on a fake device, stricter than CUDA's own: each forbidden operation raises an error at once.

    with strict_capture() as cuda: GraphReplays(...)

Within `torch.cuda.graph`, code must not compile a kernel (each must have been launched before), read a value on the
host, copy between host and device, allocate pinned memory, or wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter, jit

from tests.gpu.compile_budget import cache_key
from tests.gpu.fake_cuda import FakeCuda, fake_cuda

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal)
_COPIES = (_aten._to_copy, _aten.copy_)
_ALLOCATIONS = (_aten.empty, _aten.empty_strided, _aten.detach)


class ForbiddenInCapture(RuntimeError):
    pass


@dataclass
class Captures:
    """`num_graphs` that were captured, and the kernels that were launched before or between them."""

    cuda: FakeCuda
    num_graphs: int = 0
    is_on: bool = False
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    launched: list[str] = field(default_factory=list)  # kernels and computing operators that the captures launched

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = cache_key(kernel, args, kwargs)
        if self.is_on and key not in self.keys:
            raise ForbiddenInCapture(f"{key[0]} is compiled in a capture")
        self.keys.add(key)
        if self.is_on:
            self.launched.append(key[0])

    def wait(self, *_: Any) -> None:
        if self.is_on:
            raise ForbiddenInCapture("the host waits in a capture")

    @contextmanager
    def capture(self, graph: Any, **_: Any) -> Iterator[None]:
        assert not self.is_on
        self.is_on = True
        try:
            with OperatorRules(self.launched), HostRules():
                yield
        finally:
            self.is_on = False
        self.num_graphs += 1


class OperatorRules(TorchDispatchMode):
    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _READS:
            raise ForbiddenInCapture(f"{func} makes the host wait for a number")
        if func.overloadpacket in _COPIES:
            devices = {one.device.type for one in args if isinstance(one, Tensor)}
            devices.add(torch.device(kwargs.get("device") or args[0].device).type)
            if len(devices) > 1:
                raise ForbiddenInCapture(f"{func} copies between host and device")
        if func.namespace == "aten" and not func.is_view and func.overloadpacket not in _ALLOCATIONS:
            self._launched.append(str(func.overloadpacket))
        return func(*args, **kwargs)


class HostRules(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory") or func is Tensor.pin_memory:
            raise ForbiddenInCapture("pinned memory is taken in a capture")
        if func in (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy):
            raise ForbiddenInCapture(f"{func.__name__} reads from the device in a capture")
        return func(*args, **kwargs)


@contextmanager
def strict_capture(num_devices: int = 1) -> Iterator[Captures]:
    with fake_cuda(num_devices) as cuda, ExitStack() as stack:
        captures = Captures(cuda)
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=captures.wait)
        event = SimpleNamespace(record=lambda *args: None, synchronize=captures.wait)
        stands_in = {
            "graph_pool_handle": lambda: (0, 0),
            "Stream": lambda *args, **kwargs: stream,
            "Event": lambda *args, **kwargs: event,
            "current_stream": lambda *args: stream,
            "stream": lambda stream: nullcontext(),
            "synchronize": captures.wait,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": captures.capture,
        }
        for name, call in stands_in.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, call))
        for kernels in (jit.JITFunction, interpreter.InterpretedFunction):

            def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
                cuda.launch(self, *args, grid=grid, warmup=warmup, **kwargs)
                captures.launch(self, args, kwargs)

            stack.enter_context(mock.patch.object(kernels, "run", run))
        yield captures
