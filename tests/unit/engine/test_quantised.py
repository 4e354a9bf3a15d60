"""Checkpoints with 8-bit weights compute exactly as their dequantised weights do, or are rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.core.errors import ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load import weights as weights_module
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model import forms
from pdserve.engine.model.config import read_config
from pdserve.engine.model.linear import Linear, Rounding
from pdserve.engine.model.quantisation import PLAIN, ModuleRule, read_quantisation
from pdserve.engine.model.rounded import weight_levels

CPU = torch.device("cpu")
Json = dict[str, Any]
TOKENS = [5, 9, 200, 31, 7, 7, 120, 3]


def compressed(kind: str, strategy: str, **weights: object) -> Json:
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*layers.0.mlp.*"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": kind},
                "weights": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
                | weights,
            }
        },
    }


FP8: Json = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCK = FP8 | {"weight_block_size": [40, 24]}  # Neither divides a matrix of the tiny model.
SCHEMES: dict[str, tuple[Json, tuple[int | None, int | None], torch.dtype]] = {
    "fp8-tensor": (FP8 | {"ignored_layers": ["lm_head"]}, (None, None), torch.float8_e4m3fn),
    "fp8-block": (BLOCK, (40, 24), torch.float8_e4m3fn),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, (1, None), torch.float8_e4m3fn),
    "float-channel": (compressed("float", "channel"), (1, None), torch.float8_e4m3fn),
    "float-tensor": (compressed("float", "tensor"), (None, None), torch.float8_e4m3fn),
    "float-block": (compressed("float", "block", block_structure=[16, 64]), (16, 64), torch.float8_e4m3fn),
    "int-channel": (compressed("int", "channel"), (1, None), torch.int8),
    "int-tensor": (compressed("int", "tensor"), (None, None), torch.int8),
    "int-group": (compressed("int", "group", group_size=16), (1, 16), torch.int8),
}


def expanded(scale: Tensor, block: tuple[int | None, int | None], shape: torch.Size) -> Tensor:
    rows, columns = (shape[axis] if size is None else size for axis, size in enumerate(block))
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def quantise(weight: Tensor, block: tuple[int | None, int | None], stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises by the definition, one block after the other, in float64."""
    rows, columns = (weight.shape[axis] if size is None else size for axis, size in enumerate(block))
    limit = 448.0 if stored == torch.float8_e4m3fn else 127.0
    parts = [[part.abs().max() for part in row.split(columns, 1)] for row in weight.double().split(rows, 0)]
    scale = (torch.tensor(parts, dtype=torch.float64) / limit).float()
    ratio = (weight.double() / expanded(scale.double(), block, weight.shape)).clamp(-limit, limit)
    return (ratio.round() if stored == torch.int8 else ratio.float()).to(stored), scale


def quantise_folder(folder: Path, name: str) -> Path:
    """Makes `folder` a quantised checkpoint, and returns another folder with the dequantised weights."""
    settings, block, stored = SCHEMES[name]
    quantisation = read_quantisation(settings)
    reference = Path(shutil.copytree(folder, folder.parent / "reference"))
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for key, weight in list(tensors.items()):
        module = key.removesuffix(".weight")
        if not module.endswith("_proj") or quantisation.scheme(module) is None:
            exact[key] = weight
            continue
        tensors[key], scale = quantise(weight, block, stored)
        tensors[f"{module}.weight_scale" + ("_inv" if name == "fp8-block" else "")] = (
            scale.view(()) if name == "fp8-tensor" else scale
        )
        exact[key] = (tensors[key].double() * expanded(scale.double(), block, weight.shape)).float()
    save_file(tensors, folder / "model.safetensors")
    save_file(exact, reference / "model.safetensors")
    set_quantisation(folder, settings)
    return reference


def set_quantisation(folder: Path, settings: Json) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def logprobs(engine: Engine) -> list[tuple[int, float]]:
    row = Row(tokens=TOKENS, start=0, blocks=[1], sample=Sampling(temperature=0.0, logprobs=8), history=TOKENS)
    [out] = engine.step([row])
    return list(out.sampled[0].top)


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def load(folder: Path, **settings: Any) -> Any:
    return load_weights(read_config(folder), open_checkpoint(folder), CPU, torch.float32, **settings)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", SCHEMES)
def test_quantised_weights_match_dequantised_ones(name: str, folder: Path, open_engine: Callable[..., Engine]) -> None:
    before = logprobs(open_engine(folder))
    reference = quantise_folder(folder, name)
    after = logprobs(open_engine(folder))
    assert after == logprobs(open_engine(reference))
    assert after != before  # The rounding is coarse enough that a loader without it would fail.


def test_half_precision_scales_are_widened_first(folder: Path) -> None:
    quantise_folder(folder, "int-channel")
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(folder, lambda all_: all_.update({f"{name}_scale": all_[f"{name}_scale"].bfloat16()}))
    stored = load_file(folder / "model.safetensors")
    expected = stored[name].double() * stored[f"{name}_scale"].double()
    assert torch.equal(load(folder).layers[1].o(torch.eye(64)).T, expected.float())


def test_int8_keeps_the_checkpoints_own_integers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise_folder(folder, "int-channel")
    # A channel whose largest integer is 100. Rounding it again would give another scale and other integers.
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(folder, lambda all_: all_.update({name: all_[name].clamp(-100, 100)}))
    seen: list[tuple[Tensor, Tensor]] = []
    store = forms.store

    def noting(rounding: Rounding, weights: tuple[Tensor, ...], bias: Tensor | None) -> Linear:
        if rounding == "int8":
            seen.append((weights[0].clone(), weights[1].clone()))
        return store(rounding, weights, bias)

    for module in (forms, weights_module):
        monkeypatch.setattr(module, "store", noting)
    load(folder, rounding="int8")
    stored = load_file(folder / "model.safetensors")
    if weight_levels() == 127:
        at = "model.layers.1.self_attn."
        [qkv, o, gate_up, down] = seen[5:9]  # The head and layer 0 come first.
        names = [f"{at}{part}_proj" for part in "qkv"]
        assert torch.equal(qkv[0], torch.cat([stored[f"{one}.weight"] for one in names]))
        assert torch.equal(qkv[1], torch.cat([stored[f"{one}.weight_scale"] for one in names]).flatten())
        assert torch.equal(down[0], stored[name])
        assert torch.equal(down[1], stored[f"{name}_scale"].flatten())
        assert len(o) == len(gate_up) == 2
    else:  # Products of 8 bits would overflow there.
        assert all(int(rounded.abs().max()) <= 63 for rounded, _ in seen)


@pytest.mark.parametrize("name", ["fp8-block", "int-group", "int-channel"])
def test_int8_rounds_the_dequantised_weights(name: str, folder: Path, open_engine: Callable[..., Engine]) -> None:
    reference = quantise_folder(folder, name)
    stored, again = (logprobs(open_engine(one, dtype="int8")) for one in (folder, reference))
    # A channel that contains 127 is unchanged by rounding.
    assert dict(stored) == pytest.approx(dict(again), abs=1e-4 if name == "int-channel" else 0.0)


SCALE = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_an_impossible_scale_is_rejected(folder: Path, value: float) -> None:
    quantise_folder(folder, "float-channel")
    rewrite(folder, lambda all_: all_[SCALE][3].fill_(value))
    with pytest.raises(ModelError, match=rf"{SCALE}: got a scale of {value:g}, expected positive finite"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_: all_.pop(SCALE), rf"{SCALE}: got no such tensor"),
        (lambda all_: all_.update({SCALE: torch.ones(3, 1)}), rf"{SCALE}: got shape \[3, 1\], expected \[96, 1\] or"),
        (
            lambda all_: all_.update({SCALE: torch.ones(96, 1, dtype=torch.int8)}),
            rf"{SCALE}: got dtype I8, expected F32",
        ),
        (
            lambda all_: all_.update({SCALE.removesuffix("_scale"): torch.ones(96, 64)}),
            r"up_proj.weight: got dtype F32, expected F8_E4M3",
        ),
        (
            lambda all_: all_.update({"model.layers.1.mlp.up_proj.input_scale": torch.ones(1)}),
            r"up_proj.input_scale: got a tensor that nothing uses",
        ),
    ],
)
def test_a_quantised_matrix_in_a_wrong_form_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    quantise_folder(folder, "float-channel")
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load(folder)


REFUSED: list[tuple[str, str, Any]] = [
    ("quantization_config", "a list", []),
    *(("quantization_config.quant_method", name, {"quant_method": name}) for name in ("hqq", "bitsandbytes")),
    ("quantization_config.quant_method", "mxfp4", {"quant_method": "mxfp4"}),
    ("quantization_config.quant_method", "None", {"bits": 4}),
    ("quantization_config.activation_scheme", "static", FP8 | {"activation_scheme": "static"}),
    ("quantization_config.fmt", "e5m2", FP8 | {"fmt": "e5m2"}),
    ("weight_block_size", "128", FP8 | {"weight_block_size": 128}),
    ("weight_block_size", "0", FP8 | {"weight_block_size": [0, 128]}),
    ("quantization_config.ignored_layers", "lm_head", FP8 | {"ignored_layers": "lm_head"}),
    ("quantization_config.format", "marlin-24", compressed("int", "channel") | {"format": "marlin-24"}),
    ("quantization_config.config_groups", "None", compressed("int", "channel") | {"config_groups": None}),
    ("quantization_config.config_groups.a", "3", compressed("int", "channel") | {"config_groups": {"a": 3}}),
    ("quantization_config.kv_cache_scheme", "KV", compressed("int", "channel") | {"kv_cache_scheme": {"num_bits": 8}}),
    (
        "quantization_config.sparsity_config",
        "sparse-24",
        compressed("int", "channel") | {"sparsity_config": {"format": "sparse-24"}},
    ),
    ("quantization_config.ignore", r"re:\(", compressed("int", "channel") | {"ignore": ["re:("]}),
    ("group_0.weights.symmetric", "False", compressed("int", "channel", symmetric=False)),
    ("group_0.weights", "int of 4 bits", compressed("int", "channel", num_bits=4)),
    ("group_0.weights.strategy", "group", compressed("int", "group", group_size=None)),
    ("group_0.weights.strategy", "tensor_group", compressed("int", "tensor_group")),
    ("group_0.weights.actorder", "group", compressed("int", "group", group_size=8, actorder="group")),
    ("group_0.weights.block_structure", "None", compressed("float", "block")),
]


@pytest.mark.parametrize(("field", "seen", "value"), REFUSED)
def test_a_scheme_that_is_not_served_is_refused_by_name(field: str, seen: str, value: Any) -> None:
    with pytest.raises(ModelError, match=seen) as caught:
        read_quantisation(value)
    assert caught.value.field.endswith(field)


def test_static_activations_are_refused() -> None:
    value = compressed("int", "channel")
    value["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    with pytest.raises(ModelError, match=r"input_activations: got static scales of activations"):
        read_quantisation(value)


def test_rules_match_module_names() -> None:
    module = "model.layers.3.mlp.gate_proj"
    assert all(
        ModuleRule(text).matches(module) for text in ("Linear", module, "gate_proj", "model.layers.3", "re:.*gate.*")
    )
    assert not any(ModuleRule(text).matches(module) for text in ("gate", "mlp.gate", "layers.31", "lm_head", "re:gate"))
    assert PLAIN.scheme(module) is None
