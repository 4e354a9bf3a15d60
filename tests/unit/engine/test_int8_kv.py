"""int8 and fp8 KV: its error and size, and that it is never mixed with blocks of other formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvtransfer.protocol.grants import compare, fingerprint_of
from pdserve.core.errors import ConfigError
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.cpu.paged import PagedAttention
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load import build_engine
from pdserve.engine.memory.pool import BlockShape, TorchPool, quantise
from router.service.model import ModelFacts, difference

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
GREEDY = Sampling(temperature=0.0, max_tokens=64)
CPU = torch.device("cpu")
EVERY_TIME = (("mistral-window", "int8", True), ("qwen2-window-by-layer", "fp8", False))

Tiny = Callable[[str], Path]
OpenEngine = Callable[..., Engine]


@given(
    st.lists(
        st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
        | st.floats(-4, 4, width=32, allow_subnormal=False),
        min_size=8,
        max_size=8,
    )
)
def test_int8_rounding_errs_by_at_most_half_a_step(values: list[float]) -> None:
    x_TKD = torch.tensor(values).view(1, 2, 4)
    rounded_TKD, scale_TK = quantise(x_TKD)
    assert rounded_TKD.abs().max() <= 127
    error_TKD = (rounded_TKD.double() * scale_TK.double()[..., None] - x_TKD.double()).abs()
    bound_TK1 = x_TKD.double().abs().amax(-1, keepdim=True) / 127 * 0.5001 + 1e-36
    assert bool((error_TKD <= bound_TK1).all())


def test_values_that_are_not_finite_stay_so() -> None:
    x_TKD = torch.ones(1, 3, 4)
    x_TKD[0, 0, 1], x_TKD[0, 1, 2] = torch.nan, torch.inf
    rounded_TKD, scale_TK = quantise(x_TKD)
    assert (rounded_TKD * scale_TK[..., None]).isfinite().all(-1).tolist() == [[False, False, True]]


def test_the_kernel_stores_the_same_bits_as_torch() -> None:
    """So KV that is rounded during a transfer equals KV that the int8 pool's own engine would store."""
    num_tokens, num_kv_heads, head_dim = 4096, 2, 16
    generator = torch.Generator().manual_seed(0)
    # From below the normal numbers to the largest.
    spread_T11 = 10.0 ** torch.linspace(-45, 38, num_tokens)[:, None, None]
    qkv_THD = torch.rand(num_tokens, 1 + 2 * num_kv_heads, head_dim, generator=generator).sub_(0.5) * spread_T11
    q_THD, k_TKD, v_TKD = qkv_THD.split((1, num_kv_heads, num_kv_heads), dim=1)
    shape = BlockShape(num_layers=1, block_size=16, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.int8)
    pools = [TorchPool(num_blocks=num_tokens // 16, shape=shape, device=CPU) for _ in range(2)]
    position_T = torch.arange(num_tokens)
    block_T, offset_T = position_T // 16, position_T % 16
    cos_T1R, sin_T1R = torch.ones(num_tokens, 1, head_dim // 2), torch.zeros(num_tokens, 1, head_dim // 2)
    paged = PagedAttention(pools[0], 1)
    paged.place(0, q_THD, k_TKD, v_TKD, cos_T1R, sin_T1R, block_T, offset_T)
    pools[1].write(0, k_TKD, v_TKD, block_T, offset_T)
    assert torch.equal(pools[0].raw, pools[1].raw)


def test_a_pool_returns_the_rounded_values() -> None:
    shape = BlockShape(num_layers=2, block_size=5, num_kv_heads=3, head_dim=7, dtype=torch.int8)
    pool = TorchPool(num_blocks=6, shape=shape, device=CPU)
    k_TKD, v_TKD = torch.randn(2, 12, 3, 7, generator=torch.Generator().manual_seed(0))
    table = torch.tensor([[4, 0, 2]])
    for layer in (1, 0):  # Layer 1 first: layer 0 must not change it.
        position_T = torch.arange(12)
        pool.write(layer, k_TKD + layer, v_TKD - layer, table[0, position_T // 5], position_T % 5)
    for layer in (0, 1):
        read = pool.read(layer, table, torch.float32)
        for x_BKSD, x_TKD in zip(read, (k_TKD + layer, v_TKD - layer), strict=True):
            rounded_TKD, scale_TK = quantise(x_TKD)
            assert torch.equal(x_BKSD[0, :, :12].transpose(0, 1), rounded_TKD * scale_TK[..., None])
            assert not x_BKSD[0, :, 12:].any()


@pytest.mark.gpu_checks
@pytest.mark.parametrize(("outlier", "better"), [(0, torch.int8), (8, torch.int8), (16, torch.float8_e4m3fn)])
def test_fp8_is_more_exact_for_rows_with_outliers(outlier: int, better: torch.dtype) -> None:
    """int8 divides the row's maximum into equal steps. What docs/gpu.md says of the choice between both."""
    x_TKD = torch.randn(2000, 1, 128, generator=torch.Generator().manual_seed(0))
    if outlier:
        x_TKD[..., 0] = outlier  # standard deviations of the others
    errors = {}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        rounded_TKD, scale_TK = quantise(x_TKD, dtype)
        errors[dtype] = (rounded_TKD.float() * scale_TK[..., None] - x_TKD)[..., 1:].pow(2).mean()
    assert min(errors, key=lambda dtype: errors[dtype]) == better


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0.27), (128, 0.26), (24, 0.30)])
def test_a_block_takes_a_quarter_of_float32_and_its_scales(head_dim: int, most: float) -> None:
    exact = BlockShape(num_layers=12, block_size=16, num_kv_heads=4, head_dim=head_dim, dtype=torch.float32)
    small = dataclasses.replace(exact, dtype=torch.int8)
    assert 0.25 < small.block_bytes / exact.block_bytes < most
    assert small.block_bytes % 64 == 0


def test_int8_kv_gives_nearly_four_times_the_blocks(open_engine: OpenEngine) -> None:
    counts = [
        open_engine(BUNDLED, kv_blocks=0, kv_memory_bytes=2**24, kv_dtype=name).spec.num_blocks
        for name in ("auto", "int8")
    ]
    assert counts[1] / counts[0] > 3.5


@pytest.mark.parametrize(
    ("name", "kv_dtype", "is_paged"),
    [  # Read in place and gathered, once each. The other pairs are slow.
        pytest.param(
            name, kv_dtype, is_paged, marks=() if (name, kv_dtype, is_paged) in EVERY_TIME else pytest.mark.slow
        )
        for name in ("llama", "mistral-window", "qwen2-window-by-layer")
        for kv_dtype, is_paged in (("int8", True), ("int8", False), ("fp8", False))
    ],
)
def test_chunks_blocks_and_batches_change_nothing(
    name: str,
    kv_dtype: str,
    is_paged: bool,
    tiny: Tiny,
    open_engine: OpenEngine,
    serve: Callable[..., list[list[int]]],
    request_of: Any,
    make_prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk reads rounded keys, including its own. Otherwise the tokens would depend on the division into chunks."""
    if not is_paged:
        monkeypatch.setattr(build_engine.jit, "is_available", lambda: False)
    asked = Sampling(temperature=0.0, max_tokens=64, logprobs=2)
    answers = []
    for chunk, company in ((10_000, 0), (1, 0), (33, 3)):
        engine = open_engine(tiny(name), kv_dtype=kv_dtype)
        requests = [request_of(prompt=make_prompt(150), sampling=asked)]
        requests += [request_of(prompt=make_prompt(20 * index + 1), arrival=index) for index in range(company)]
        serve(engine, requests, chunk=chunk, seed=chunk)
        answers.append(requests[0].outs)
    assert len({out.token_id for out in answers[0]}) > 8
    for other in answers[1:]:
        assert_same(answers[0], other)


def assert_same(ours: Sequence[TokenOut], theirs: Sequence[TokenOut]) -> None:
    """Equal tokens up to a near-tie, and nearly equal logprobs for most of them.

    The last bit, which depends on the processor, decides how a value halfway between two integers is rounded. Such a
    rounding changes few logprobs, by up to 3e-3 in int8 and 3e-2 in fp8, and most by less than 1e-5. Chunks that read
    their own keys unrounded change most by 2e-3 or more.
    """
    changes = []
    for one, other in zip(ours, theirs, strict=True):
        changes.append(abs(one.top[0][1] - other.top[0][1]))
        if one.token_id != other.token_id:
            assert one.top[0][1] - one.top[1][1] < 0.05
            break
    assert len(changes) > 8
    assert median(changes) < 2e-4


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_copied_int8_blocks_give_the_same_tokens(
    kv_dtype: str, tiny: Tiny, open_engine: OpenEngine, make_prompt: Callable[..., list[int]]
) -> None:
    """One worker prefills the prompt and another decodes from a copy of its blocks, with the tokens of a single
    worker."""
    prompt, source, target = make_prompt(75), [9, 3, 100, 8, 50], [1, 0, 2, 399, 7]
    prefill, decode, alone = (open_engine(tiny("qwen3"), kv_dtype=kv_dtype) for _ in range(3))
    size = prefill.spec.block_bytes
    [first] = prefill.step([row_of(prompt, 0, source)])
    for ours, theirs in zip(source, target, strict=True):
        decode.pool.buffer[theirs * size : (theirs + 1) * size] = prefill.pool.buffer[ours * size : (ours + 1) * size]
    answers = []
    for engine, blocks, history in (
        (decode, [*target, 200, 201], [*prompt, first.sampled[0].token_id]),
        (alone, [*range(7)], list(prompt)),
    ):
        start = 0 if engine is alone else len(prompt)
        while len(history) < len(prompt) + 30:
            [out] = engine.step([row_of(history, start, blocks)])
            start = len(history)
            history.append(out.sampled[0].token_id)
        answers.append(history)
    assert answers[0] == answers[1]


def row_of(history: list[int], start: int, blocks: list[int]) -> Row:
    return Row(tokens=history[start:], start=start, blocks=blocks, sample=GREEDY, history=list(history), prompt_len=75)


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.05), ("fp8", 0.15)])
def test_answers_stay_close_to_those_of_exact_keys_and_values(
    kv_dtype: str, most: float, open_engine: OpenEngine
) -> None:
    ids = (
        Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode("import os\n\n\nclass Path:\n    def __init__(").ids
    )
    asked = Sampling(temperature=0.0, logprobs=5)
    row = Row(tokens=ids, start=0, blocks=list(range(8)), sample=asked, history=ids, prompt_len=len(ids))
    [exact], [rounded] = (open_engine(BUNDLED, kv_dtype=name).step([row]) for name in ("auto", kv_dtype))
    seen, expected = dict(rounded.sampled[0].top), dict(exact.sampled[0].top)
    both = seen.keys() & expected.keys()
    assert len(both) >= 4
    assert [seen[token] for token in both] == pytest.approx([expected[token] for token in both], abs=most)


def test_workers_of_one_model_may_have_different_kv_dtypes(tiny: Tiny, open_engine: OpenEngine) -> None:
    exact, small, other = (
        open_engine(tiny(model), kv_dtype=dtype).spec
        for model, dtype in (("llama", "auto"), ("llama", "int8"), ("qwen3", "auto"))
    )
    compare(fingerprint_of(exact), fingerprint_of(small))
    with pytest.raises(ConfigError) as caught:
        compare(fingerprint_of(exact), fingerprint_of(other))
    assert caught.value.field == "fingerprint.model"
    ours, theirs = (
        ModelFacts(
            name=spec.model,
            max_context_tokens=spec.max_context_tokens,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            block_size=spec.block_size,
            hash_seed=b"",
            fingerprint=fingerprint_of(spec),
        )
        for spec in (exact, small)
    )
    assert difference(ours, theirs) is None
