"""The decoder gives the tokens of transformers in float64, for any chunks, batches, blocks and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from tests.oracle import Oracle
from tests.support.slow import slow_except

FAMILIES = [
    "llama",
    "llama-tied-biased",
    "llama-llama3-rope",
    "llama-linear-rope",
    "llama-yarn-rope",
    "mistral-window",
    "qwen2-window-by-layer",
    "qwen3",
    "qwen3-moe",
    "qwen3-moe-renormalised",
    "mixtral-window",
    "gemma3",
    "gemma2",
]
GREEDY = Sampling(temperature=0.0, max_tokens=64)
BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"

Tiny = Callable[[str], Path]
OpenEngine = Callable[..., Engine]
Serve = Callable[..., list[list[int]]]
MakePrompt = Callable[..., list[int]]
OracleOf = Callable[[Path], Oracle]


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batches_match_transformers(
    name: str,
    tiny: Tiny,
    open_either: OpenEngine,
    serve: Serve,
    oracle_of: OracleOf,
    request_of: Any,
    make_prompt: MakePrompt,
) -> None:
    folder = tiny(name)
    lengths = [1, 2, 16, 63, 150, 300] + ([700] if name in ("llama-llama3-rope", "mistral-window") else [])
    prompts = [make_prompt(length) for length in lengths]
    requests = [request_of(prompt=prompt, arrival=3 * index) for index, prompt in enumerate(prompts)]
    got = serve(open_either(folder), requests, chunk=48)
    assert [len(tokens) for tokens in got] == [64] * len(prompts)
    oracle_of(folder).assert_exact(prompts, got)
    assert sum(len(set(tokens)) > 16 for tokens in got) >= 4  # Random models may fall into loops, but most do not.


# Mixed batches test every family. These have soft caps, windows and experts.
@pytest.mark.parametrize("name", slow_except(FAMILIES, "llama", "mixtral-window", "gemma2"))
def test_every_logprob_matches_transformers(
    name: str,
    tiny: Tiny,
    open_either: OpenEngine,
    serve: Serve,
    oracle_of: OracleOf,
    request_of: Any,
    make_prompt: MakePrompt,
) -> None:
    """Sampling at a high temperature reaches unlikely texts. transformers then scores the same text at once."""
    asked = Sampling(temperature=2.0, seed=5, logprobs=3, max_tokens=40)
    lengths = (1, 30, 81, 260)
    requests = [request_of(prompt=make_prompt(length), sampling=asked, arrival=length % 7) for length in lengths]
    serve(open_either(tiny(name)), requests, chunk=31)
    for one in requests:
        assert len({out.token_id for out in one.outs}) > 16
        assert all(len(out.top) == 3 for out in one.outs)
        oracle_of(tiny(name)).assert_logprobs(one.history[:-1], len(one.prompt) - 1, one.outs)


def test_the_bundled_model_matches_transformers(
    open_either: OpenEngine, serve: Serve, oracle_of: OracleOf, request_of: Any
) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = ["def fib(n):", "import os\n\nclass Path:", "    def __init__(self, name", "# Copyright\n\nimport sys\n"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    got = serve(open_either(BUNDLED), [request_of(prompt=prompt) for prompt in prompts], chunk=5)
    assert [len(tokens) for tokens in got] == [64] * len(prompts)
    oracle_of(BUNDLED).assert_exact(prompts, got)


@pytest.mark.parametrize(
    ("name", "other_size"),
    # Each pair of head size and block size needs a compiled kernel. These few cover odd blocks, and windows within
    # them.
    [
        pytest.param("llama-llama3-rope", 64, marks=pytest.mark.slow),
        ("qwen2-window-by-layer", 16),
        ("mistral-window", 7),
        pytest.param("qwen3-moe", 64, marks=pytest.mark.slow),
        pytest.param("gemma3", 7, marks=pytest.mark.slow),
    ],
)
def test_chunks_blocks_and_batches_change_nothing(
    name: str,
    other_size: int,
    tiny: Tiny,
    open_either: OpenEngine,
    serve: Serve,
    oracle_of: OracleOf,
    request_of: Any,
    make_prompt: MakePrompt,
) -> None:
    prompt = make_prompt(200)
    seeded = Sampling(temperature=0.8, top_p=0.9, seed=7, max_tokens=32)
    answers = []
    for block_size, chunk, company in ((16, 10_000, 0), (16, 1, 0), (other_size, 33, 3), (other_size, 199, 9)):
        engine = open_either(tiny(name), block_size=block_size, kv_blocks=6400 // block_size)
        requests = [request_of(prompt=prompt, sampling=seeded), request_of(prompt=prompt)]
        requests += [request_of(prompt=make_prompt(20 * index + 1), arrival=index) for index in range(company)]
        answers.append(serve(engine, requests, chunk=chunk, seed=chunk)[:2])
    sampled, greedy = zip(*answers, strict=True)
    oracle_of(tiny(name)).assert_exact([prompt] * 8, [*sampled, *greedy], sampling=[seeded] * 4 + [None] * 4)
    assert answers[0][0] != answers[0][1][:32]


@pytest.mark.parametrize("name", slow_except(["qwen3", "qwen3-moe", "gemma3"], "gemma3"))
def test_another_engine_continues_from_copied_blocks(
    name: str, tiny: Tiny, open_either: OpenEngine, oracle_of: OracleOf, make_prompt: MakePrompt
) -> None:
    prefill, decode = open_either(tiny(name)), open_either(tiny(name))
    prompt = make_prompt(75)
    source, target = [9, 3, 100, 8, 50], [1, 0, 2, 399, 7]
    [first] = prefill.step([row_of(prompt, 0, source, len(prompt))])[0].sampled
    size = prefill.spec.block_bytes
    for ours, theirs in zip(source, target, strict=True):
        decode.pool.buffer[theirs * size : (theirs + 1) * size] = prefill.pool.buffer[ours * size : (ours + 1) * size]
    history = [*prompt, first.token_id]
    while len(history) < len(prompt) + 120:
        if len(history) > len(target) * 16:
            target.append(200 + len(target))
        [out] = decode.step([row_of(history, len(history) - 1, target, len(prompt))])[0].sampled
        history.append(out.token_id)
    oracle_of(tiny(name)).assert_exact([prompt], [history[len(prompt) :]])


def row_of(history: list[int], start: int, blocks: list[int], prompt_len: int) -> Row:
    return Row(
        tokens=history[start:], start=start, blocks=blocks, sample=GREEDY, history=list(history), prompt_len=prompt_len
    )


@pytest.mark.parametrize("name", slow_except(["llama", "mistral-window", "gemma2"], "mistral-window"))
def test_old_contents_of_blocks_are_never_read(
    name: str,
    tiny: Tiny,
    open_either: OpenEngine,
    serve: Serve,
    oracle_of: OracleOf,
    request_of: Any,
    make_prompt: MakePrompt,
) -> None:
    engine = open_either(tiny(name))
    engine.pool.buffer[:] = b"\xff" * len(engine.pool.buffer)  # Every float is NaN.
    prompts = [make_prompt(length) for length in (5, 16, 40, 130)]
    requests = [request_of(prompt=prompt, arrival=index) for index, prompt in enumerate(prompts)]
    got = serve(engine, requests, chunk=24)
    assert [len(tokens) for tokens in got] == [64] * len(prompts)
    oracle_of(tiny(name)).assert_exact(prompts, got)


def test_the_tail_of_a_new_block_is_cleared(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("llama"))
    engine.pool.buffer[:] = b"\x3f" * len(engine.pool.buffer)
    engine.step([Row(tokens=[5, 6, 7], start=0, blocks=[2])])
    size = engine.spec.block_bytes
    block = torch.frombuffer(engine.pool.buffer[2 * size : 3 * size], dtype=torch.float32).view(3, 2, 16, 2, 16)
    assert not block[:, :, 3:].any()
    assert block[:, :, :3].all()


@pytest.mark.parametrize(
    "name",
    slow_except(["qwen2-window-by-layer", "qwen3-moe-renormalised", "mixtral-window", "gemma2", "gemma3"], "gemma3"),
)
def test_prefill_logprobs_equal_those_of_transformers(
    name: str, tiny: Tiny, open_either: OpenEngine, oracle_of: OracleOf, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(90)
    engine = open_either(tiny(name))
    asked = Sampling(temperature=0.0, logprobs=20, repetition_penalty=1.3, min_tokens=1)
    row = Row(tokens=prompt, start=0, blocks=list(range(6)), sample=asked, history=prompt, prompt_len=90)
    [out] = engine.step([row])[0].sampled
    assert len(out.top) == 20
    assert out.logprob is not None
    oracle_of(tiny(name)).assert_logprobs(prompt, len(prompt) - 1, [out])


@pytest.mark.parametrize("name", slow_except(["qwen3", "gemma3"], "qwen3"))
def test_bfloat16_is_as_close_to_float32_as_transformers(
    name: str, tiny: Tiny, open_either: OpenEngine, make_prompt: MakePrompt
) -> None:
    """The roundings of both differ, but a factor that is rounded too early, or not at all, would show in the mean."""
    prompts = [make_prompt(length) for length in range(20, 60)]
    asked = Sampling(temperature=0.0, logprobs=20)
    engine = open_either(tiny(name), dtype="bfloat16")
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tiny(name), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    ours, theirs = 0.0, 0.0
    for prompt in prompts:
        row = Row(tokens=prompt, start=0, blocks=list(range(4)), sample=asked, history=prompt, prompt_len=len(prompt))
        [out] = engine.step([row])[0].sampled
        with torch.inference_mode():
            exact_V, rounded_V = (m(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1) for m in models)
        ours += sum(abs(value - float(exact_V[token])) for token, value in out.top)
        theirs += sum(abs(float(rounded_V[token] - exact_V[token])) for token, _ in out.top)
    assert 0 < ours < 1.2 * theirs


def test_bfloat16_stays_close_to_float32(tiny: Tiny, open_either: OpenEngine, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(60)
    asked = Sampling(temperature=0.0, logprobs=5)
    row = Row(tokens=prompt, start=0, blocks=list(range(4)), sample=asked, history=prompt, prompt_len=60)
    [exact], [rounded] = (open_either(BUNDLED, dtype=dtype).step([row])[0].sampled for dtype in ("float32", "bfloat16"))
    assert dict(rounded.top).keys() & dict(exact.top).keys()
    assert rounded.top[0][1] == pytest.approx(exact.top[0][1], abs=0.3)
