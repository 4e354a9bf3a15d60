"""Folders of LoRA adapters: what is read, and that nothing else and no hostile folder is."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.core.adapters import Adapter, AdapterLimits
from pdserve.core.errors import ModelError
from pdserve.engine import adapters
from pdserve.engine.adapters import (
    CONFIG,
    MAX_HEADER_BYTES,
    WEIGHTS,
    LoadedAdapters,
    read_adapter,
)
from tests.support.adapters import PREFIX, config_of, file_of, tensors_of, with_header, write_adapter

LIMITS = AdapterLimits(rank=8, num_bytes=2**16)
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
MODULES = {Q: (8, 12), V: (8, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", MODULES)


def read(folder: Path) -> Adapter:
    return read_adapter("a", folder, LIMITS)


def test_an_adapter_is_read_as_it_was_written(folder: Path) -> None:
    adapter = read(folder)
    assert (adapter.name, adapter.folder, adapter.rank, adapter.num_bytes) == ("a", folder, 2, 4 * 2 * (20 + 12))
    assert len(adapter.fingerprint) == 32
    tensors = tensors_of(MODULES)
    assert [(one.name, one.rank, one.scaling) for one in adapter.modules] == [(Q, 2, 2.0), (V, 2, 2.0)]
    for module in adapter.modules:
        for stored in (module.a, module.b):
            assert bytes(stored.data) == tensors[stored.name].tobytes()


def test_the_prefix_of_peft_may_be_missing(folder: Path) -> None:
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors_of(MODULES).items()}
    (folder / WEIGHTS).write_bytes(file_of(tensors))
    assert [one.name for one in read(folder).modules] == [Q, V]


@pytest.mark.parametrize(
    ("changed", "scalings"),
    [
        ({"lora_alpha": 3}, [1.5, 1.5]),
        ({"lora_alpha": 3, "use_rslora": True}, [3 / 2**0.5, 3 / 2**0.5]),
        ({"alpha_pattern": {"q_proj": 8.0}}, [4.0, 2.0]),
        ({"alpha_pattern": {f"^{V}": 8, "v_proj": 1}}, [2.0, 4.0]),
        ({"alpha_pattern": {r"1\.self_attn\.v_proj": 8, "1.self_attn.v_proj": 1}}, [2.0, 4.0]),
        ({"target_modules": "all-linear", "alpha_pattern": None, "rank_pattern": None}, [2.0, 2.0]),
        ({"target_modules": ["q_proj", "v_proj", "c_attn"]}, [2.0, 2.0]),
        ({"target_modules": [Q, "self_attn.v_proj"], "init_lora_weights": "gaussian"}, [2.0, 2.0]),
        ({"lora_alpha": 0}, [0.0, 0.0]),
    ],
)
def test_scalings_are_those_of_peft(folder: Path, changed: dict[str, Any], scalings: list[float]) -> None:
    write_adapter(folder, MODULES, **changed)
    assert [one.scaling for one in read(folder).modules] == scalings


def test_modules_may_have_ranks_of_their_own(folder: Path) -> None:
    tensors = tensors_of({Q: MODULES[Q]}, rank=8) | tensors_of({V: MODULES[V]})
    (folder / WEIGHTS).write_bytes(file_of(tensors))
    (folder / CONFIG).write_text(json.dumps(config_of(MODULES, rank_pattern={"q_proj": 8})))
    adapter = read(folder)
    assert adapter.rank == 8
    assert [(one.rank, one.scaling) for one in adapter.modules] == [(8, 0.5), (2, 2.0)]


def test_the_fingerprint_is_of_all_that_is_computed(folder: Path, tmp_path: Path) -> None:
    first = read(folder).fingerprint
    assert read(write_adapter(tmp_path / "same", MODULES)).fingerprint == first
    config = config_of(MODULES)
    (folder / CONFIG).write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert read(folder).fingerprint == first, "the order of fields means nothing"
    others = [
        read(write_adapter(folder, MODULES, **changed)).fingerprint for changed in ({"lora_alpha": 5}, {"seed": 1})
    ]
    data = bytearray(file_of(tensors_of(MODULES)))
    for at in (-1, -200):
        data[at] ^= 1
        write_adapter(folder, MODULES)
        (folder / WEIGHTS).write_bytes(data)
        others.append(read(folder).fingerprint)
    assert len({first, *others}) == 5


def test_a_folder_that_changes_later_changes_no_adapter(folder: Path) -> None:
    adapter, tensors = read(folder), tensors_of(MODULES)
    write_adapter(folder, MODULES, seed=1)
    assert read(folder).fingerprint != adapter.fingerprint
    stored = adapter.modules[0].a
    assert bytes(stored.data) == tensors[stored.name].tobytes()


# --- configs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", None),
        ("r", 0),
        ("r", -1),
        ("r", 9),
        ("r", 10**300),
        ("r", True),
        ("r", 2.0),
        ("r", "2"),
        ("r", float("nan")),
        ("r", [2]),
        ("lora_alpha", None),
        ("lora_alpha", "4"),
        ("lora_alpha", True),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", -1e7),
        ("lora_alpha", 10**400),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("use_dora", "yes"),
        ("use_rslora", 1),
        ("lora_bias", True),
        ("use_qalora", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", ["experts.down_proj"]),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"a": 1}),
        ("something_new", 1),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", 1),
        ("rank_pattern", {"q_proj": 9}),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": True}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"absent": 2}),
        ("rank_pattern", {"proj": 2}),
        ("rank_pattern", {"(a+)+$": 2}),
        ("rank_pattern", {"q_proj" * 100: 2}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"q_proj": float("nan")}),
        ("alpha_pattern", {".*": 2}),
        ("alpha_pattern", {"q.proj": 2}),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", [1]),
    ],
)
def test_a_config_that_would_not_be_computed_is_rejected_by_name(folder: Path, field: str, value: Any) -> None:
    write_adapter(folder, MODULES, **{field: value})
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert caught.value.field == f"{CONFIG}: {field}"
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "_proj"]])
def test_tensors_of_an_unlisted_module_are_rejected(folder: Path, targets: list[str]) -> None:
    write_adapter(folder, MODULES, target_modules=targets)
    with pytest.raises(ModelError, match=f"tensors of {V}, expected modules that target_modules"):
        read(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b'{"r": 2, "r": 4}',
        b" " * (2**20 + 1),
    ],
)
def test_a_config_that_is_no_plain_object_is_rejected(folder: Path, text: bytes) -> None:
    (folder / CONFIG).write_bytes(text)
    with pytest.raises(ModelError, match=CONFIG):
        read(folder)


# --- weights --------------------------------------------------------------------------------------------------


def header_of(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A whole file whose header was changed."""
    data = file_of(tensors_of(MODULES))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    return with_header(json.dumps(header if changed is None else changed).encode(), data[8 + length :])


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: {name.replace(old, new): entry for name, entry in header.items()}


def put(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """In the entry of the first tensor."""
    return lambda header: next(iter(header.values())).update({field: value})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 8,
        (2**63).to_bytes(8, "little") + b"{}",
        with_header(b"{}"),
        with_header(b"[]"),
        with_header(b"{" * 50_000),
        with_header(b'{"__metadata__": {}}'),
        with_header(b'{"__metadata__": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        file_of(tensors_of(MODULES))[:-1],
        file_of(tensors_of(MODULES)) + b"\x00",
        header_of(put("dtype", "I64")),
        header_of(put("dtype", "I32")),
        header_of(put("dtype", "F64")),
        header_of(put("dtype", "BF16")),
        header_of(put("dtype", None)),
        header_of(put("shape", [-2, -8])),
        header_of(put("shape", [2**40, 2**40])),
        header_of(put("shape", [16])),
        header_of(put("shape", [2, 2, 4])),
        header_of(put("shape", [8, 2])),
        header_of(put("shape", [1] * 100_000)),
        header_of(put("shape", [float("nan"), 2])),
        header_of(put("shape", [True, 16])),
        header_of(put("data_offsets", [0, 2**70])),
        header_of(put("data_offsets", [64, 0])),
        header_of(put("data_offsets", [-64, 0])),
        header_of(put("data_offsets", [64, 128])),
        header_of(lambda header: dict(list(header.items())[1:])),
        header_of(renamed("lora_A.weight", "lora_A.bias")),
        header_of(renamed("lora_A.weight", "lora_magnitude_vector")),
        header_of(renamed("lora_A.weight", "lora_embedding_A")),
        header_of(renamed("lora_A.weight", "base_layer.weight")),
        header_of(renamed("self_attn.q_proj", "../q_proj")),
        header_of(renamed("q_proj", "q_proj" * 200)),
        header_of(renamed(Q, "a." * 40 + "q_proj")),
        header_of(renamed(Q, "lm_head")),
        header_of(renamed(Q, "model.embed_tokens")),
        header_of(renamed(".v_proj", ".v_proj\u0000")),
    ],
)
def test_wrong_weights_are_rejected(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert len(str(caught.value)) < 2000


def test_a_tensor_named_twice_is_rejected(folder: Path) -> None:
    data = file_of(tensors_of(MODULES))
    length = int.from_bytes(data[:8], "little")
    first = json.dumps(next(iter(json.loads(data[8 : 8 + length]).items()))[0]).encode()
    entry = b'{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}'
    twice = with_header(b"{" + first + b":" + entry + b"," + data[9 : 8 + length], data[8 + length :])
    (folder / WEIGHTS).write_bytes(twice)
    with pytest.raises(ModelError, match="stands twice"):
        read(folder)


def test_one_module_under_two_names_is_rejected(folder: Path) -> None:
    tensors = tensors_of({Q: (8, 12)})
    tensors |= {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    (folder / WEIGHTS).write_bytes(file_of(tensors))
    (folder / CONFIG).write_text(json.dumps(config_of({Q: None})))
    with pytest.raises(ModelError, match="two tensors lora_A"):
        read(folder)


def test_sizes_are_checked_before_data_are_read(folder: Path) -> None:
    """Files with holes, which take no room and would take minutes."""
    file = folder / WEIGHTS
    os.truncate(file, 2**40)
    with pytest.raises(ModelError, match=f"at most {LIMITS.num_bytes}"):
        read(folder)
    file.write_bytes((2**39).to_bytes(8, "little"))
    os.truncate(file, 2**40)
    with pytest.raises(ModelError, match=f"a header of {2**39} bytes, expected at most {MAX_HEADER_BYTES}"):
        read(folder)
    os.truncate(folder / CONFIG, 2**40)
    with pytest.raises(ModelError, match="at most 1048576 bytes"):
        read(folder)


def test_the_number_of_tensors_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_TENSORS", 3)
    with pytest.raises(ModelError, match="4 tensors, expected at most 3"):
        read(folder)


def test_many_patterns_and_modules_take_little_time(folder: Path) -> None:
    """Each module with each pattern would be 10^8 pairs."""
    modules = {f"model.layers.{at}.q_proj": (1, 1) for at in range(2000)}
    patterns = dict.fromkeys(modules, 1)
    write_adapter(folder, modules, rank=1, alpha_pattern=patterns, rank_pattern=patterns)
    assert len(read(folder).modules) == 2000


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_links_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="no link: copy the file"):
        read(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_pipes_folders_and_absent_files_are_rejected(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name}.*No such file"):
        read(folder)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="no regular file"):
        read(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ModelError, match="no regular file"):
        read(folder)


@pytest.mark.parametrize("pickled", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_not_opened(folder: Path, pickled: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / pickled).write_bytes(pickle.dumps({}))
    with pytest.raises(ModelError, match=f"{pickled}: got a pickle"):
        read(folder)


@pytest.mark.parametrize("path", ["absent", "adapter/adapter_config.json", "a\0b"])
def test_a_path_that_is_no_folder_is_rejected(folder: Path, path: str) -> None:
    with pytest.raises(ModelError, match="a folder that can be read"):
        read(folder.parent / path)


@pytest.mark.parametrize("change", [-64, 64])
def test_a_file_that_changes_its_size_while_it_is_read_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """After the header was checked, as a writer would. The weights are larger than a buffer of the file."""
    write_adapter(folder, {Q: (512, 512)}, rank=8)
    real = adapters.tensors_of

    def changed(file: Path, size: int, *more: Any) -> Any:
        os.truncate(file, size + change)
        return real(file, size, *more)

    monkeypatch.setattr(adapters, "tensors_of", changed)
    with pytest.raises(ModelError, match="has changed while it was read"):
        read(folder)


# --- loaded adapters ------------------------------------------------------------------------------------------


def test_number_and_bytes_of_loaded_adapters_are_limited(folder: Path) -> None:
    adapter = read(folder)
    loaded = LoadedAdapters(2 * adapter.num_bytes, 3)
    others = [dataclasses.replace(adapter, fingerprint=f"{at:032x}") for at in range(3)]
    for one in others[:2]:
        loaded.check_room(one)
        loaded.add(one)
    with pytest.raises(ModelError, match="at most max_lora_bytes"):
        loaded.check_room(others[2])
    small = dataclasses.replace(others[2], num_bytes=0)
    loaded.check_room(small)
    loaded.add(small)
    with pytest.raises(ModelError, match="at most max_lora_adapters, 3"):
        loaded.check_room(small)
    loaded.remove(others[0].fingerprint)
    loaded.remove(others[0].fingerprint)
    loaded.check_room(others[0])
    assert others[0].fingerprint not in loaded
    assert others[1].fingerprint in loaded


def test_values_may_be_in_other_orders(folder: Path) -> None:
    tensors = dict(reversed(tensors_of(MODULES).items()))
    (folder / WEIGHTS).write_bytes(file_of(tensors))
    adapter = read(folder)
    assert np.frombuffer(adapter.modules[0].b.data, np.float32).size == 24
