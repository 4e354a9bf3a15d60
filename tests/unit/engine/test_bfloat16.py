"""bfloat16 on a CPU: products are rounded, everything between them is float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.engine.interface import Engine, Row
from pdserve.engine.load import device
from pdserve.engine.load.device import choose_precision
from tests.oracle import Oracle
from tests.support.slow import slow_except

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
LENGTH = 400


def scored(engine: Engine, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    """The logprob of each token except the first, computed in chunks over one block table."""
    found = []
    for start in range(0, len(tokens) - 1, chunk):
        end = min(start + chunk, len(tokens) - 1)
        row = Row(tokens=tokens[start:end], start=start, blocks=range(len(tokens)), targets=tokens[start + 1 : end + 1])
        [out] = engine.step([row])
        found += [token.logprob for token in out.scored]
    return torch.tensor(found, dtype=torch.float64)


@torch.inference_mode()
def of_transformers(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    found: torch.Tensor = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found


@pytest.mark.parametrize("chunk", slow_except([7, LENGTH], LENGTH))
def test_bfloat16_logprobs_are_as_accurate_as_transformers(
    chunk: int, open_engine: Callable[..., Engine], oracle_of: Callable[[Path], Oracle]
) -> None:
    """Both compute the same roundings of the same products; ours keeps the sums of the layers in float32."""
    tokens = (torch.arange(LENGTH) * 7919 % 4093 + 3).tolist()
    next_T1 = torch.tensor(tokens[1:])[:, None]
    exact = oracle_of(BUNDLED).logits(tokens[:-1]).log_softmax(-1).gather(1, next_T1)[:, 0]
    theirs = (of_transformers(BUNDLED, tokens) - exact).abs().mean()
    engine = open_engine(BUNDLED, dtype="bfloat16", kv_blocks=LENGTH)
    ours = (scored(engine, tokens, chunk) - exact).abs().mean()
    assert 1e-5 < ours < 1.1 * theirs


@pytest.mark.parametrize(
    "name",
    slow_except(["llama-tied-biased", "qwen3", "qwen3-moe", "gemma2", "gemma3"], "qwen3-moe", "gemma2"),
)
def test_families_are_as_accurate_as_transformers(
    name: str,
    tiny: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    oracle_of: Callable[[Path], Oracle],
    make_prompt: Callable[..., list[int]],
) -> None:
    """With norms of queries and keys, norms after a layer, biases, experts and soft caps."""
    tokens = make_prompt(200)
    exact = oracle_of(tiny(name)).logits(tokens[:-1]).log_softmax(-1)
    exact = exact.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    theirs = (of_transformers(tiny(name), tokens) - exact).abs().median()
    ours = (scored(open_engine(tiny(name), dtype="bfloat16"), tokens, 48) - exact).abs().median()
    assert 1e-5 < ours < 1.1 * theirs


def test_a_bfloat16_pool_has_twice_the_blocks(open_either: Callable[..., Engine]) -> None:
    engines = [
        open_either(BUNDLED, dtype=dtype, kv_blocks=0, kv_memory_bytes=2**24) for dtype in ("float32", "bfloat16")
    ]
    wide, narrow = (engine.spec for engine in engines)
    assert narrow.num_blocks // 2 == wide.num_blocks
    assert (narrow.dtype, narrow.kv_dtype) == ("bfloat16", "bfloat16")


def test_a_cpu_computes_in_float32_between_products() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("bfloat16", cpu).compute == torch.float32
    assert choose_precision("bfloat16", torch.device("cuda")).compute == torch.bfloat16


@pytest.mark.parametrize("is_fast", [True, False])
def test_auto_is_bfloat16_if_checkpoint_and_cpu_support_it(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: is_fast)
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu, "bfloat16").name == ("bfloat16" if is_fast else "float32")
    assert choose_precision("auto", cpu, "float32").name == "float32"
    assert choose_precision("auto", cpu, "float16").name == "float32"
    assert choose_precision("auto", torch.device("cuda"), "float32").name == "bfloat16"
