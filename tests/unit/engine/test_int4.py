"""4-bit weights: the product, and the checkpoints that store them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.cpu.kernels.rounding import INT4_BYTES
from pdserve.engine.cpu.ops import quantise
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.device import choose_precision
from pdserve.engine.load.load_plan import weight_bytes
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model import rounded as rounded_forms
from pdserve.engine.model.config import read_config
from pdserve.engine.model.forms import KernelLinear, make_linear
from pdserve.engine.model.linear import make_invariant
from pdserve.engine.model.parameters import Shard
from pdserve.engine.model.quantisation import PackedScheme, read_quantisation
from pdserve.engine.model.rounded import Int4Linear, Int8Linear, has_amx, has_int4_kernel, has_int4_tiles, round_groups
from pdserve.launch import serve

Json = dict[str, Any]
CPU = torch.device("cpu")
TOKENS = [5, 9, 200, 31, 7, 7, 120, 3]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in an int32, as AutoAWQ packs them


@pytest.fixture(params=["kernel", "torch", "amx"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How Int4Linear multiplies: on any machine also as on others."""
    if request.param == "kernel":
        if not has_int4_kernel():
            pytest.skip("needs numba, and AVX-512 VNNI or AVX2")
        monkeypatch.setattr(rounded_forms, "has_amx", lambda: False)
    else:
        monkeypatch.setattr(rounded_forms, "has_int4_kernel", lambda: False)
        monkeypatch.setattr(rounded_forms, "has_amx", lambda: request.param == "amx")
    return str(request.param)


def random_groups(num_outputs: int, num_inputs: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_outputs + size)
    counts = num_outputs, num_inputs // size
    rounded = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scale = (torch.rand(counts) * 1e-6 + 1e-9).half()  # so small that half precision needs the factor
    return rounded, scale.bfloat16().float(), torch.randint(0, 16, counts, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "size", "num_threads", "has_bias"),
    [
        (64, 64, 64, 1, True),
        (70, 128, 32, 2, False),
        (130, 256, 128, 2, True),
        (8, 96, 96, 1, False),
        (200, 120, 40, 2, True),
    ],
)
def test_the_product_is_that_of_the_rounded_numbers(
    num_outputs: int, num_inputs: int, size: int, num_threads: int, has_bias: bool, product: str
) -> None:
    rounded, scale, zero = random_groups(num_outputs, num_inputs, size)
    bias = torch.randn(num_outputs) * 1e-6 if has_bias else None
    linear = Int4Linear(rounded, scale, zero, bias)
    weight = (rounded.double() - zero.double().repeat_interleave(size, 1)) * scale.double().repeat_interleave(size, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = torch.randn(101, num_inputs) * 10 ** torch.linspace(-3, 3, 101)[:, None]
        for rows in (1, 2, 3, 4, 5, 6, 7, 48, 49, 101):
            quantised, scale_T1 = quantise(whole[:rows])
            x = (quantised.double() - 128) * scale_T1.double()
            expected = F.linear(x, weight, None if bias is None else bias.double())
            error = (linear(whole[:rows]).double() - expected).abs().amax(1)
            # 2^-24 of each term; on AMX the weights are rounded to bfloat16.
            relative = 2**-9 if product == "amx" else 2**-21
            largest = F.linear(x.abs(), weight.abs()).amax(1) + 1e-6 * has_bias
            assert (error <= relative * largest).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [32, 40, 64, 128])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(size: int, sign: int, product: str) -> None:
    """AVX2 adds products in 16 bits."""
    num_groups = 256 // size
    num_inputs = num_groups * size
    rounded, zero = torch.full((64, num_inputs), 15, dtype=torch.uint8), torch.zeros(64, num_groups, dtype=torch.uint8)
    linear = Int4Linear(rounded, torch.ones(64, num_groups), zero, None)
    for rows in (1, 3, 6, 49):
        found = linear(torch.full((rows, num_inputs), float(sign)))
        expected = torch.full((rows, 64), sign * 15.0 * num_inputs)
        torch.testing.assert_close(found, expected, rtol=2**-8 if product == "amx" else 1e-6, atol=0)


@pytest.mark.skipif(
    not has_int4_kernel() or (has_amx() and not has_int4_tiles(64)), reason="the rows are multiplied in two ways"
)
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    linear = make_linear(torch.randn(130, 200), None, "int4")
    assert make_invariant(linear, 200) is linear
    x = torch.randn(600, 200)  # more than two parts of the kernel for AMX
    whole = linear(x)
    for rows in (*range(1, 14), 255, 256, 257, 500):
        assert torch.equal(linear(x[9 : 9 + rows]), whole[9 : 9 + rows])


def test_rounding_is_to_the_nearest_and_keeps_zero() -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 192)
    weight[0] = 0
    weight[1] = weight[1].abs() + 3  # a range without zero
    weight[:, 5] = 0
    rounded, scale, zero = round_groups(weight)
    groups = weight.view(37, 3, 64)
    means = (rounded.view(37, 3, 64).float() - zero[..., None]) * scale[..., None]
    assert not means.view(37, 192)[:, 5].any()
    assert not means[0].any()
    span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    torch.testing.assert_close(scale, (span / 15).clamp(min=1e-12))
    # Half a step, or a whole one at an end that the rounded zero has moved.
    assert ((means - groups).abs() <= 1.001 * scale[..., None]).all()
    is_inside = (rounded > 0) & (rounded < 15)
    assert ((means - groups).abs() <= 0.501 * scale[..., None])[is_inside.view(37, 3, 64)].all()


def test_a_matrix_takes_at_most_the_bytes_of_the_estimate() -> None:
    linear = Int4Linear(*random_groups(256, 512, 32), None)
    assert linear._blocks.nbytes <= INT4_BYTES * 256 * 512


def words_of(integers: Tensor, axis: int) -> Tensor:
    """Packs eight neighbours along an axis, one after the other: the definition of the formats."""
    integers = integers.movedim(axis, -1).long()
    integers = F.pad(integers, (0, -integers.shape[-1] % 8))
    words = sum(integers[..., i::8] << 4 * i for i in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words < 2**31, words, words - 2**32).int().movedim(-1, axis).contiguous()


def awq_words(integers: Tensor) -> Tensor:
    return words_of(integers.view(len(integers), -1, 8)[:, :, AWQ_ORDER].flatten(1), 1)


def pack_gptq(rounded: Tensor, scale: Tensor, zero: Tensor, stored_less: int = 1) -> dict[str, Tensor]:
    size = rounded.shape[1] // scale.shape[1]
    return {
        "qweight": words_of(rounded.t(), 0),
        "scales": scale.t().half().contiguous(),
        "qzeros": words_of((zero.t().int() - stored_less) % 16, 1),
        "g_idx": (torch.arange(rounded.shape[1]) // size).int(),
        "bias": torch.zeros(len(rounded), dtype=torch.float16),
    }


def pack_gptq_v2(rounded: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    return pack_gptq(rounded, scale, zero, stored_less=0)


def pack_awq(rounded: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": awq_words(rounded.t()),
        "scales": scale.t().half().contiguous(),
        "qzeros": awq_words(zero.t()),
    }


def pack_symmetric(rounded: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": words_of(rounded, 1),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(rounded.shape),
    }


def pack_asymmetric(rounded: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    return pack_symmetric(rounded, scale, zero) | {"weight_zero_point": words_of(zero, 0)}


def compressed(strategy: str, size: int | None, *, symmetric: object, **weights: object) -> Json:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*layers.0.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy}
                | {"group_size": size, "dynamic": False}
                | weights,
            }
        },
    }


GPTQ: Json = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: Json = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
SCHEMES: dict[str, tuple[Json, Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]]] = {
    "gptq": (GPTQ, pack_gptq),
    "gptq-all-inputs": (GPTQ | {"group_size": -1}, pack_gptq),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, pack_gptq_v2),
    "gptq-some": (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"]]}, pack_gptq),
    "awq": (AWQ, pack_awq),
    "awq-old-names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "modules_to_not_convert": ["o_proj"]},
        pack_awq,
    ),
    "packed-symmetric": (compressed("group", 32, symmetric=True), pack_symmetric),
    "packed-asymmetric": (compressed("group", 32, symmetric=False), pack_asymmetric),
    "packed-channel": (compressed("channel", None, symmetric=True), pack_symmetric),
}


def pack_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Turns `folder` into a 4-bit checkpoint; returns one beside it that holds the dequantised weights."""
    settings, pack = SCHEMES[name]
    settings = settings | changes
    quantisation = read_quantisation(settings)
    reference = Path(shutil.copytree(folder, folder.parent / "reference"))
    tensors, exact = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        scheme = quantisation.scheme(module) if module.endswith("_proj") else None
        if scheme is None:
            tensors[key] = exact[key] = weight
            continue
        assert isinstance(scheme, PackedScheme)
        size = scheme.group or weight.shape[1]
        rounded, scale, zero = random_groups(weight.shape[0], weight.shape[1], size)
        scale = (scale * 3e4).half().bfloat16().float()
        if pack is pack_symmetric:
            zero.fill_(8)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in pack(rounded, scale, zero).items()}
        every = (one.float().repeat_interleave(size, 1) for one in (zero, scale))
        exact[key] = (rounded.float() - next(every)) * next(every)
    save_file(tensors, folder / "model.safetensors")
    save_file(exact, reference / "model.safetensors")
    set_quantisation(folder, settings)
    return reference


def set_quantisation(folder: Path, settings: Json) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def logprobs(engine: Engine) -> dict[int, float]:
    row = Row(tokens=TOKENS, start=0, blocks=[1], sample=Sampling(temperature=0.0, logprobs=8), history=TOKENS)
    [out] = engine.step([row])
    return dict(out.sampled[0].top)


def load(folder: Path, **settings: Any) -> Any:
    return load_weights(read_config(folder), open_checkpoint(folder), CPU, torch.float32, **settings)


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


@pytest.mark.parametrize("name", SCHEMES)
def test_float32_computes_what_dequantised_weights_compute(
    name: str, folder: Path, open_engine: Callable[..., Engine]
) -> None:
    reference = pack_folder(folder, name)
    assert logprobs(open_engine(folder)) == logprobs(open_engine(reference))


@pytest.mark.parametrize("name", SCHEMES)
def test_int4_keeps_the_checkpoints_own_groups(name: str, folder: Path) -> None:
    """The same products as those of the dequantised weights, but for the rounding of activations."""
    reference = pack_folder(folder, name)
    kept, exact = load(folder, rounding="int4"), load(reference)
    is_other = name == "gptq-some"
    int8 = (Int8Linear, KernelLinear)  # the second with AVX2 alone
    assert isinstance(kept.layers[2].attention_norm_E, Tensor)
    assert isinstance(kept.layers[2].qkv, int8 if is_other else Int4Linear)
    assert isinstance(kept.layers[2].mlp.gate_up, Int4Linear)
    assert isinstance(kept.head, int8)
    x = torch.randn(9, 64)
    quantised, scale = quantise(x)
    rounded = (quantised.float() - 128) * scale
    got, expected = kept.layers[2].mlp.gate_up(x), exact.layers[2].mlp.gate_up(rounded)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_auto_keeps_4_bits_where_the_cpu_multiplies_them(folder: Path) -> None:
    pack_folder(folder, "gptq")
    stored = read_config(folder).stored
    assert stored == "int4"
    assert choose_precision("auto", CPU, stored).name == ("int4" if has_int4_kernel() else "float32")
    assert read_config(folder.parent / "reference").stored == "float32"


def test_int4_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="int4 products are for CPUs"):
        choose_precision("int4", torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "changes"),  # half of down_proj's inputs would be one and a half groups
    [
        ("gptq", {"modules_in_block_to_quantize": ["self_attn", "up_proj", "gate_proj"]}),
        ("awq", {"modules_to_not_convert": ["down_proj"]}),
        ("packed-asymmetric", {"ignore": ["lm_head", "down_proj"]}),
    ],
)
def test_ranks_hold_their_parts(name: str, changes: Json, folder: Path) -> None:
    reference = pack_folder(folder, name, **changes)
    x = torch.randn(3, 64)
    parts = [load(folder, shard=Shard(rank, 2)).layers[1] for rank in range(2)]
    whole = [load(reference, shard=Shard(rank, 2)).layers[1] for rank in range(2)]
    for part, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.qkv(x), other.qkv(x))
        torch.testing.assert_close(part.o(x[:, :32]), other.o(x[:, :32]))
        torch.testing.assert_close(part.mlp.gate_up(x), other.mlp.gate_up(x))


def test_a_rank_cannot_hold_part_of_a_group(folder: Path) -> None:
    pack_folder(folder, "gptq", group_size=64, modules_in_block_to_quantize=["o_proj"])
    with pytest.raises(ModelError, match=r"inputs 0 to 32 for one rank, expected parts of a multiple of 64 inputs"):
        load(folder, shard=Shard(0, 2))


def test_groups_that_do_not_fill_the_inputs_are_refused(folder: Path) -> None:
    set_quantisation(folder, GPTQ | {"group_size": 128})
    with pytest.raises(ModelError, match=r"q_proj: got 64 inputs, expected a multiple of 128"):
        load(folder)


def test_a_scale_that_is_not_finite_is_refused(folder: Path) -> None:
    pack_folder(folder, "awq")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.scales"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj.scales: got a scale that is not finite"):
        load(folder)


def test_the_estimates_of_memory_know_4_bits(folder: Path, tiny: Callable[[str], Path]) -> None:
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    tables = 4 * 384 * 64
    seen = weight_bytes(read_config(folder), torch.float32, rounding="int4")
    assert seen == pytest.approx(0.6 * (3 * layer + 384 * 64) + tables, abs=1)
    pack_folder(folder, "gptq")
    config = read_config(folder)
    kept = weight_bytes(config, torch.float32, rounding="int4")
    assert kept == pytest.approx(0.6 * 3 * layer + 384 * 64 + tables, abs=1)  # the head is int8
    assert weight_bytes(config, torch.float32, rounding="none") == 4 * (3 * layer + 384 * 64) + tables
    worker = WorkerConfig(model=str(folder), worker_id="w", dtype="int4")
    stored = open_checkpoint(folder)
    planned = serve.weight_bytes(worker, stored)
    assert 0.9 * (kept - tables) < planned < 1.3 * kept
    assert planned < serve.weight_bytes(replace(worker, dtype="int8"), stored)


REFUSED: list[tuple[str, str, Json]] = [
    ("bits", "None", {"quant_method": "gptq"}),
    ("bits", "8", GPTQ | {"bits": 8}),
    ("desc_act", "True", GPTQ | {"desc_act": True}),
    ("group_size", "16", GPTQ | {"group_size": 16}),
    ("group_size", "None", {"quant_method": "gptq", "bits": 4}),
    ("checkpoint_format", "marlin", GPTQ | {"checkpoint_format": "marlin"}),
    ("dynamic", "layers", GPTQ | {"dynamic": {"+:layers.1": {"bits": 8}}}),
    ("bits", "None", {"quant_method": "awq"}),
    ("version", "gemv", AWQ | {"version": "gemv"}),
    ("zero_point", "False", AWQ | {"zero_point": False}),
    ("weights", "int of 8 bits", compressed("group", 32, symmetric=True, num_bits=8)),
    ("weights.strategy", "tensor", compressed("tensor", None, symmetric=True)),
    ("weights.actorder", "group", compressed("group", 32, symmetric=True, actorder="group")),
    ("weights.symmetric", "None", compressed("group", 32, symmetric=None)),
]


@pytest.mark.parametrize(("field", "seen", "value"), REFUSED)
def test_a_scheme_that_is_not_served_is_refused_by_name(field: str, seen: str, value: Json) -> None:
    with pytest.raises(ModelError, match=seen) as caught:
        read_quantisation(value)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize("has_bias", [True, False])
def test_int4_rounds_float_weights_at_load(has_bias: bool) -> None:
    weight, bias = torch.randn(96, 80), torch.randn(96) if has_bias else None
    linear = make_linear(weight.clone(), bias, "int4")
    assert isinstance(linear, Int4Linear)
    x = torch.randn(5, 80)
    exact = F.linear(x, weight, bias)
    assert ((linear(x) - exact).norm() / exact.norm()).item() < 0.15
