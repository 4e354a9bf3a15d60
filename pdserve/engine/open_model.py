"""Opens a model folder, and compares config.json with the tensors. Pure, except that it reads files.

The tensors decide a fact that both state differently, because training produced them: an output head of its own beside
`tie_word_embeddings: true`, and the dtype. A tensor that the model does not read must add nothing, which `drop_unused`
verifies. Any other difference is a missing, superfluous or misshapen tensor, which `Needs.check` rejects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.bounded_file import opened
from pdserve.core.errors import ModelError
from pdserve.engine.checkpoint_sizes import check_sizes
from pdserve.engine.config import ModelConfig, read_config
from pdserve.engine.packed_scheme import PackedScheme
from pdserve.engine.rope import inverse_frequencies
from pdserve.engine.rope_config import RopeConfig
from pdserve.engine.safetensors_file import Checkpoint, StoredTensor, open_checkpoint

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
