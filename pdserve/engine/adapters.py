"""Reads LoRA adapters in PEFT's form: `adapter_config.json` and `adapter_model.safetensors` of one folder. Pure, except
that it reads files.

A folder may come from anywhere, so every size is bounded before work is spent on it, links are not followed, and no
other file is opened. A config that an engine would not compute exactly is rejected by the name of its field. Fields
that matter to training only are ignored: the tensors of the file decide which modules are adapted.

A folder may change after it was checked. So each byte is read once, and an engine loads the bytes that were hashed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, final

from pdserve.bounded_file import opened, opened_folder, parse_json, read_bytes
from pdserve.core.adapters import AdaptedModule, Adapter, AdapterLimits, AdapterMatrix
from pdserve.core.errors import ModelError
from pdserve.engine.load.checkpoint_files import StoredTensor, header_bytes, tensors_of

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
DTYPES: Final = ("F32", "BF16", "F16")
MAX_CONFIG_BYTES: Final = 2**20
MAX_HEADER_BYTES: Final = 16 * 2**20
MAX_TENSORS: Final = 65_536  # two for each expert of a large model
MAX_ALPHA: Final = 1e6

Value = TypeVar("Value")

_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")
_CHUNK_BYTES: Final = 2**20
#: A module, without the prefixes of PEFT's own modules.
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?([A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+){0,15})\.lora_([AB])\.weight")
_MAX_NAME_CHARS: Final = 512
_EMBEDDINGS: Final = ("embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out")
#: A name of a module or the end of one, as PEFT writes it in a pattern; `^` is the beginning of the whole name.
_PATTERN: Final = re.compile(r"\^?[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+){0,15}")

#: Fields that decide what is computed, and are read here.
_READ: Final = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
    | {"bias", "init_lora_weights"}
)
#: Fields that matter to training, or choose the modules whose tensors the file has, or say where the model is from.
_IGNORED: Final = frozenset(
    {"base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode", "lora_dropout"}
    | {"fan_in_fan_out", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"}
    | {"eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"}
)
#: Initial values of the adapter alone. Others, such as pissa, change the model's weights too.
_INITIAL: Final = (True, False, None, "gaussian", "eva", "orthogonal")


def read_adapter(name: str, folder: Path, limits: AdapterLimits) -> Adapter:
    """Reads each byte once. The folder itself may be a link. Raises ModelError."""
    file = folder / WEIGHTS
    with opened_folder(folder, "lora", ModelError) as descriptor:
        config = _read_config(descriptor)
        settings = _settings(config, limits)
        _check_no_pickle(descriptor)
        with opened(WEIGHTS, WEIGHTS, ModelError, folder=descriptor) as stream:
            size, header = header_bytes(file, stream, MAX_HEADER_BYTES)
            begin = 8 + len(header)
            if size - begin > limits.num_bytes:
                raise ModelError(WEIGHTS, f"{size - begin} bytes of weights", f"at most {limits.num_bytes}")
            entries = parse_json(header, WEIGHTS, ModelError, is_strict=True)
            if isinstance(entries, dict) and len(entries) > MAX_TENSORS:
                raise ModelError(WEIGHTS, f"{len(entries)} tensors", f"at most {MAX_TENSORS}")
            data = bytearray(size - begin)
            view = memoryview(data)

            def matrix(tensor: StoredTensor) -> AdapterMatrix:
                first = tensor.begin - begin
                return AdapterMatrix(tensor.name, tensor.dtype, tensor.shape, view[first : first + tensor.num_bytes])

            modules = _modules(tensors_of(file, size, begin, entries), settings, matrix)
            digest = hashlib.blake2b(_canonical(config), digest_size=16)
            digest.update(len(header).to_bytes(8, "little") + header)
            for at, chunk in _chunks(stream, size - begin):
                digest.update(chunk)
                data[at : at + len(chunk)] = chunk
    return Adapter(name=name, fingerprint=digest.hexdigest(), folder=folder, num_bytes=size - begin, modules=modules)


def _canonical(config: Mapping[str, Any]) -> bytes:
    """Equal for equal values. Its length comes first, because the weights follow."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


@final
class LoadedAdapters:
    """Those that an engine has loaded, by fingerprint, and their limits."""

    def __init__(self, max_bytes: int, most: int) -> None:
        """`max_bytes`: of all together."""
        self._max_bytes, self._most = max_bytes, most
        self._bytes_of: dict[str, int] = {}

    def __contains__(self, fingerprint: object) -> bool:
        return fingerprint in self._bytes_of

    def check_room(self, adapter: Adapter) -> None:
        """Raises ModelError if it would be one too many."""
        if len(self._bytes_of) >= self._most:
            expected = f"at most max_lora_adapters, {self._most}: unload one first"
            raise ModelError("lora", f"adapter {adapter.name} beside {len(self._bytes_of)} loaded ones", expected)
        num_bytes = sum(self._bytes_of.values())
        if num_bytes + adapter.num_bytes > self._max_bytes:
            seen = f"adapter {adapter.name} of {adapter.num_bytes} bytes beside loaded ones of {num_bytes}"
            raise ModelError("lora", seen, f"at most max_lora_bytes, {self._max_bytes}: unload one first")

    def add(self, adapter: Adapter) -> None:
        self._bytes_of[adapter.fingerprint] = adapter.num_bytes

    def remove(self, fingerprint: str) -> None:
        self._bytes_of.pop(fingerprint, None)


# --- files ----------------------------------------------------------------------------------------------------


def _check_no_pickle(folder: int) -> None:
    """Raises ModelError, which says more than that the file is absent."""
    pickled = next((name for name in _PICKLED if _exists(name, folder)), None)
    if pickled is not None and not _exists(WEIGHTS, folder):
        expected = f"{WEIGHTS}: a pickle can run code when it is read; convert it where you trust it"
        raise ModelError(pickled, "a pickle", expected)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _read_config(folder: int) -> dict[str, Any]:
    data = read_bytes(CONFIG, MAX_CONFIG_BYTES, CONFIG, ModelError, folder=folder)
    config = parse_json(data, CONFIG, ModelError, is_strict=True)
    if not isinstance(config, dict):
        raise ModelError(CONFIG, f"a {type(config).__name__}", "a JSON object")
    return config


def _chunks(stream: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """The next `size` bytes, each chunk with its place. Raises ModelError unless the file ends behind them."""
    at = 0
    while chunk := stream.read(min(_CHUNK_BYTES, size - at) or 1):
        at += len(chunk)
        if at > size:
            break
        yield at - len(chunk), chunk
    if at != size:
        seen = f"{at} bytes of weights or more" if at > size else f"{at} bytes of weights"
        raise ModelError(WEIGHTS, seen, f"{size}: the file has changed while it was read; load the adapter again")


# --- config ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PeftConfig:
    rank: int
    alpha: float
    has_root: bool  # alpha is divided by the root of the rank
    ranks: Mapping[str, tuple[int, int]]  # by pattern: its place, and its value
    alphas: Mapping[str, tuple[int, float]]
    targets: tuple[str, ...] | None  # names or ends of names; None: not listed

    def rank_of(self, ends: Sequence[str]) -> int:
        """As in PEFT: that of the first pattern that names the module."""
        return min((self.ranks[one] for one in ends if one in self.ranks), default=(0, self.rank))[1]

    def alpha_of(self, ends: Sequence[str]) -> float:
        return min((self.alphas[one] for one in ends if one in self.alphas), default=(0, self.alpha))[1]


def _settings(config: Mapping[str, Any], limits: AdapterLimits) -> _PeftConfig:
    def wrong(field: str, expected: str) -> ModelError:
        return ModelError(f"{CONFIG}: {field}", json.dumps(config.get(field)), expected)

    for field, allowed in (("peft_type", ("LORA",)), ("task_type", (None, "CAUSAL_LM")), ("bias", (None, "none"))):
        if config.get(field) not in allowed:
            raise wrong(field, f"{allowed[-1]}: no other kind of adapter is computed")
    initial = config.get("init_lora_weights")
    if not isinstance(initial, bool | str | None) or initial not in _INITIAL:
        expected = "true, or an adapter that was converted: this one belongs to a model whose own weights it changed"
        raise wrong("init_lora_weights", expected)
    for field, value in config.items():
        if field not in _READ | _IGNORED and value:
            raise wrong(field, "nothing: adapters with this field are not computed")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if not _is_rank(rank, limits):
        raise wrong("r", f"a rank of 1 to {limits.rank} (max_lora_rank)")
    if not _is_alpha(alpha):
        raise wrong("lora_alpha", f"a number of at most {MAX_ALPHA:g}")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise wrong("use_rslora", "true or false")
    ranks, alphas = (config.get(field) or {} for field in ("rank_pattern", "alpha_pattern"))
    if not _is_pattern(ranks) or not all(_is_rank(one, limits) for one in ranks.values()):
        raise wrong("rank_pattern", f"ranks of 1 to {limits.rank} (max_lora_rank) by names of modules")
    if not _is_pattern(alphas) or not all(map(_is_alpha, alphas.values())):
        raise wrong("alpha_pattern", f"numbers of at most {MAX_ALPHA:g} by names of modules")
    targets = config.get("target_modules")
    if not isinstance(targets, str | list | None) or not all(isinstance(one, str) for one in targets or ()):
        raise wrong("target_modules", "a list of names")
    return _PeftConfig(
        rank=rank,
        alpha=float(alpha),
        has_root=bool(config.get("use_rslora")),
        ranks=_by_pattern(ranks, int),
        alphas=_by_pattern(alphas, float),
        targets=tuple(targets) if isinstance(targets, list) else None,
    )


def _is_rank(value: Any, limits: AdapterLimits) -> bool:
    return type(value) is int and 1 <= value <= limits.rank


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_ALPHA  # false for NaN


def _is_pattern(value: Any) -> bool:
    return isinstance(value, dict) and all(len(one) <= _MAX_NAME_CHARS and _PATTERN.fullmatch(one) for one in value)


def _by_pattern(patterns: Mapping[str, Any], kind: Callable[[Any], Value]) -> dict[str, tuple[int, Value]]:
    """If two patterns say the same in two forms, the first one counts."""
    found: dict[str, tuple[int, Value]] = {}
    for place, (pattern, value) in enumerate(patterns.items()):
        found.setdefault(pattern.replace("\\", ""), (place, kind(value)))
    return found


# --- modules --------------------------------------------------------------------------------------------------


def _modules(
    tensors: Sequence[StoredTensor], settings: _PeftConfig, matrix: Callable[[StoredTensor], AdapterMatrix]
) -> tuple[AdaptedModule, ...]:
    """Sorted by name. Raises ModelError unless the tensors are the pairs that the config describes."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name) if len(tensor.name) <= _MAX_NAME_CHARS else None
        if match is None:
            expected = "only pairs MODULE.lora_A.weight and MODULE.lora_B.weight of linear layers"
            raise ModelError(WEIGHTS, tensor.name, expected)
        name, part = match[1], match[2]
        if name.rpartition(".")[2] in _EMBEDDINGS:
            raise ModelError(WEIGHTS, tensor.name, "no embeddings and no output layer: their adapters are not computed")
        if part in found.setdefault(name, {}):
            raise ModelError(WEIGHTS, f"two tensors lora_{part} of {name}", "one, with or without base_model.model.")
        if tensor.dtype not in DTYPES:
            raise ModelError(WEIGHTS, f"{tensor.name} of dtype {tensor.dtype}", f"one of {', '.join(DTYPES)}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ModelError(WEIGHTS, f"{tensor.name} of shape {list(tensor.shape)}", "a matrix")
        found[name][part] = tensor
    if not found:
        raise ModelError(WEIGHTS, "no tensors", "the weights of an adapter")
    ends_of = {name: _ends(name) for name in sorted(found)}
    known = {end for ends in ends_of.values() for end in ends}
    # A name in target_modules may have no tensors: PEFT stores lists that were written for models of several families.
    for field, names in {"rank_pattern": settings.ranks, "alpha_pattern": settings.alphas}.items():
        if unknown := next((one for one in names if one not in known), None):
            raise ModelError(f"{CONFIG}: {field}", unknown, f"modules that have tensors in {WEIGHTS}")
    if settings.targets is not None:
        targets = frozenset(settings.targets)
        if unlisted := next((name for name, ends in ends_of.items() if targets.isdisjoint(ends)), None):
            raise ModelError(WEIGHTS, f"tensors of {unlisted}", f"modules that target_modules of {CONFIG} lists")
    return tuple(_module(name, found[name], ends, settings, matrix) for name, ends in ends_of.items())


def _module(
    name: str,
    parts: Mapping[str, StoredTensor],
    ends: Sequence[str],
    settings: _PeftConfig,
    matrix: Callable[[StoredTensor], AdapterMatrix],
) -> AdaptedModule:
    if len(parts) != 2:
        raise ModelError(WEIGHTS, f"only lora_{next(iter(parts))} of {name}", "lora_A and lora_B")
    rank, alpha = settings.rank_of(ends), settings.alpha_of(ends)
    a, b = parts["A"], parts["B"]
    for tensor, dimension in ((a, 0), (b, 1)):
        if tensor.shape[dimension] != rank:
            expected = f"rank {rank}, as {CONFIG} says"
            raise ModelError(WEIGHTS, f"{tensor.name} of shape {list(tensor.shape)}", expected)
    scaling = alpha / (math.sqrt(rank) if settings.has_root else rank)
    return AdaptedModule(name, rank, scaling, matrix(a), matrix(b))


def _ends(name: str) -> list[str]:
    """What names the module in a list or a pattern: its name, the ends that begin behind a dot, and `^` before the
    whole name."""
    parts = name.split(".")
    return [f"^{name}", *(".".join(parts[first:]) for first in range(len(parts)))]
