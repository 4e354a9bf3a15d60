"""The stored tensors of a model: compares config.json with them, checks their shapes and that none is missing, and
finds a rank's slices and fused experts in them. Pure, except that it reads files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from pdserve.bounded_file import opened
from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.load.checkpoint_files import ITEM_BYTES, Checkpoint, StoredTensor, check_sizes, open_checkpoint
from pdserve.engine.model.attention import inverse_frequencies
from pdserve.engine.model.config import ModelConfig, RopeConfig, read_config
from pdserve.engine.model.forms import has_panels
from pdserve.engine.model.linear import Linear, PlainLinear
from pdserve.engine.model.parameters import WHOLE, Cut, Shard, Span
from pdserve.engine.model.quantisation import PER_WORD, Axis, PackedScheme, PackedTensor, Quantisation, Scheme

# --- a rank's part of a tensor --------------------------------------------------------------------------------
# It is described so that only its bytes are read.

# Shapes: N outputs, K inputs.


def cut_tensor(tensor: StoredTensor, rows: Span, columns: Span | None = None) -> StoredTensor:
    """A range of rows of a tensor, and a range of their columns; a vector has rows only."""
    count, row_shape = rows[1] - rows[0], tensor.shape[1:]
    row_bytes = math.prod(row_shape) * ITEM_BYTES[tensor.dtype]
    begin = tensor.begin + rows[0] * row_bytes
    if columns is None or columns == (0, row_shape[0]):
        return replace(tensor, shape=(count, *row_shape), begin=begin, num_bytes=count * row_bytes)
    item_bytes, width = ITEM_BYTES[tensor.dtype], columns[1] - columns[0]
    return replace(
        tensor,
        shape=(count, width),
        begin=begin + columns[0] * item_bytes,
        num_bytes=count * width * item_bytes,
        run_bytes=width * item_bytes,
        stride_bytes=row_bytes,
    )


def cut_scale(
    tensor: StoredTensor, scheme: Scheme, outputs: Span, inputs: Span, shape: tuple[int, int]
) -> StoredTensor:
    """The scales of a part of a matrix [N, K] of `shape`. Raises ModelError if the part divides a scale's block."""
    rows = _blocks(tensor, outputs, shape[0], scheme.block[0], "outputs")
    columns = _blocks(tensor, inputs, shape[1], scheme.block[1], "inputs")
    counts = scheme.scale_counts(*shape)
    if (rows, columns) == ((0, counts[0]), (0, counts[1])):
        return tensor
    return cut_tensor(tensor, rows, columns if len(tensor.shape) == 2 else None)


def cut_packed(
    tensor: StoredTensor, part: PackedTensor, outputs: Span, inputs: Span, shape: tuple[int, int]
) -> StoredTensor:
    """One of the tensors of a part of a 4-bit matrix [N, K] of `shape`. Raises ModelError if the part divides a group
    or an int32."""

    def span(axis: Axis) -> Span:
        cut, total = (outputs, shape[0]) if axis.along == "outputs" else (inputs, shape[1])
        return _blocks(tensor, cut, total, axis.count, axis.along)

    return cut_tensor(tensor, span(part.rows), span(part.columns))


def _blocks(tensor: StoredTensor, span: Span, total: int, size: int | None, what: str) -> Span:
    if size is None:
        return 0, 1
    if span[0] % size or (span[1] % size and span[1] != total):
        expected = f"parts of a multiple of {size} {what}: another tensor_parallel"
        raise ModelError(tensor.name, f"{what} {span[0]} to {span[1]} for one rank", expected)
    return span[0] // size, -(-span[1] // size)


# --- tensors that a model needs -------------------------------------------------------------------------------

PLAIN_DTYPES: Final = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Need:
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[str, ...]  # any of them


@final
class Needs:
    """A Source that returns no data: it records every requested tensor, in the order of reading."""

    def __init__(self, quantisation: Quantisation, shard: Shard = WHOLE) -> None:
        self.tensors: dict[str, Need] = {}
        self._shard = shard
        self._parts: dict[str, Callable[[StoredTensor], StoredTensor] | None] = {}  # None: not needed by this rank
        self.num_matrix_weights = 0  # products of this rank
        self.num_packed_weights = 0  # those of them that are stored in 4 bits
        self.num_panel_weights = 0  # those whose product can read bfloat16, if the checkpoint stores it
        self.num_table_weights = 0  # lookup tables of this rank
        self._quantisation = quantisation

    def vector(self, name: str, size: int) -> Tensor:
        return self._note(name, (size,))

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        rows = self._shard.span(num_rows, num_rows) if is_cut else (0, num_rows)
        self._note(name, (num_rows, num_columns))
        self._parts[name] = partial(cut_tensor, rows=rows)
        table = torch.empty((rows[1] - rows[0], num_columns), device="meta")
        self.num_table_weights += table.numel()
        return table

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        inputs = self._shard.inputs(num_inputs, cut)
        spans = self._shard.outputs(parts, cut)
        for (module, num_outputs), outputs in zip(parts.items(), spans.values(), strict=True):
            scheme, shape = self._quantisation.scheme(module), (num_outputs, num_inputs)
            if isinstance(scheme, PackedScheme):
                _check_groups(module, scheme, num_inputs)
                for part in scheme.tensors():
                    name = f"{module}.{part.suffix}"
                    self._note(name, scheme.shape(part, *shape), dtypes=part.dtypes)
                    self._parts[name] = partial(cut_packed, part=part, outputs=outputs, inputs=inputs, shape=shape)
                self.num_packed_weights += (outputs[1] - outputs[0]) * (inputs[1] - inputs[0])
            elif scheme is None:
                self._note(f"{module}.weight", shape)
                self._parts[f"{module}.weight"] = partial(cut_tensor, rows=outputs, columns=inputs)
            else:
                self._note(f"{module}.weight", shape, dtypes=(scheme.stored,))
                scale = f"{module}.{scheme.scale_name}"
                self._note(scale, *scheme.scale_shapes(*shape))
                self._parts[scale] = partial(cut_scale, scheme=scheme, outputs=outputs, inputs=inputs, shape=shape)
                self._parts[f"{module}.weight"] = partial(cut_tensor, rows=outputs, columns=inputs)
            if has_bias:
                self._note(f"{module}.bias", (num_outputs,))
                self._parts[f"{module}.bias"] = partial(cut_tensor, rows=outputs) if self._shard.has_bias(cut) else None
        num_outputs = sum(end - begin for begin, end in spans.values())
        return self.product(torch.empty((num_outputs, inputs[1] - inputs[0]), device="meta"))

    def product(self, table_NK: Tensor) -> Linear:
        self.num_matrix_weights += table_NK.numel()
        self.num_panel_weights += table_NK.numel() if has_panels(*table_NK.shape) else 0
        return PlainLinear(table_NK, None)

    def exact_product(self, table_NK: Tensor) -> Linear:
        return PlainLinear(table_NK, None)

    def check(self, stored: Mapping[str, StoredTensor]) -> None:
        """Raises ModelError on a missing or superfluous tensor, or one of a wrong shape."""
        if missing := sorted(self.tensors.keys() - stored.keys()):
            raise ModelError(missing[0], f"no such tensor ({len(missing)} are missing)", "every parameter of the model")
        if left := sorted(stored.keys() - self.tensors.keys()):
            raise ModelError(left[0], f"a tensor that nothing uses ({len(left)} such)", "only the model's parameters")
        for name, need in self.tensors.items():
            seen = stored[name]
            if seen.shape not in need.shapes:
                shapes = " or ".join(str(list(shape)) for shape in need.shapes)
                raise ModelError(name, f"shape {list(seen.shape)}", f"{shapes}, as config.json says")
            if seen.dtype not in need.dtypes:
                raise ModelError(name, f"dtype {seen.dtype}", " or ".join(need.dtypes) + ", as config.json says")

    def cut(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """This rank's parts of a checkpoint that passed `check`, in the order of reading."""
        parts: dict[str, StoredTensor] = {}
        for name in self.tensors:
            part = self._parts.get(name, _whole)
            if part is not None:
                parts[name] = part(stored[name])
        return parts

    def _note(self, name: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = PLAIN_DTYPES) -> Tensor:
        if name in self.tensors:
            raise InternalError(f"two parameters are called {name}")
        self.tensors[name] = Need(shapes, dtypes)
        return torch.empty(shapes[0], device="meta")


def _check_groups(module: str, scheme: PackedScheme, num_inputs: int) -> None:
    if num_inputs % (scheme.group or PER_WORD):
        raise ModelError(module, f"{num_inputs} inputs", f"a multiple of {scheme.group or PER_WORD}: whole groups")


def _whole(tensor: StoredTensor) -> StoredTensor:
    return tensor


# --- comparison of config.json with the tensors ---------------------------------------------------------------
# The tensors decide a fact that both state differently, because training produced them: an output head of its own
# beside `tie_word_embeddings: true`, and the dtype. A tensor that the model does not read must add nothing, which
# `drop_unused` verifies. Any other difference is a missing, superfluous or misshapen tensor, which `Needs.check`
# rejects.

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_NAMES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MATRICES: Final = (".weight", "_proj")  # the ends of the names of plain matrices; scales end otherwise
_FREQUENCIES: Final = ".rotary_emb.inv_freq"  # old Llama checkpoints store what config.json already says
_FREQUENCY_ERROR: Final = 2.0**-7  # of a bfloat16
_ELEMENTS_AT_ONCE: Final = 2**20


@dataclass(frozen=True, slots=True)
class OpenedModel:
    config: ModelConfig  # with the facts of the tensors
    checkpoint: Checkpoint | None  # None: generated weights
    corrections: tuple[str, ...] = ()  # a sentence for each fact that config.json states otherwise


def open_model(folder: Path, *, has_weights: bool = True) -> OpenedModel:
    """Raises ModelError if the model cannot be served exactly."""
    config = read_config(folder)
    if not has_weights:
        return OpenedModel(config, None)
    checkpoint = open_checkpoint(folder)
    check_sizes(config, checkpoint.tensors)
    found, corrections = with_own_head(config, checkpoint), []
    if found != config:
        corrections.append(
            "config.json says tie_word_embeddings: true, but the checkpoint has an output head of its own "
            f"({HEAD}), which is used"
        )
    stored = _stored_dtype(checkpoint)
    if stored not in (None, config.dtype):
        corrections.append(f"config.json says dtype: {config.dtype}, but the checkpoint's matrices are {stored}")
        found = replace(found, dtype=stored)
    return OpenedModel(found, checkpoint, tuple(corrections))


def with_own_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """`config` without the tie, if the checkpoint has a head that is no copy of the embedding."""
    heads = [name for name in checkpoint.tensors if name.startswith("lm_head.") and name != "lm_head.bias"]
    if not config.is_tied or not heads:
        return config
    head, embedding = checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDING)
    if head is not None and embedding is not None and len(heads) == 1 and _is_equal(head, embedding):
        return config
    return replace(config, is_tied=False)


def drop_unused(
    config: ModelConfig, stored: Mapping[str, StoredTensor], needed: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """`stored` without the tensors that add nothing. Raises ModelError if one of them does."""
    kept = dict(stored)
    for name in stored.keys() - needed.keys():
        module, _, suffix = name.rpartition(".")
        scheme = config.quantisation.scheme(module)
        if name == HEAD and config.is_tied:
            pass  # a copy of the embedding: see with_own_head
        elif name.endswith(_FREQUENCIES):
            _check_frequencies(config, stored[name])
        elif isinstance(scheme, PackedScheme) and suffix in scheme.unused:
            _check_packed(scheme, module, suffix, stored)
        else:
            continue
        del kept[name]
    return kept


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of most weights of plain matrices."""
    counts: Counter[str] = Counter()
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) > 1 and tensor.dtype in _NAMES and name.endswith(_MATRICES):
            counts[_NAMES[tensor.dtype]] += tensor.num_bytes // TORCH_DTYPES[tensor.dtype].itemsize
    return counts.most_common(1)[0][0] if counts else None


def _is_equal(left: StoredTensor, right: StoredTensor) -> bool:
    if left.shape != right.shape:
        return False
    count = left.num_bytes // TORCH_DTYPES[left.dtype].itemsize
    for start in range(0, count, _ELEMENTS_AT_ONCE):
        ours, theirs = _read(left, start, _ELEMENTS_AT_ONCE), _read(right, start, _ELEMENTS_AT_ONCE)
        if ours.dtype != theirs.dtype:
            ours, theirs = ours.double(), theirs.double()
        if not torch.equal(ours, theirs):
            return False
    return True


def _read(tensor: StoredTensor, start: int = 0, most: int | None = None) -> Tensor:
    """Up to `most` elements from element `start` on."""
    dtype = TORCH_DTYPES[tensor.dtype]
    begin, end = start * dtype.itemsize, tensor.num_bytes
    end = end if most is None else min(end, begin + most * dtype.itemsize)
    with opened(tensor.file, tensor.file.name, ModelError) as stream:
        stream.seek(tensor.begin + begin)
        data = bytearray(stream.read(end - begin))
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _check_frequencies(config: ModelConfig, stored: StoredTensor) -> None:
    """Old checkpoints store the frequencies before or after they are scaled, and may have rounded them."""
    seen = _read(stored).double()
    for rope in dict.fromkeys(config.ropes):
        for expected in (rope, RopeConfig(theta=rope.theta)):
            frequency_R = inverse_frequencies(expected, config.head_dim).double()
            if seen.shape == frequency_R.shape and torch.allclose(seen, frequency_R, rtol=_FREQUENCY_ERROR, atol=1e-6):
                return
    raise ModelError(stored.name, "other frequencies", "those of the rope that config.json describes")


def _check_packed(scheme: PackedScheme, module: str, suffix: str, stored: Mapping[str, StoredTensor]) -> None:
    name = f"{module}.{suffix}"
    seen = _read(stored[name])
    if suffix == "bias" and seen.count_nonzero():
        raise ModelError(name, "a bias that is not zero", "zeros: config.json says that this matrix has no bias")
    if suffix == "g_idx":
        expected = torch.arange(len(seen)) // (scheme.group or max(1, len(seen)))
        if not torch.equal(seen, expected):
            raise ModelError(name, "groups in another order", "groups of neighbouring inputs (desc_act: false)")
    if suffix == "weight_shape":
        weight, sizes = scheme.tensors()[0], [int(size) for size in seen]
        packed = stored.get(f"{module}.{weight.suffix}")
        if packed is not None and (len(sizes) != 2 or scheme.shape(weight, sizes[0], sizes[1]) != packed.shape):
            raise ModelError(name, str(sizes), f"a shape that packs to {list(packed.shape)}, as {packed.name} has")
