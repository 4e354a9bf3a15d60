"""Tiny random models of every family, the expected answers, and a small scheduler that serves requests."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.config import WorkerConfig
from pdserve.core.errors import ModelError
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from pdserve.model_source import model_name
from tests.oracle import Oracle

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

GREEDY = Sampling(temperature=0.0, max_tokens=64)
COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-tied-biased": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama-llama3-rope": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear-rope": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-yarn-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral-window": (
        "Mistral",
        {"sliding_window": 21, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen2-window-by-layer": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "truncate": False,
            },
        },
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],  # Of layers 1 and 3, which sparse_step selects.
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
        },
    ),
    "qwen3-moe-renormalised": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 25},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 5,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 3,
            "sliding_window": 33,
            "attn_logit_softcapping": 9.0,
            "final_logit_softcapping": 15.0,
        },
    ),
}
#: Of the same models, with heads for which vLLM has a kernel on a CPU.
VLLM_SIZES = {"hidden_size": 128, "head_dim": 32}
#: Its kernel gives NaN for scores that exceed a soft cap some forty times, which only these random ones do.
VLLM_SCORES = {"gemma2": {"query_pre_attn_scalar": 64}}


@dataclass(kw_only=True)
class Request:
    prompt: list[int]
    sampling: Sampling = GREEDY
    arrival: int = 0  # The step at which the request may begin.
    blocks: list[int] = field(default_factory=list)
    outs: list[TokenOut] = field(default_factory=list)
    num_computed: int = 0
    adapter: str = ""

    @property
    def history(self) -> list[int]:
        return self.prompt + [out.token_id for out in self.outs]


def build_tiny(name: str, folder: Path, **changed: Any) -> Path:
    """A model with random weights, norms and biases, wide enough that two tokens are rarely equally likely."""
    family, own = TINY[name]
    kind = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else family + "Config")
    config = kind(**COMMON | own | changed)
    torch.manual_seed(20_26)
    model = getattr(transformers, family + "ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            is_offset = "Gemma" in family and not re.search("post_|q_norm", parameter_name)  # Stored minus 1.
            torch.nn.init.normal_(parameter, mean=0.0 if is_offset else 1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 0.25)
        if "q_proj" in parameter_name or ("q_norm" in parameter_name and "Gemma" not in family):
            parameter.data *= 4.0  # Peaked attention. A uniform one would lose the order of a long prompt.
    # The large tied embedding would repeat the last token, so signs are chosen such that no token predicts itself.
    if "Gemma" in family:
        torch.nn.init.normal_(model.model.norm.weight, mean=-1.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def is_vllm(request: pytest.FixtureRequest) -> bool:
    """Whether tests that use `open_either` test the engine vllm: with `--engine vllm`, which deselects all others."""
    return bool(request.config.getoption("--engine") == "vllm")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, is_vllm: bool) -> Callable[[str], Path]:
    """The folder of the tiny model with that name."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            changed = VLLM_SIZES | VLLM_SCORES.get(name, {}) if is_vllm else {}
            built[name] = build_tiny(name, tmp_path_factory.mktemp("models") / name, **changed)
        return built[name]

    return get


@pytest.fixture(scope="session")
def open_engine() -> Callable[..., Engine]:
    """Our engine."""

    def get(folder: Path | str, **settings: Any) -> Engine:
        settings = {"kv_blocks": 400, "device": "cpu", "dtype": "float32"} | settings  # auto depends on the processor.
        return load_engine(WorkerConfig(model=str(folder), worker_id="w", **settings), Role.DECODE)

    return get


@pytest.fixture(scope="module")
def open_either(open_engine: Callable[..., Engine], is_vllm: bool) -> Iterator[Callable[..., Engine]]:
    """Our engine, or vLLM's, for tests of what both promise. Engines of one model may be open at a time: vLLM makes the
    groups of its ranks once in a process, for the first model."""
    opened: list[Engine] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def get(folder: Path | str, **settings: Any) -> Engine:
        if not is_vllm:
            return open_engine(folder, **settings)
        if opened and opened[0].spec.model != model_name(str(folder)):
            close()
        try:
            opened.append(open_engine(folder, engine="vllm", cuda_graphs=False, threads=1, **settings))
        except ModelError as error:
            pytest.skip(f"vLLM does not serve it: {error}")
        return opened[-1]

    yield get
    close()


@pytest.fixture(scope="session")
def oracle_of(is_vllm: bool) -> Callable[[Path], Oracle]:
    """Judges the tokens of the checkpoint in that folder."""
    if is_vllm:
        from tests.models.far_oracle import FarOracle

        return cache(FarOracle)
    return cache(Oracle)


def serve_together(
    engine: Engine,
    requests: Sequence[Request],
    *,
    chunk: int = 10_000,
    seed: int = 0,
    guess: Callable[[Request], list[int]] = lambda one: [],
) -> list[list[int]]:
    """Serves requests together: decode rows and prefill chunks mixed, blocks scattered. Returns their tokens.

    `guess` returns drafts for a request that decodes.
    """
    free = list(range(engine.spec.num_blocks))
    random.Random(seed).shuffle(free)
    step = 0
    while pending := [one for one in requests if len(one.outs) < one.sampling.max_tokens]:
        rows, asking = [], []
        for one in pending:
            if one.arrival > step:
                continue
            tokens = one.history[one.num_computed :][:chunk]
            end = one.num_computed + len(tokens)
            is_last = end == len(one.history)
            room = one.sampling.max_tokens - len(one.outs) - 1
            drafts = guess(one)[:room] if is_last and one.outs else []
            while len(one.blocks) * engine.spec.block_size < end + len(drafts):
                one.blocks.append(free.pop())
            rows.append(
                Row(
                    tokens=tokens,
                    start=one.num_computed,
                    blocks=one.blocks,
                    sample=one.sampling if is_last else None,
                    history=one.history if is_last else (),
                    prompt_len=len(one.prompt),
                    drafts=drafts,
                    adapter=one.adapter,
                )
            )
            asking.append(one)
        for one, row, out in zip(asking, rows, engine.step(rows), strict=True):
            assert bool(out.sampled) == (row.sample is not None)
            assert len(out.sampled) <= 1 + len(row.drafts)
            one.num_computed += len(row.tokens) + max(0, len(out.sampled) - 1)
            one.outs += out.sampled
        step += 1
    return [[out.token_id for out in one.outs] for one in requests]


@pytest.fixture(scope="session")
def serve() -> Callable[..., list[list[int]]]:
    return serve_together


@pytest.fixture(scope="session")
def request_of() -> type[Request]:
    return Request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(length * 1000 + seed)
    return [generator.randrange(3, COMMON["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., list[int]]:
    return prompt_of
