"""Compares the engine vllm with transformers in float64. Part of `check_engine --engine vllm`; prints a table.

    .venv-vllm/bin/python -m tests.gpu.check_engine --engine vllm [--device cuda] [--only llama,gpt-oss]

Each tiny model is opened twice, eager and with CUDA graphs, and each time:
  mixed     prompts of 1 to 300 tokens in chunks beside decode rows, in a pool whose old contents are NaN
  moved     the blocks of a text are copied to others as bytes while it is decoded, and the old ones overwritten
In float32 every token must be the choice of float64, or within 1e-5 of the logits' deviation. In bfloat16 a token may
lose, in float64, four times what bfloat16 itself changes in transformers at that position. On a GPU the memory in use
must be at most that of `gpu_memory_share`. The time of a decode step of 32 rows is printed for both modes.
Exit code 1 if a case fails, 2 without the device. Needs vLLM's environment (`make vllm-env`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.failures import cases_of, told
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from tests.oracle import MAX_TIES, TIE
from tests.unit.engine.conftest import Request, prompt_of, serve_together

FAMILIES: Final = ("llama", "qwen3", "mistral", "gemma3", "mixtral", "gpt-oss", "deepseek-v2")
LENGTHS: Final = (1, 17, 80, 300)
TOKENS: Final = 32
CASE_S: Final = 300.0  # vLLM is imported, compiled and captured in each
SHARE: Final = 0.5
MOST_EXTRA: Final = 2 * 2**30  # of the context, libraries and this process's own buffers
NOISE: Final = 4.0  # times bfloat16's own
TIMED_ROWS: Final = 32
TIMED_STEPS: Final = 20
GREEDY: Final = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def run(args: argparse.Namespace) -> int:
    is_gpu = args.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}")
    print("| model | dtype | mode | layout | tokens judged | near-ties | decode, 32 rows | s |\n" + "|---" * 8 + "|")
    dtypes = ("float32", "bfloat16") if is_gpu else ("float32",)
    names = [f"{family} {dtype} {mode}" for family in FAMILIES for dtype in dtypes for mode in ("eager", "graphs")]
    cases = cases_of(args, names, torch.cuda.synchronize if is_gpu else None, CASE_S)
    with tempfile.TemporaryDirectory() as parent:
        for case in names:
            family, dtype, mode = case.split()
            began_s = time.monotonic()

            def say(text: str, label: str = case.replace(" ", " | "), began_s: float = began_s) -> None:
                print(f"| {label} | {text} | {time.monotonic() - began_s:.0f} |", flush=True)

            def body(family: str = family, dtype: str = dtype, mode: str = mode) -> None:
                folder = Path(parent) / family
                if not folder.exists():
                    _far().submit(_build, family, folder).result()
                say(check(folder, args.device, dtype, has_graphs=mode == "graphs"))

            cases.run(case, body, lambda error, case=case: say(f"**{told(case, error)}** | | |"))
    return int(cases.num_failed > 0)


def check(folder: Path, device: str, dtype: str, *, has_graphs: bool) -> str:
    """The cells of the table. Raises AssertionError."""
    engine = load_engine(
        WorkerConfig(
            model=str(folder),
            worker_id="gpu",
            engine="vllm",
            device=device,
            dtype=dtype,
            cuda_graphs=has_graphs,
            kv_blocks=0 if device == "cuda" else 200,  # 0: measured
            gpu_memory_share=SHARE,
            threads=1,
        ),
        Role.DECODE,
    )
    try:
        prompts, answers = [], []
        for texts, outs in (mixed(engine), moved(engine)):
            prompts += texts
            answers += outs
        check_memory(engine)
        step_s = decode_step_s(engine)
        layout = engine.spec.layout
    finally:
        engine.close()
    judged, ties = _far().submit(_judge, folder, prompts, answers, dtype).result()
    return f"{layout} | {judged} | {ties} | {step_s * 1e3:.2f} ms"


def mixed(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
    spoil(engine)
    prompts = [prompt_of(length) for length in LENGTHS]
    requests = [Request(prompt=prompt, sampling=GREEDY, arrival=3 * at) for at, prompt in enumerate(prompts)]
    return prompts, serve_together(engine, requests, chunk=48)


def moved(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
    spoil(engine)
    raw, size = raw_of(engine), engine.spec.block_size
    prompt = prompt_of(75)
    history, num_blocks = list(prompt), -(-(75 + TOKENS) // size)
    source = list(range(1, 2 * num_blocks, 2))
    target = [2 * at for at in reversed(range(num_blocks))]
    decode(engine, history, 0, source, 1)
    for old, new in zip(source, target, strict=True):
        raw[..., new, :] = raw[..., old, :]
        raw[..., old, :] = 0xFF
    decode(engine, history, 75, target, TOKENS - 1)
    return [prompt], [history[75:]]


def decode(engine: Engine, history: list[int], start: int, blocks: list[int], count: int) -> None:
    for _ in range(count):
        tokens = history[start:]
        row = Row(tokens=tokens, start=start, blocks=blocks, sample=GREEDY, history=list(history), prompt_len=75)
        start = len(history)
        history.append(engine.step([row])[0].sampled[0].token_id)


def decode_step_s(engine: Engine) -> float:
    """The fastest of some steps, after two that warm up."""
    taken: list[float] = []
    for at in range(2 + TIMED_STEPS):
        rows = [
            Row(
                tokens=[5],
                start=at,
                blocks=[row, TIMED_ROWS + row],
                sample=GREEDY,
                history=[5] * (at + 1),
                prompt_len=1,
            )
            for row in range(TIMED_ROWS)
        ]
        began_s = time.perf_counter()
        engine.step(rows)
        taken.append(time.perf_counter() - began_s)
    return min(taken[2:])


def check_memory(engine: Engine) -> None:
    assert engine.memory is not None
    assert engine.memory.kv_pool == engine.pool.num_blocks * engine.pool.block_bytes
    device = raw_of(engine).device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        assert used <= SHARE * total + MOST_EXTRA, f"{used / 1e9:.2f} GB in use, of {SHARE:g} of {total / 1e9:.2f} GB"
        assert engine.memory.weights + engine.memory.kv_pool <= SHARE * total


def spoil(engine: Engine) -> None:
    """Every float in the pool becomes NaN."""
    raw_of(engine).fill_(0xFF)


def raw_of(engine: Engine) -> torch.Tensor:
    raw: torch.Tensor = engine.pool.raw  # type: ignore[attr-defined]
    return raw


# --- in a process without vLLM, which changes classes of transformers -----------------------------------------


@cache
def _far() -> ProcessPoolExecutor:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _build(family: str, folder: Path) -> None:
    from tests.models.tiny import TINY, build

    build(*TINY[family], folder)


def _judge(folder: Path, prompts: list[list[int]], answers: list[list[int]], dtype: str) -> tuple[int, int]:
    """The numbers of tokens judged and of near-ties. Raises AssertionError."""
    from tests.oracle import Oracle

    oracle = Oracle(folder)
    if dtype == "float32":
        verdict = oracle.judge(prompts, answers, tie=TIE)
        verdict.check(MAX_TIES)
        return verdict.num_positions, len(verdict.ties)
    rounded: Any = _rounded(folder)
    num_judged, num_ties = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer[:-1]]
        right_PV = oracle.logits(tokens, first=len(prompt) - 1)
        with torch.inference_mode():
            noisy_PV = rounded(torch.tensor([tokens])).logits[0, len(prompt) - 1 :].double()
        for at, token in enumerate(answer):
            lost = float(right_PV[at].max() - right_PV[at, token])
            allowed = NOISE * float((noisy_PV[at] - right_PV[at]).abs().max())
            assert lost <= allowed, f"token {at} after {len(prompt)} loses {lost:.3g}, {allowed:.3g} allowed"
            num_judged, num_ties = num_judged + 1, num_ties + (lost > 0)
    return num_judged, num_ties


def _rounded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
