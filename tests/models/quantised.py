"""Tiny quantised checkpoints, in the forms that checkpoints on the Hub have, each beside one with the dequantised
weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle import Oracle
from tests.unit.engine.test_int4 import AWQ, GPTQ, pack_asymmetric, pack_awq, pack_gptq, pack_gptq_v2, pack_symmetric
from tests.unit.engine.test_int4 import compressed as packed
from tests.unit.engine.test_quantised import BLOCK, FP8, compressed, expanded, quantise, set_quantisation

Json = dict[str, Any]
Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # a matrix -> tensors by suffix, and what they mean

GROUP: Final = 32
SYMMETRIC: Final = GPTQ | {"sym": True}


def four_bits(pack: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]], *, group: int | None = GROUP) -> Pack:
    """Rounds to the nearest of 16 steps of each group; symmetric unless the form stores where zero is."""

    def form(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = group or weight.shape[1]
        groups = weight.double().view(len(weight), -1, size)
        if pack in (pack_awq, pack_asymmetric):
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = ((high - low) / 15).half().bfloat16().double()
            zero = (-low / scale).round().clamp(0, 15)
        else:
            scale = (groups.abs().amax(-1) / 7).half().bfloat16().double()
            zero = torch.full_like(scale, 8)
        rounded = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
        exact = ((rounded - zero[..., None]) * scale[..., None]).view_as(weight)
        words = pack(rounded.view_as(weight).to(torch.uint8), scale.float(), zero.to(torch.uint8))
        words.pop("bias", None)
        return words, exact.float()

    return form


def eight_bits(block: tuple[int | None, int | None], stored: torch.dtype, suffix: str = "weight_scale") -> Pack:
    def form(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rounded, scale = quantise(weight, block, stored)
        exact = (rounded.double() * expanded(scale.double(), block, weight.shape)).float()
        return {"weight": rounded, suffix: scale.view(-1) if block == (None, None) else scale}, exact

    return form


@dataclass(frozen=True, slots=True)
class Form:
    settings: Json  # quantization_config
    pack: Pack
    skipped: tuple[str, ...] = field(default=("lm_head",))  # parts of names of matrices that stay as they are


def _form(settings: Json, pack: Pack) -> Form:
    ignored = [one.removeprefix("re:.*").removesuffix(".*") for one in settings.get("ignore", ())]
    return Form(settings, pack, ("lm_head", *ignored))


FORMS: Final[dict[str, Form]] = {
    "gptq": Form(SYMMETRIC, four_bits(pack_gptq)),
    "gptq-v2": Form(SYMMETRIC | {"checkpoint_format": "gptq_v2"}, four_bits(pack_gptq_v2)),
    "gptq-all-inputs": Form(SYMMETRIC | {"group_size": -1}, four_bits(pack_gptq, group=None)),
    "awq": Form(AWQ, four_bits(pack_awq)),
    "packed-symmetric": _form(packed("group", GROUP, symmetric=True), four_bits(pack_symmetric)),
    "packed-asymmetric": _form(packed("group", GROUP, symmetric=False), four_bits(pack_asymmetric)),
    "packed-channel": _form(packed("channel", None, symmetric=True), four_bits(pack_symmetric, group=None)),
    "int-channel": _form(compressed("int", "channel"), eight_bits((1, None), torch.int8)),
    "int-tensor": _form(compressed("int", "tensor"), eight_bits((None, None), torch.int8)),
    "float-channel": _form(compressed("float", "channel"), eight_bits((1, None), torch.float8_e4m3fn)),
    "float-tensor": _form(compressed("float", "tensor"), eight_bits((None, None), torch.float8_e4m3fn)),
    "float-block": _form(
        compressed("float", "block", block_structure=[32, 32]), eight_bits((32, 32), torch.float8_e4m3fn)
    ),
    "fp8-tensor": Form(FP8 | {"ignored_layers": ["lm_head"]}, eight_bits((None, None), torch.float8_e4m3fn)),
    "fp8-block": Form(
        BLOCK | {"weight_block_size": [32, 32]}, eight_bits((32, 32), torch.float8_e4m3fn, "weight_scale_inv")
    ),
    "fbgemm": Form(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        eight_bits((1, None), torch.float8_e4m3fn),
    ),
}


def quantised(model: Path, form: Form, folder: Path, dtype: str = "bfloat16") -> Path:
    """Writes the quantised checkpoint of `model` to `folder`, and the dequantised one to a folder `exact` in it."""
    exact = folder / "exact"
    for one in (folder, exact):
        shutil.copytree(model, one)
    tensors, meaning = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not any(part in name for part in form.skipped):
            parts, meaning[name] = form.pack(weight)
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
        else:
            tensors[name] = weight.bfloat16()
            meaning[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors")
    save_file(meaning, exact / "model.safetensors")
    set_quantisation(folder, form.settings)
    change_config(folder, dtype=dtype)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))


@dataclass(frozen=True, slots=True)
class RoundedOracle:
    """Makes an oracle of the dequantised weights, whose quantised matrices round their inputs as the kernels do: each
    token by its largest value."""

    rounding: str  # int8, fp8, or empty
    skipped: tuple[str, ...]

    def __call__(self, folder: Path) -> Oracle:
        oracle = Oracle(folder)
        for name, module in oracle._model.named_modules():
            if self.rounding and name.endswith("_proj") and not any(part in name for part in self.skipped):
                module.register_forward_pre_hook(lambda _, given: (self.rounded(given[0]),))
        return oracle

    def rounded(self, x: Tensor) -> Tensor:
        limit = 127.0 if self.rounding == "int8" else 448.0
        scale = x.abs().amax(-1, keepdim=True) / limit
        ratio = x / scale
        return (ratio.round() if self.rounding == "int8" else ratio.to(torch.float8_e4m3fn).double()) * scale
