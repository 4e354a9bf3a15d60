"""The files of a checkpoint: which tensors they hold, whether they are whole, and whether their sizes are those in
config.json. Pure, except that it reads files. It imports no torch, because `up` and `doctor` run it before a worker
starts.

A safetensors file has 8 bytes of header length (little-endian), a JSON object of name -> {dtype, shape, data_offsets},
and then the data without gaps. Decision 0034 says why the reader is our own.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from pdserve.bounded_file import MAX_JSON_BYTES, opened, parse_json, read_bytes, read_json_object
from pdserve.core.errors import ModelError
from pdserve.engine.model.config import ExpertsConfig, ModelConfig
from pdserve.model_source import check_no_gguf

MAX_HEADER_BYTES: Final = 32 * 2**20  # 250,000 tensors; the reference implementation takes three times as many
MAX_INDEX_BYTES: Final = 32 * 2**20
MAX_DIMENSIONS: Final = 8
ITEM_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
_FRACTIONS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits
_SINGLE: Final = ("BOOL", "U8", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_WIDE: Final = {"I16": 2, "U16": 2, "U32": 4, "F64": 8, "U64": 8, "C64": 8}
OWN_BITS: Final[Mapping[str, int]] = {dtype: 8 * size for dtype, size in ITEM_BYTES.items()}
#: Every dtype of the format, for an engine that reads the tensors itself.
ALL_BITS: Final[Mapping[str, int]] = {
    **OWN_BITS,
    **_FRACTIONS,
    **dict.fromkeys(_SINGLE, 8),
    **{dtype: 8 * size for dtype, size in _WIDE.items()},
}
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_SAMPLES_PER_FILE: Final = 64
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    name: str
    dtype: str  # a key of ITEM_BYTES, or of ALL_BITS if these were allowed
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


def open_checkpoint(folder: Path, item_bits: Mapping[str, int] = OWN_BITS) -> Checkpoint:
    """All tensors of the folder's safetensors files, each named once. `item_bits`: of an element of each dtype that may
    occur. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    weight_map = _read_weight_map(index) if os.path.lexists(index) else None
    files = _shards(folder, weight_map) if weight_map is not None else _single(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file, item_bits):
            if tensor.name in tensors:
                raise ModelError(file.name, f"{tensor.name}, also in {tensors[tensor.name].file.name}", "one of them")
            tensors[tensor.name] = tensor
    for name, file_name in (weight_map or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelError(file_name, f"no tensor {name}", f"the tensor that {index.name} lists")
    return Checkpoint(tuple(files), tensors)


def read_header(file: Path, item_bits: Mapping[str, int] = OWN_BITS) -> list[StoredTensor]:
    with opened(file, file.name, ModelError) as stream:
        size, header = header_bytes(file, stream)
    return tensors_of(file, size, 8 + len(header), parse_json(header, file.name, ModelError), item_bits)


def tensors_of(
    file: Path, size: int, begin: int, entries: Any, item_bits: Mapping[str, int] = OWN_BITS
) -> list[StoredTensor]:
    """The tensors in a file of `size` bytes whose data begin at `begin`. `entries`: its parsed header. Raises
    ModelError."""
    if not isinstance(entries, dict):
        raise ModelError(file.name, "a header that is not an object", "a safetensors file")
    tensors = [
        _stored(file, begin, name, entry, item_bits) for name, entry in entries.items() if name != "__metadata__"
    ]
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
        with opened(file, file.name, ModelError) as stream:
            size, header = header_bytes(file, stream)
            digest.update(size.to_bytes(8, "little") + len(header).to_bytes(8, "little") + header)
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(8 + len(header) + (size - 8 - len(header)) * sample // _SAMPLES_PER_FILE)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def header_bytes(file: Path, stream: BinaryIO, most_bytes: int = MAX_HEADER_BYTES) -> tuple[int, bytes]:
    """The size of the opened file, and its header, behind which `stream` stands then. Raises ModelError."""
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        seen = f"{size} bytes with a header of {length}" if len(prefix) == 8 else f"{size} bytes"
        raise ModelError(file.name, seen, "a whole safetensors file; it may be truncated or a Git LFS pointer")
    if length > most_bytes:
        raise ModelError(file.name, f"a header of {length} bytes", f"at most {most_bytes} bytes")
    header = stream.read(length)
    if len(header) < length:
        raise ModelError(file.name, f"{8 + len(header)} bytes", f"{size} bytes: it became shorter while it was read")
    return size, header


def _stored(file: Path, data_begin: int, name: str, entry: Any, item_bits: Mapping[str, int]) -> StoredTensor:
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
    if dtype not in item_bits:
        raise ModelError(file.name, f"{name} of dtype {dtype}", "one of " + ", ".join(item_bits))
    num_bytes, rest = divmod(math.prod(shape) * item_bits[dtype], 8)
    if rest:
        raise ModelError(file.name, f"{name}: {dtype} {list(shape)}", "a whole number of bytes")
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


# --- fused experts --------------------------------------------------------------------------------------------
# Presents experts that are stored as one tensor per layer as separate tensors, without a copy.
#
# Checkpoints on the Hub, and save_pretrained, have one tensor per expert. With save_original_format=False, transformers
# 5 writes `mlp.gate.weight`, `mlp.experts.gate_up_proj` [X, 2F, E] and `mlp.experts.down_proj` [X, E, F] for every
# family.

# Shapes: X experts, E hidden size, F size of each expert.

_FUSED: Final = re.compile(
    r"(?P<at>model\.layers\.\d+\.)mlp\.(?P<part>gate\.weight|experts\.gate_up_proj|experts\.down_proj)"
)


def split_experts(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names of the family's usual checkpoints. Raises ModelError on a wrong shape."""
    if config.experts is None:
        return dict(stored)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        fused = _FUSED.fullmatch(name)
        if fused is None:
            found[name] = tensor
        elif fused["part"] == "gate.weight":
            router = f"{fused['at']}{config.experts.names.block}.gate.weight"
            found[name if router in stored else router] = tensor
        else:
            for part, piece in _split(tensor, config.experts, config.hidden_size, fused["at"], fused["part"]):
                if part in stored:
                    raise ModelError(part, f"the same weights in {name}", "one of them")
                found[part] = piece
    return found


def _split(
    tensor: StoredTensor, experts: ExpertsConfig, hidden_size: int, at: str, part: str
) -> Iterator[tuple[str, StoredTensor]]:
    gate, up, down = experts.names.parts
    is_down = part == "experts.down_proj"
    parts = (down,) if is_down else (gate, up)
    shape = (hidden_size, experts.mlp_size) if is_down else (experts.mlp_size, hidden_size)
    whole = (experts.num_experts, len(parts) * shape[0], shape[1])
    if tensor.shape != whole:
        raise ModelError(tensor.name, f"shape {list(tensor.shape)}", f"{list(whole)}, as config.json says")
    num_bytes = tensor.num_bytes // (experts.num_experts * len(parts))
    names = [
        f"{at}{experts.names.block}.experts.{i}.{part}.weight" for i in range(experts.num_experts) for part in parts
    ]
    for index, name in enumerate(names):
        begin = tensor.begin + index * num_bytes
        yield name, replace(tensor, name=name, shape=shape, begin=begin, num_bytes=num_bytes)


# --- comparison of sizes with config.json ---------------------------------------------------------------------
# Every process that opens a model folder runs it, and so does `up` before it starts a worker. It names the field of
# config.json and both numbers. `Needs.check`, for which the whole model is listed, finds what is left: missing,
# superfluous, quantised and single misshapen tensors.

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


def check_sizes(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError at the first difference. A tensor that is absent, or packed, is not compared. Fused experts are
    compared before they are split, because a split names only the tensor."""
    layers = {int(found[1]) for name in stored if (found := _LAYER.match(name))}
    count = len(layers)
    if layers == set(range(count)) and count not in (0, config.num_layers):
        expected = f"{count}, because the weights have the layers 0 to {count - 1}"
        raise ModelError("config.json: num_hidden_layers", config.num_layers, expected)
    for name, dimension, field, size in _sizes(config):
        tensor = stored.get(name)
        if tensor is not None and dimension < len(tensor.shape) and tensor.shape[dimension] != size:
            expected = f"{tensor.shape[dimension]}, because {name} has the shape {list(tensor.shape)}"
            raise ModelError(f"config.json: {field}", size, expected)
    split_experts(config, stored)


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int, str, int]]:
    """A tensor with each size, its dimension, what config.json calls it, and its value there. One layer of each kind is
    enough, because config.json says the same of all."""
    experts = config.experts
    yield "model.embed_tokens.weight", 1, "hidden_size", config.hidden_size
    yield "model.embed_tokens.weight", 0, "vocab_size", config.vocab_size
    attention = "model.layers.0.self_attn."
    if config.has_qk_norm:
        yield f"{attention}q_norm.weight", 0, "head_dim", config.head_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{attention}q_proj.weight", 0, "num_attention_heads * head_dim", queries
    yield f"{attention}k_proj.weight", 0, "num_key_value_heads * head_dim", keys
    with_experts = frozenset[int]() if experts is None else experts.layers
    for index in sorted(set(range(config.num_layers)) - with_experts)[:1]:
        yield f"model.layers.{index}.mlp.gate_proj.weight", 0, "intermediate_size", config.mlp_size
    if experts is not None:
        for index in sorted(with_experts)[:1]:
            block, fused = f"model.layers.{index}.{experts.names.block}", f"model.layers.{index}.mlp"
            for name in (f"{block}.gate.weight", f"{fused}.gate.weight", f"{fused}.experts.down_proj"):
                yield name, 0, experts.count_field, experts.num_experts
            yield f"{block}.experts.0.{experts.names.parts[0]}.weight", 0, experts.size_field, experts.mlp_size
            yield f"{fused}.experts.down_proj", 2, experts.size_field, experts.mlp_size
