"""Reads tensors from files at the disk's speed, directly to their place.

Several threads read chunks of one tensor at a time. Another thread asks the kernel to read ahead by a bounded distance,
so that the disk stays busy while weights are packed. Data read ahead is in the page cache, not in our memory. Every
tensor of the order must be read exactly once, which `close` checks.

Then come the threads that build layers, their memory for conversions, and the unpacking of 4-bit matrices.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import torch
from torch import Tensor

from pdserve.bounded_file import open_regular
from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.cpu.kernels.rounding import WEIGHTS_AT_ONCE
from pdserve.engine.load.checkpoint_files import StoredTensor
from pdserve.engine.model.quantisation import PER_WORD, PackedScheme

NUM_THREADS: Final = 8  # outstanding reads, not cores: the threads mostly wait for the disk
AHEAD_BYTES: Final = 256 * 2**20

_CHUNK_BYTES: Final = 2**20
_ADVICE_BYTES: Final = 128 * 2**10  # for a longer advice the kernel reads only its readahead size, often 128 KiB


@final
class TensorReader:
    def __init__(
        self, order: Sequence[StoredTensor], *, num_threads: int = NUM_THREADS, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self._unread = {tensor.name: tensor for tensor in order}
        if len(self._unread) != len(order):
            raise InternalError("a tensor stands twice in the order of reading")
        self._files = _open_files(dict.fromkeys(tensor.file for tensor in order))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read")
        self._moved = threading.Condition()
        self._num_read_bytes = 0
        self._is_closing = False
        self._ahead = threading.Thread(target=self._read_ahead, args=(tuple(order), ahead_bytes), name="read-ahead")
        self._ahead.start()

    def read(self, tensor: StoredTensor, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes. Raises ModelError if the file ends early or cannot be read."""
        if self._unread.pop(tensor.name, None) != tensor:
            raise InternalError(f"{tensor.name} is read a second time, or was not announced")
        if target.nbytes != tensor.num_bytes:
            raise InternalError(f"{tensor.name} has {tensor.num_bytes} bytes, its place {target.nbytes}")
        starts = range(0, tensor.num_bytes, _CHUNK_BYTES)
        try:
            if len(starts) == 1:
                self._read_chunk(tensor, target, 0)
            else:
                list(self._pool.map(lambda start: self._read_chunk(tensor, target, start), starts))
        except OSError as error:
            raise ModelError(tensor.name, f"{error} in {tensor.file.name}", "a file that can be read") from error

    def close(self) -> None:
        """Raises InternalError if a tensor was not read."""
        self._stop()
        if self._unread:
            raise InternalError(f"{next(iter(self._unread))} was never read ({len(self._unread)} such)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        with self._moved:
            self._is_closing = True
            self._moved.notify()
        self._ahead.join()
        self._pool.shutdown()
        while self._files:
            os.close(self._files.popitem()[1])

    def _read_chunk(self, tensor: StoredTensor, target: memoryview, start: int) -> None:
        end = min(start + _CHUNK_BYTES, tensor.num_bytes)
        at = start
        while at < end:
            here = target[at : min(end, at + tensor.num_joined(at))]
            num = os.preadv(self._files[tensor.file], [here], tensor.offset(at))
            if num == 0:
                expected = f"{tensor.num_bytes} bytes, as its header says"
                raise ModelError(tensor.name, f"{tensor.file.name} ends after {at} bytes of it", expected)
            at += num
        with self._moved:
            self._num_read_bytes += end - start
            self._moved.notify()

    def _read_ahead(self, order: Sequence[StoredTensor], ahead_bytes: int) -> None:
        num_asked_bytes = 0
        for tensor in order:
            for start in range(0, tensor.num_bytes, _ADVICE_BYTES):
                size = min(_ADVICE_BYTES, tensor.num_bytes - start)
                with self._moved:
                    self._moved.wait_for(
                        lambda asked=num_asked_bytes: (  # type: ignore[misc]
                            self._is_closing or asked < self._num_read_bytes + ahead_bytes
                        )
                    )
                    if self._is_closing:
                        return
                    is_late = num_asked_bytes + size <= self._num_read_bytes
                num_asked_bytes += size
                if not is_late and hasattr(os, "posix_fadvise"):
                    offset = tensor.offset(start)
                    length = tensor.offset(start + size - 1) + 1 - offset
                    os.posix_fadvise(self._files[tensor.file], offset, length, os.POSIX_FADV_WILLNEED)


def _open_files(paths: Iterable[Path]) -> dict[Path, int]:
    files: dict[Path, int] = {}
    for path in paths:
        try:
            files[path] = open_regular(path, path.name, ModelError)
        except ModelError:
            while files:
                os.close(files.popitem()[1])
            raise
    return files


# --- threads that build layers --------------------------------------------------------------------------------
# Each computes without torch's own threads. Those synchronise at every operation, which costs more than it gains on a
# busy machine, and layers are independent.

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


# --- memory for conversions -----------------------------------------------------------------------------------
# It holds tensors before they are converted to their final form, and is reused for the next one.
#
# New pages cost more than the copy into them, and the allocator may keep freed memory. These pages are mapped
# separately, so freeing them returns them to the system immediately.

# a region that is this much larger than the request is freed, such as that of the packed output head
_MOST_SLACK: Final = 8
_SMALL_BYTES: Final = 16 * 2**20  # a region up to this size is always kept


@final
class LoadScratch:
    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; overwrites what was taken before."""
        held = 0 if self._bytes is None else self._bytes.numel()
        if not num_bytes <= held <= max(_MOST_SLACK * num_bytes, _SMALL_BYTES):
            self._bytes = None  # freed first, so that both never exist together
        if self._bytes is None:
            self._bytes = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        return self._bytes[:num_bytes]

    def take_matrix(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        return self.take(num_rows * num_columns * dtype.itemsize).view(dtype).view(num_rows, num_columns)


# --- unpacking of 4-bit matrices ------------------------------------------------------------------------------
# model/quantisation.py describes the formats: GPTQ, AWQ and compressed-tensors.

# Shapes: N outputs, K inputs, G groups of inputs.

_ZERO: Final = 8  # of symmetric weights
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where the integer of each of eight outputs is


@dataclass(frozen=True, slots=True)
class Groups:
    """(`rounded_NK` - `zero_NG`) * `scale_NG` are the weights; integers are uint8 from 0 to 15."""

    rounded_NK: Tensor
    scale_NG: Tensor
    zero_NG: Tensor


def unpack(scheme: PackedScheme, module: str, read: Callable[[str], Tensor]) -> Groups:
    """`read` returns a stored tensor by its name, and may overwrite what it returned before."""
    names = [f"{module}.{tensor.suffix}" for tensor in scheme.tensors()]
    if scheme.format == "pack-quantized":
        rounded_NK, scale_NG = _across(read(names[0])), _scale(names[1], read)
        # The integers that fill the last int32 are cut off.
        zero_NG = _down(read(names[2]))[: len(rounded_NK)] if scheme.has_zeros else None
    else:
        is_awq = scheme.format == "awq"
        rounded_KN = _reordered(_across(read(names[0]))) if is_awq else _down(read(names[0]))
        rounded_NK, scale_NG = rounded_KN.t().contiguous(), _scale(names[1], read).t().contiguous()
        zero_GN = _across(read(names[2]))
        zero_GN = _reordered(zero_GN) if is_awq else zero_GN + 1 & 15 if scheme.format == "gptq" else zero_GN
        zero_NG = zero_GN.t().contiguous()
    if zero_NG is None:
        zero_NG = torch.full(scale_NG.shape, _ZERO, dtype=torch.uint8)
    return Groups(rounded_NK, scale_NG, zero_NG)


def dequantise_groups(groups: Groups, out_NK: Tensor) -> None:
    """float32 products, rounded once to `out_NK`'s dtype."""
    num_at_once = max(1, WEIGHTS_AT_ONCE // out_NK.shape[1])
    tensors = (groups.rounded_NK, groups.scale_NG, groups.zero_NG, out_NK)
    for rounded, scale, zero, out in zip(*(one.split(num_at_once) for one in tensors), strict=True):
        weight = rounded.float().view(*scale.shape, -1).sub_(zero[..., None]).mul_(scale[..., None])
        out.copy_(weight.view(out.shape))


def _scale(name: str, read: Callable[[str], Tensor]) -> Tensor:
    scale = read(name).to(torch.float32, copy=True)
    if not scale.isfinite().all():
        raise ModelError(name, "a scale that is not finite", "finite numbers")
    return scale


def _across(words: Tensor) -> Tensor:
    """The integers of int32 [R, C], whose words hold neighbours of a row: uint8 [R, 8 C]."""
    return _halves(words).flatten(1)


def _down(words: Tensor) -> Tensor:
    """The integers of int32 [R, C], whose words hold neighbours of a column: uint8 [8 R, C]."""
    return _halves(words).permute(0, 2, 1).flatten(0, 1)


def _halves(words: Tensor) -> Tensor:
    """uint8 [R, C, 8]."""
    parts = words.contiguous().view(torch.uint8).view(*words.shape, PER_WORD // 2)
    return torch.stack([parts & 15, parts >> 4], dim=-1).flatten(2)


def _reordered(rounded: Tensor) -> Tensor:
    return rounded.view(len(rounded), -1, PER_WORD)[..., _AWQ_ORDER].flatten(1)
