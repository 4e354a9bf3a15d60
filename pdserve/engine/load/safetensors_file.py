"""Reads the headers of safetensors files and checks that the data is complete. Pure, except that it reads files.

Format: 8 bytes little-endian header length, a JSON object of name -> {dtype, shape, data_offsets}, then the data
without gaps. It is a reader of our own: a hundred lines, no dependency, and a specific error message for every defect
of a file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import MAX_JSON_BYTES, opened, parse_json, read_bytes, read_json_object
from pdserve.core.errors import ModelError
from pdserve.model_source import check_no_gguf

MAX_HEADER_BYTES: Final = 32 * 2**20  # 250,000 tensors; the reference implementation takes three times as many
MAX_INDEX_BYTES: Final = 32 * 2**20
MAX_DIMENSIONS: Final = 8
ITEM_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_SAMPLES_PER_FILE: Final = 64
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    num_bytes: int
    run_bytes: int = 0  # for a part whose rows are apart: this many bytes of each row, one row every `stride_bytes`
    stride_bytes: int = 0

    def offset(self, at: int) -> int:
        """The position in the file of byte `at` of the tensor."""
        if not self.run_bytes:
            return self.begin + at
        row, rest = divmod(at, self.run_bytes)
        return self.begin + row * self.stride_bytes + rest

    def num_joined(self, at: int) -> int:
        """The number of contiguous bytes of the tensor in the file from byte `at` on."""
        return self.run_bytes - at % self.run_bytes if self.run_bytes else self.num_bytes - at


@dataclass(frozen=True, slots=True)
class Checkpoint:
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(folder: Path) -> Checkpoint:
    """All tensors of the folder's safetensors files, each named once. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    weight_map = _read_weight_map(index) if os.path.lexists(index) else None
    files = _shards(folder, weight_map) if weight_map is not None else _single(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise ModelError(file.name, f"{tensor.name}, also in {tensors[tensor.name].file.name}", "one of them")
            tensors[tensor.name] = tensor
    for name, file_name in (weight_map or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelError(file_name, f"no tensor {name}", f"the tensor that {index.name} lists")
    return Checkpoint(tuple(files), tensors)


def read_header(file: Path) -> list[StoredTensor]:
    size, header = _header_bytes(file)
    begin = 8 + len(header)
    entries = parse_json(header, file.name, ModelError)
    if not isinstance(entries, dict):
        raise ModelError(file.name, "a header that is not an object", "a safetensors file")
    tensors = [_stored(file, begin, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    end = begin
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.num_bytes)):
        if tensor.begin != end:
            raise ModelError(file.name, f"{tensor.name} at byte {tensor.begin}", f"byte {end}: data without gaps")
        end += tensor.num_bytes
    if end != size:
        expected = f"{end} bytes, as its header says; download it again"
        raise ModelError(file.name, f"{size} bytes" + (" (truncated)" if size < end else ""), expected)
    return tensors


def checkpoint_hash(folder: Path, checkpoint: Checkpoint, *choices: str) -> str:
    """A hash that identifies the weights: config.json, and the size, the header and samples of the data of every file.

    `choices` are decisions of the loader that change results.

    It does not hash all data, which would take longer than reading 70B weights once. Two fine-tunes of one model share
    config, headers and sizes, but almost no page of their data.
    """
    digest = hashlib.blake2b("\n".join(choices).encode(), digest_size=16)
    digest.update(read_bytes(folder / "config.json", MAX_JSON_BYTES, "config.json", ModelError))
    for file in sorted(checkpoint.files):
        size, header = _header_bytes(file)
        digest.update(size.to_bytes(8, "little") + len(header).to_bytes(8, "little") + header)
        with opened(file, file.name, ModelError) as stream:
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(8 + len(header) + (size - 8 - len(header)) * sample // _SAMPLES_PER_FILE)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _header_bytes(file: Path) -> tuple[int, bytes]:
    """The file's size, and its header."""
    with opened(file, file.name, ModelError) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            seen = f"{size} bytes with a header of {length}" if len(prefix) == 8 else f"{size} bytes"
            raise ModelError(file.name, seen, "a whole safetensors file; it may be truncated or a Git LFS pointer")
        if length > MAX_HEADER_BYTES:
            raise ModelError(file.name, f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES} bytes")
        return size, stream.read(length)


def _stored(file: Path, data_begin: int, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        # Sizes are below 2^63, the largest size of a file: a product of longer numbers could take hours.
        is_sound = len(shape) <= MAX_DIMENSIONS and all(
            type(one) is int and 0 <= one < 2**63 for one in (*shape, first, last)
        )
        is_sound = is_sound and first <= last and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise ModelError(file.name, f"{name}: {entry}", "dtype, shape and data_offsets")
    if dtype not in ITEM_BYTES:
        raise ModelError(file.name, f"{name} of dtype {dtype}", "one of " + ", ".join(ITEM_BYTES))
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if last - first != num_bytes:
        raise ModelError(file.name, f"{name}: {last - first} bytes", f"{num_bytes} bytes for {dtype} {list(shape)}")
    return StoredTensor(file, name, dtype, shape, data_begin + first, num_bytes)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map: dict[str, str] = (read_json_object(index, MAX_INDEX_BYTES) or {}).get("weight_map", {})
    is_sound = (
        isinstance(weight_map, dict) and bool(weight_map) and all(isinstance(one, str) for one in weight_map.values())
    )
    if not is_sound or any("/" in name or name in ("", ".", "..") for name in weight_map.values()):
        raise ModelError(index.name, "a wrong weight_map", "tensor names with the names of files in the same folder")
    return weight_map


def _shards(folder: Path, weight_map: Mapping[str, str]) -> Sequence[Path]:
    files = [folder / name for name in sorted(set(weight_map.values()))]
    whole = folder / "model.safetensors"
    if whole.exists() and whole not in files:  # transformers would load it, and other servers the shards
        raise ModelError(whole.name, "a file that the index beside it does not list", "one of them: remove the other")
    for file in files:
        if not os.path.lexists(file):
            raise ModelError(file.name, f"nothing in {folder}", "a shard that the index names; download it")
    return files


def _single(folder: Path) -> Sequence[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise ModelError("model.safetensors.index.json", f"nothing, beside {names}", "an index of the shards")
    check_no_gguf(folder)
    pickled = [file.name for pattern in PICKLED for file in sorted(folder.glob(pattern))]
    if pickled:
        raise ModelError(
            pickled[0],
            "a pickle checkpoint, which can run code when it is read",
            "safetensors; convert it where you trust it: save_pretrained(folder, safe_serialization=True)",
        )
    raise ModelError("model.safetensors", f"no weights in {folder}", "a safetensors file, or shards with an index")
