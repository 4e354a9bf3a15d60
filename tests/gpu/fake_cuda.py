"""Fake CUDA devices: torch's fake tensors, with its own rules for shapes, strides and devices, but without memory.

    with fake_cuda(num_devices=2) as cuda: ...

A tensor's device is cuda:N, so the code runs as on a GPU. Triton kernels do not run. Each launch is recorded with the
devices of its tensors and the current device of its thread, on which Triton would launch it. torch needs a CUDA build
to index a device tensor from Python, so indexing calls the underlying operators. Host memory is real. It is pinned by
torch's rules, and a copy that does not block needs pinned memory: from other memory CUDA copies too, but waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter, jit

from pdserve.engine.gpu.resample import Bans
from pdserve.engine.load import build_engine, weights

H200_BYTES = 141 * 10**9


class WrongDevice(RuntimeError):
    """Triton's error for a tensor on another device: a pointer argument cannot be accessed."""


@dataclass
class FakeCuda:
    """`launches`: the kernels' names. `current`: the device of each thread, 0 until it is set."""

    num_devices: int
    current: threading.local = field(default_factory=threading.local)
    launches: list[str] = field(default_factory=list)
    sync_debug_mode: str = "default"
    on_copy: Callable[[Tensor], object] = lambda source: None  # called with the source of each copy to a device

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_debug_mode = mode

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


class Waits(RuntimeError):
    """torch's error under `set_sync_debug_mode("error")`: called a synchronizing CUDA operation."""


class FlashRules(TorchDispatchMode):
    """What flash attention checks on a device (mha_varlen_fwd in flash_api.cpp), and a fake tensor does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._flash_attention_forward.default:
            check_flash(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_flash(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    query_B1: Tensor,
    key_B1: Tensor,
    most_tokens: int,
    most_positions: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    **options: Any,
) -> None:
    num_heads, head_dim = q_THD.shape[1:]
    for rule, holds in {
        "only support fp16 and bf16 data type": q_THD.dtype in (torch.float16, torch.bfloat16),
        "query, key and value must have the same dtype": q_THD.dtype == k_SKD.dtype == v_SKD.dtype,
        "contiguous last dimension": q_THD.stride(-1) == k_SKD.stride(-1) == v_SKD.stride(-1) == 1,
        "cu_seqlens must have dtype int32": query_B1.dtype == key_B1.dtype == torch.int32,
        "cu_seqlens must be contiguous": query_B1.is_contiguous() and key_B1.is_contiguous(),
        "batch size must be positive": len(query_B1) == len(key_B1) > 1,
        "head dimension at most 256": head_dim <= 256,
        "head_size must be a multiple of 8": head_dim % 8 == 0,
        "Number of heads in key/value must divide number of heads in query": num_heads % k_SKD.shape[1] == 0,
        "key and value have shape [total_k, heads, head_size]": k_SKD.shape == v_SKD.shape
        and k_SKD.shape[2] == head_dim,
        "numbers of the host": type(most_tokens) is type(most_positions) is int,
    }.items():
        if not holds:
            raise RuntimeError(f"FlashAttention: {rule}")


class Pinned:
    """The storages in pinned memory."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # a weak reference keeps the key from being another storage's

    def add(self, tensor: Tensor) -> Tensor:
        weak = StorageWeakRef(tensor.untyped_storage())
        self._storages[weak.cdata] = weak
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


class WithoutGuards(TorchFunctionMode):
    """Replaces calls that first set the current device by their underlying operators."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda, self._pinned = cuda, Pinned()

    def _pin(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            raise RuntimeError(f"cannot pin a tensor on {x.device}: only dense CPU tensors can be pinned")
        with unset_fake_temporarily():
            return self._pinned.add(torch.empty(x.shape, dtype=x.dtype) if isinstance(x, FakeTensor) else x.clone())

    def _check_copy(self, target: Tensor, source: Tensor, *, is_queued: bool) -> None:
        """Raises Waits if the copy is queued but its host memory is not pinned, or if it may not wait but does."""
        if target.device.type == source.device.type:
            return
        host = source if source.device.type == "cpu" else target
        if host is source:
            self._cuda.on_copy(source)
        if is_queued and host.numel() and host not in self._pinned:
            raise Waits("a copy from or to memory that is not pinned waits, although it is non_blocking")
        if not is_queued and self._cuda.sync_debug_mode == "error":
            raise Waits("called a synchronizing CUDA operation: a copy between host and device")

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
            is_queued = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            self._check_copy(args[0], args[1], is_queued=is_queued)
            torch.ops.aten.copy_(*args, **kwargs)
            return args[0]
        if func is Tensor.cpu:
            self._check_copy(torch.empty(0), args[0], is_queued=False)
        if func is Tensor.to:
            device, _, is_queued, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if device is not None:
                self._check_copy(torch.empty(0, device=device), args[0], is_queued=is_queued)
            if not isinstance(args[0], FakeTensor):
                if device is None or device.type == "cpu":
                    with unset_fake_temporarily():
                        return func(*args, **kwargs)
                args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])  # else it would become a constant
        if func is Tensor.contiguous:
            x: Tensor = args[0]
            return x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)
        if kwargs.pop("pin_memory", False):
            check_pinnable(func, args, kwargs)
            with unset_fake_temporarily():  # host memory is real, because the host writes it
                return self._pinned.add(func(*args, **kwargs))
        if func is Tensor.pin_memory:
            return self._pin(args[0])
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            name = _OPERATORS.get(func.__name__, func.__name__)
            operator = getattr(torch.ops.aten, name, None)
            if operator is None or not any(one in str(error) for one in _NO_CUDA):
                raise
            return operator(*args, **kwargs)


def check_pinnable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch's rules for `pin_memory=True`."""
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        raise RuntimeError("Only dense CPU tensors can be pinned")
    if func is not torch.tensor:
        return
    data = args[0] if args else kwargs["data"]
    kinds = {
        "a variable": isinstance(data, Tensor),
        "__cuda_array_interface__": hasattr(data, "__cuda_array_interface__"),
        "numpy": isinstance(data, np.ndarray),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise RuntimeError(f"Can't pin tensor constructed from {kind}")


_OPERATORS = {"__invert__": "bitwise_not", "__matmul__": "matmul"}
#: What torch says without CUDA, and with CUDA but without a driver.
_NO_CUDA = ("not linked with support for cuda", "CUDA driver version is insufficient", "no CUDA-capable device")
_OF_HOST = (Tensor.__getitem__, Tensor.view, Tensor.numpy, Tensor.tolist)


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


def with_numbers(call: Any) -> Any:
    def act(*args: Any) -> Any:
        with unset_fake_temporarily():
            return call(*args)

    return act


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
        "set_sync_debug_mode": cuda.set_sync_debug_mode,
    }
    with ExitStack() as stack:
        for name, call in stands_in.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, call))
        for kernels in (jit.JITFunction, interpreter.InterpretedFunction):

            def run(self: Any, *args: Any, **kwargs: Any) -> None:
                cuda.launch(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(kernels, "run", run))
        # One thread creates the weights, because a fake device exists only in its own thread.
        stack.enter_context(mock.patch.object(weights, "_fill_chunk"))
        stack.enter_context(mock.patch.object(weights, "load_threads", one_thread))
        stack.enter_context(mock.patch.object(build_engine, "dummy_hash", return_value="made up"))
        # Numbers that the host computes are real.
        stack.enter_context(mock.patch.object(Bans, "_words", with_numbers(Bans._words)))
        stack.enter_context(mock.patch.object(torch, "from_numpy", with_numbers(torch.from_numpy)))
        # torch's CUDA build would look for a driver.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", return_value=None))
        # Weights and pools of real sizes need no memory, because tensors of the host are fake as well.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(FlashRules())
        stack.enter_context(WithoutGuards(cuda))
        yield cuda
