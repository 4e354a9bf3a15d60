"""Graph capture on a fake device, stricter than CUDA's own: each forbidden operation raises an error at once.

    with strict_capture() as cuda: GraphReplays(...)

Within `torch.cuda.graph`, code must not compile a kernel (each must have been launched before), read a value on the
host, copy between host and device, allocate pinned memory, make a stream, ask for an event or for free memory, or wait.
A capture needs a graph that was not captured before and a stream that is not the default one. All captures into one
pool use the same stream. A graph is replayed outside captures, once it was captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
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


class Stream:
    def __init__(self, captures: Captures, device: Any = None, priority: int = 0) -> None:
        captures.forbid("a stream is made in a capture")
        self._captures = captures

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        self._captures.wait()


class Event:
    def __init__(self, captures: Captures, enable_timing: bool = False) -> None:
        self._captures, self._is_recorded = captures, False

    def record(self, stream: Stream | None = None) -> None:
        self._is_recorded = True

    def query(self) -> bool:
        self._captures.forbid("the host asks for an event in a capture")
        return True

    def synchronize(self) -> None:
        assert self._is_recorded
        self._captures.wait()


class Graph:
    def __init__(self, captures: Captures, keep_graph: bool = False) -> None:
        self._captures, self.is_captured = captures, False

    def replay(self) -> None:
        self._captures.forbid("a graph is replayed in a capture")
        assert self.is_captured, "called CUDAGraph::replay without a preceding successful capture"


@dataclass
class Captures:
    """`num_graphs` that were captured, and the kernels that were launched before or between them."""

    cuda: FakeCuda
    num_graphs: int = 0
    is_on: bool = False
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    launched: list[str] = field(default_factory=list)  # kernels and computing operators that the captures launched
    pools: dict[tuple[int, int], Stream | None] = field(default_factory=dict)  # handle -> the stream of its captures

    def __post_init__(self) -> None:
        self.default = self.current = Stream(self)

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = cache_key(kernel, args, kwargs)
        if self.is_on and key not in self.keys:
            raise ForbiddenInCapture(f"{key[0]} is compiled in a capture")
        self.keys.add(key)
        if self.is_on:
            self.launched.append(key[0])

    def forbid(self, what: str) -> None:
        if self.is_on:
            raise ForbiddenInCapture(what)

    def wait(self, *_: Any) -> None:
        self.forbid("the host waits in a capture")

    def new_pool(self) -> tuple[int, int]:
        handle = (0, len(self.pools) + 1)
        self.pools[handle] = None
        return handle

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(
        self,
        cuda_graph: Graph,
        pool: tuple[int, int] | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        self.wait()  # torch synchronises first
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        assert not cuda_graph.is_captured, "This CUDAGraph instance already owns a captured graph"
        stream = stream or Stream(self)
        assert stream is not self.default, "CUDA graphs must be captured on a non-default stream"
        if pool is not None:
            assert self.pools[pool] in (None, stream), "the captures of a pool use different streams"
            self.pools[pool] = stream
        self.is_on = True
        try:
            with OperatorRules(self.launched), HostRules(), self.on(stream):
                yield
        finally:
            self.is_on = False
        cuda_graph.is_captured = True
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
        memory = torch.cuda.mem_get_info

        def ask_memory(device: Any = None) -> tuple[int, int]:
            captures.forbid("the host asks for free memory in a capture")
            return memory(device)

        stands_in = {
            "graph_pool_handle": captures.new_pool,
            "Stream": partial(Stream, captures),
            "Event": partial(Event, captures),
            "current_stream": lambda device=None: captures.current,
            "stream": captures.on,
            "synchronize": captures.wait,
            "empty_cache": lambda: captures.forbid("cached memory is freed in a capture"),
            "mem_get_info": ask_memory,
            "CUDAGraph": partial(Graph, captures),
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
