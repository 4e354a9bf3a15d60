"""Quantised checkpoints and KV of the engine vllm: exact, or refused by name.

Exact means two things. Our engine computes what vLLM's own `LLM` computes, token for token. And what that computes is
what the stored integers mean: transformers in float64 with the dequantised weights, which also rounds the activations
where the kernel does.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtransfer.protocol.grants import fingerprint_of
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine
from tests.models.conftest import open_vllm
from tests.models.far_oracle import FarOracle
from tests.models.quantised import FORMS, RoundedOracle, change_config, quantised
from tests.models.test_exactness import decoded, row_of
from tests.models.tiny import COMMON, TINY, build
from tests.unit.engine.test_quantised import compressed

pytestmark = pytest.mark.timeout(900)

Tiny = Callable[[str], Path]
MakePrompt = Callable[..., list[int]]

TOKENS: Final = 16
HAS_AMX: Final = torch.cpu._is_amx_tile_supported()
HAS_AVX512: Final = torch.cpu._is_avx512_supported()
#: Form -> dtype, and how the kernel rounds activations. vLLM multiplies 4-bit weights in half precision only.
SERVED: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(("gptq", "gptq-all-inputs", "awq", "packed-asymmetric", "packed-channel"), ("float16", "")),
    "int-channel": ("float32", "int8"),
    "int-tensor": ("float32", "int8"),
}
#: A near-tie, in standard deviations of the logits: three times the largest error at 70 positions in float16, which
#: rounds every result by up to 2^-12. In float32 it is an activation at the edge of two integers, rounded either way.
TIE: Final = {"float16": 0.1, "float32": 0.05}


@pytest.fixture(scope="module")
def form_of(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = quantised(tiny("llama"), FORMS[name], tmp_path_factory.mktemp("forms") / name)
        return built[name]

    return get


@pytest.fixture
def copy_of(form_of: Callable[[str], Path], tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a form, or of a tiny model, to change."""
    return lambda name: Path(
        shutil.copytree(form_of(name) if name in FORMS else tiny(name), tmp_path / name, ignore=lambda *_: ["exact"])
    )


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def answer(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs: the whole prompt in a step, then a token in each."""
    history, found = list(prompt), []
    blocks, start = list(range(engine.spec.num_blocks)), 0
    for _ in range(count):
        sample = Sampling(temperature=0.0, logprobs=0)
        [out] = engine.step([replace(row_of(history, start, blocks, len(prompt)), sample=sample)])[0].sampled
        start = len(history)
        history.append(out.token_id)
        found.append(out.logprob)
    return history[len(prompt) :], found


# --- exactness ------------------------------------------------------------------------------------------------


def alone(folder: Path, dtype: str, prompts: list[list[int]], **settings: Any) -> list[tuple[list[int], list[float]]]:
    """The tokens and logprobs of vLLM's own LLM, one prompt at a time. Runs in a process of its own."""
    import os

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    torch.set_num_threads(1)
    from vllm import LLM, SamplingParams

    from pdserve.engine.vllm.start import _UNREADABLE, _hidden

    with _hidden(_UNREADABLE):  # as our engine does
        llm = LLM(
            str(folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            block_size=32,
            max_model_len=COMMON["max_position_embeddings"],
            max_num_batched_tokens=COMMON["max_position_embeddings"],
            disable_log_stats=True,
            **settings,
        )
    asked = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    outs = [llm.generate([{"prompt_token_ids": one}], asked, use_tqdm=False)[0].outputs[0] for one in prompts]
    return [
        (list(one.token_ids), [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)])
        for one in outs
    ]


def of_vllm(folder: Path, dtype: str, prompts: list[list[int]], **settings: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(alone, folder, dtype, prompts, **settings).result()


@pytest.mark.parametrize("name", SERVED)
def test_a_form_computes_what_its_integers_mean(
    name: str, form_of: Callable[[str], Path], serve: Any, request_of: Any, make_prompt: MakePrompt
) -> None:
    dtype, rounding = SERVED[name]
    if dtype == "float16" and not HAS_AVX512:
        with pytest.raises(ModelError, match="4-bit weights need AVX-512"):
            open_vllm(form_of(name), dtype=dtype)
        return
    prompts = [make_prompt(length) for length in (1, 16, 63, 150)]
    asked = Sampling(temperature=0.0, max_tokens=TOKENS)
    engine = open_vllm(form_of(name), dtype=dtype)
    try:
        requests = [request_of(prompt=prompt, sampling=asked, arrival=2 * at) for at, prompt in enumerate(prompts)]
        got = serve(engine, requests, chunk=48)
    finally:
        engine.close()
    oracle = FarOracle(form_of(name) / "exact", RoundedOracle(rounding, FORMS[name].skipped))
    oracle.assert_exact(prompts, got, tie=TIE[dtype], most_ties=0.2)


def test_matrices_of_fp8_round_their_inputs_by_token(form_of: Callable[[str], Path], make_prompt: MakePrompt) -> None:
    """Judged matrix by matrix: an input at the edge of two values of fp8 changes by a sixteenth, so the next layers
    round other inputs than those of an oracle."""
    exact = load_file(form_of("float-channel") / "exact" / "model.safetensors")
    parts = {"qkv": "qkv", "o": "o", "gate_up": ("gate", "up"), "down": ("down",)}
    rounding, errors = RoundedOracle("fp8", ()), {}
    engine: Any = open_vllm(form_of("float-channel"), dtype="float32")

    def judge(name: str, weight: Tensor, given: Tensor, got: Tensor) -> None:
        expected = rounding.rounded(given.double()) @ weight.double().T
        errors[name] = (got.double() - expected).abs().amax(-1) / expected.std()

    def hook_of(name: str, weight: Tensor) -> Callable[..., None]:
        return lambda _, given, got: judge(name, weight, given[0], got[0])

    try:
        for name, module in engine._runner.model.named_modules():
            at, _, last = name.rpartition(".")
            if last.endswith("_proj") and ".layers.0.mlp" not in name:
                weights = [exact[f"{at}.{part}_proj.weight"] for part in parts[last.removesuffix("_proj")]]
                module.register_forward_hook(hook_of(name, torch.cat(weights)))
        answer(engine, make_prompt(70), 1)
    finally:
        engine.close()
    assert len(errors) == 4 * COMMON["num_hidden_layers"] - 2
    found = torch.cat(list(errors.values()))
    assert (found > 1e-5).float().mean() < 0.05
    assert found.max() < 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("awq", "float16"), ("int-channel", "float32"), ("float-channel", "bfloat16"), ("llama", "bfloat16")],
)
def test_the_adapter_computes_what_vllms_own_llm_computes(
    name: str, dtype: str, form_of: Callable[[str], Path], tiny: Tiny, make_prompt: MakePrompt
) -> None:
    """The same steps, so the same bits: no near-tie is excused. Logprobs differ by the rounding of a log_softmax."""
    if name == "awq" and not HAS_AVX512:
        pytest.skip("4-bit weights need AVX-512")
    folder = form_of(name) if name in FORMS else tiny(name)
    prompts = [make_prompt(length) for length in (5, 70)]
    engine = open_vllm(folder, dtype=dtype)
    try:
        got = [answer(engine, prompt, TOKENS) for prompt in prompts]
    finally:
        engine.close()
    assert_same(got, of_vllm(folder, dtype, prompts))


def assert_same(got: Any, expected: Any) -> None:
    for (ours, our_logprobs), (theirs, their_logprobs) in zip(got, expected, strict=True):
        assert ours == theirs
        assert our_logprobs == pytest.approx(their_logprobs, abs=1e-5)


# --- KV -------------------------------------------------------------------------------------------------------

needs_fp8_kv = pytest.mark.skipif(not HAS_AVX512, reason="vLLM's fp8 KV on a CPU needs AVX-512")


def with_kv_scales(folder: Path, scale: float) -> Path:
    """As compressed-tensors stores the scales of keys and values."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    change_config(folder, quantization_config=compressed("int", "channel") | {"kv_cache_scheme": scheme})
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([scale * (1 + layer)])
        for layer in range(COMMON["num_hidden_layers"])
        for part in "kv"
    }
    rewrite(folder, lambda all_: all_.update(scales))
    return folder


@needs_fp8_kv
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_moved_bytes_of_fp8_kv_give_the_same_tokens(kv_dtype: str, tiny: Tiny, make_prompt: MakePrompt) -> None:
    """Bit for bit, in another worker's pool and in other blocks."""
    prompt = make_prompt(75)
    here = open_vllm(tiny("llama"), kv_dtype=kv_dtype)
    try:
        spec = here.spec
        stayed, moved = list(prompt), list(prompt)
        decoded(here, stayed, 0, [9, 3, 100, 8], len(prompt), 1)
        data = [bytes(here.pool.buffer[b * spec.block_bytes : (b + 1) * spec.block_bytes]) for b in (9, 3, 100, 8)]
        moved.append(stayed[-1])
        decoded(here, stayed, len(prompt), [9, 3, 100, 8], len(prompt), 31)
    finally:
        here.close()
    there = open_vllm(tiny("llama"), kv_dtype=kv_dtype)
    try:
        assert fingerprint_of(there.spec) == fingerprint_of(spec)
        there.pool.buffer[:] = b"\xff" * len(there.pool.buffer)
        for block, one in zip((1, 0, 7, 5), data, strict=True):
            there.pool.buffer[block * spec.block_bytes : (block + 1) * spec.block_bytes] = one
        decoded(there, moved, len(prompt), [1, 0, 7, 5], len(prompt), 31)
    finally:
        there.close()
    assert moved == stayed


@needs_fp8_kv
def test_workers_of_other_kv_exchange_no_blocks(tiny: Tiny) -> None:
    found = {}
    for kv_dtype in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        engine = open_vllm(tiny("llama"), kv_dtype=kv_dtype)
        found[kv_dtype] = fingerprint_of(engine.spec)
        assert engine.spec.kv_dtype == ("float32" if kv_dtype == "auto" else "uint8")
        engine.close()
    assert found["fp8"] == found["fp8_e4m3"]
    assert len({str(one) for one in found.values()}) == 3


def test_heads_that_fp8_cannot_store_are_refused(tmp_path: Path) -> None:
    folder = build("Llama", {"head_dim": 16}, tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"a multiple of 32, not 16|needs AVX-512") as caught:
        open_vllm(folder, kv_dtype="fp8")
    assert caught.value.field == "kv_dtype"


@needs_fp8_kv
def test_scales_of_kv_are_those_of_the_checkpoint_and_part_of_the_fingerprint(
    copy_of: Callable[[str], Path], form_of: Callable[[str], Path], make_prompt: MakePrompt, tmp_path: Path
) -> None:
    folder = with_kv_scales(copy_of("int-channel"), 0.02)
    prompt = make_prompt(40)
    engine = open_vllm(folder)  # the checkpoint asks for fp8
    try:
        first, spec = answer(engine, prompt, TOKENS), engine.spec
        scales = [layer._k_scale_float for layer in engine_layers(engine)]
    finally:
        engine.close()
    assert scales == pytest.approx([0.02, 0.04, 0.06])
    assert spec.kv_dtype == "uint8"
    assert spec.layout.endswith("fp8_e4m3")
    assert_same([first], of_vllm(folder, "float32", [prompt]))
    again = Path(shutil.copytree(folder, tmp_path / "again" / folder.name))
    for scale, is_equal in ((0.02, True), (0.021, False)):
        engine = open_vllm(with_kv_scales(again, scale))
        assert (fingerprint_of(engine.spec) == fingerprint_of(spec)) == is_equal
        engine.close()


def engine_layers(engine: Any) -> list[Any]:
    return [one for one in engine._runner.model.modules() if hasattr(one, "_k_scale_float")]


# --- refused --------------------------------------------------------------------------------------------------


def mxfp4(folder: Path) -> None:
    """gpt-oss as it is on the Hub, with all experts zero."""
    fields = json.loads((folder / "config.json").read_text())
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    experts, hidden, size = fields["num_local_experts"], fields["hidden_size"], fields["intermediate_size"]

    def store(all_: dict[str, Tensor]) -> None:
        for layer in range(fields["num_hidden_layers"]):
            at = f"model.layers.{layer}.mlp.experts"
            for part, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
                del all_[f"{at}.{part}"]
                all_[f"{at}.{part}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
                all_[f"{at}.{part}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)

    rewrite(folder, store)


def settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config=fields | changes)

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


AT: Final = "model.layers.1.self_attn"
Q: Final = f"{AT}.q_proj"
PLAIN: Final = f"{Q}.weight"


def shuffled(all_: dict[str, Tensor]) -> None:
    all_[f"{Q}.g_idx"] = all_[f"{Q}.g_idx"].flip(0).contiguous()


def other_zeros(all_: dict[str, Tensor]) -> None:
    all_[f"{Q}.qzeros"] = all_[f"{Q}.qzeros"] + 1


def not_finite(all_: dict[str, Tensor]) -> None:
    all_["model.layers.1.self_attn.k_proj.weight_scale"][3] = float("nan")


def without_expert(all_: dict[str, Tensor]) -> None:
    for name in [one for one in all_ if ".experts.3." in one]:
        del all_[name]


#: A name -> the form or tiny model, what is odd about it, and what the error says. Each once gave wrong tokens or a
#: traceback, here or in vLLM's own loader.
ODD: Final[dict[str, tuple[str, Callable[[Path], object], str]]] = {
    "a method that does not exist": ("gptq", settings(quant_method="foo"), "foo"),
    "a list": ("llama", lambda folder: change_config(folder, quantization_config=[1]), "quantization_config"),
    "a text": ("llama", lambda folder: change_config(folder, quantization_config="gptq"), "quantization_config"),
    "no bits": ("gptq", settings(bits=None), "bits"),
    "groups of nothing": ("gptq", settings(group_size=0), "quantization_config.group_size: got 0"),
    "groups of another size": ("awq", settings(group_size=64), r"_proj.*(scales|qzeros)"),
    "groups in another order": ("gptq", tensors(shuffled), f"{Q}.g_idx: got groups in another order"),
    "an order by activations": ("gptq", settings(desc_act=True), "desc_act"),
    "zero points that are not read": ("gptq", tensors(other_zeros), f"{Q}.qzeros: got other zero points"),
    "zero points that the form excludes": ("gptq", settings(sym=False), "sym=False"),
    "a scale that is missing": ("gptq", tensors(lambda all_: all_.pop(f"{Q}.scales")), "qkv_proj.scales: got"),
    "all scales of a matrix missing": (
        "int-channel",
        tensors(lambda all_: all_.pop("model.layers.1.self_attn.o_proj.weight_scale")),
        "o_proj.weight_scale",
    ),
    "a scale that is NaN": ("int-channel", tensors(not_finite), "k_proj.weight_scale: got a scale that is not finite"),
    "a matrix that is not quantised": (
        "int-channel",
        tensors(lambda all_: all_.update({f"{AT}.o_proj.weight": torch.randn(128, 128)})),
        "o_proj.weight: got dtype float32, expected int8",
    ),
    "integers without a scheme": (
        "llama",
        tensors(lambda all_: all_.update({PLAIN: torch.ones(128, 128, dtype=torch.int8)})),
        f"{PLAIN}: got dtype int8, expected float32",
    ),
    "bytes without a scheme": (
        "llama",
        tensors(lambda all_: all_.update({PLAIN: torch.ones(128, 128, dtype=torch.uint8)})),
        f"{PLAIN}: got dtype uint8, expected float32",
    ),
    "fp8 without a scheme": (
        "llama",
        tensors(lambda all_: all_.update({PLAIN: all_[PLAIN].to(torch.float8_e4m3fn)})),
        f"{PLAIN}: got dtype float8_e4m3fn, expected float32",
    ),
    "a matrix that is missing": (
        "llama",
        tensors(lambda all_: all_.pop(f"{AT}.v_proj.weight")),
        "qkv_proj.weight: got 24576 values, expected 32768",
    ),
    "an expert that is missing": ("mixtral", tensors(without_expert), "experts: got 3 experts, expected 4"),
    "a bias that is not read": (
        "llama",
        tensors(lambda all_: all_.update({f"{Q}.bias": torch.ones(128)})),
        f"{Q}.bias: got a bias that is not zero",
    ),
    "a tensor too many": (
        "llama",
        tensors(lambda all_: all_.update({f"{AT}.extra.weight": torch.ones(4)})),
        r"self_attn.extra.weight: got float32 \[4\]",
    ),
    "a wrong shape": (
        "llama",
        tensors(lambda all_: all_.update({f"{AT}.o_proj.weight": torch.ones(128, 96)})),
        r"o_proj.weight: got float32 \[128, 96\]",
    ),
    "weights of 8 bits in words": (
        "packed-channel",
        lambda folder: change_config(
            folder,
            quantization_config=json.loads(
                json.dumps(FORMS["packed-channel"].settings).replace('"num_bits": 4', '"num_bits": 8')
            ),
        ),
        "quantization_config: got compressed-tensors",
    ),
    "fp8 with one scale": ("float-tensor", lambda folder: None, "fp8 weights with one scale for each matrix"),
    "fp8 with one scale, of another tool": ("fp8-tensor", lambda folder: None, "fp8 weights with one scale"),
}


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """As in GLM 4.5, whose config counts them beside its layers, and whose attention has biases."""

    def add_layer(all_: dict[str, Tensor]) -> None:
        last = f"model.layers.{COMMON['num_hidden_layers'] - 1}."
        added = f"model.layers.{COMMON['num_hidden_layers']}."
        all_ |= {name.replace(last, added): each.clone() for name, each in all_.items() if name.startswith(last)}
        assert all_[f"{added}self_attn.q_proj.bias"].count_nonzero()

    family, own = TINY["glm4-moe"]
    folder = build(family, own | {"attention_bias": True}, tmp_path / "model")
    change_config(folder, num_nextn_predict_layers=1)
    rewrite(folder, add_layer)
    open_vllm(folder).close()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_folder_is_refused(name: str, copy_of: Callable[[str], Path]) -> None:
    form, change, message = ODD[name]
    if form in FORMS and not HAS_AVX512:
        pytest.skip("4-bit weights need AVX-512, whatever else is wrong")
    folder = copy_of(form)
    change(folder)
    with pytest.raises((ModelError, ConfigError), match=message) as caught:
        open_vllm(folder, dtype="auto" if form in FORMS else "float32").close()
    assert "Traceback" not in str(caught.value)


@pytest.mark.skipif(HAS_AMX, reason="not tried on a processor with AMX")
@pytest.mark.parametrize("name", ["float-block", "fp8-block", "experts", "mxfp4"])
def test_a_form_that_needs_amx_is_refused_before_weights_are_read(
    name: str, form_of: Callable[[str], Path], copy_of: Callable[[str], Path], tiny: Tiny, tmp_path: Path
) -> None:
    if name == "mxfp4":
        folder = copy_of("gpt-oss")
        mxfp4(folder)
    elif name == "experts":
        folder = quantised(tiny("qwen3-moe"), FORMS["gptq"], tmp_path / name)
    else:
        folder = copy_of(name)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-64] + b"\xff" * 64)  # a scale that is NaN, if it were read
    with pytest.raises(ModelError, match=r"a form that this build of vLLM computes.*need AMX") as caught:
        open_vllm(folder, dtype="auto")
    assert caught.value.field == "quantization_config"
