"""Reads tensors from files at the disk's speed, directly to their place.

Several threads read chunks of one tensor at a time. Another thread asks the kernel to read ahead by a bounded distance,
so that the disk stays busy while weights are packed. Data read ahead is in the page cache, not in our memory. Every
tensor of the order must be read exactly once, which `close` checks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from pdserve.bounded_file import open_regular
from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.safetensors_file import StoredTensor

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
