"""Compares our eager engine with transformers on a CUDA device: each family, float32 and bfloat16. Prints a table.

    python -m tests.gpu.check_engine [--device cuda] [--tokens 64] [--only llama,stdlib-5m] [--from CASE]
    .venv-vllm/bin/python -m tests.gpu.check_engine --engine vllm [--device cuda] [--only llama] (check_vllm.py)

Rules for the position at which two greedy texts first differ:
  trained model       each side's token is among the other's five likeliest (as in vLLM's tests)
  float32             also, the two logprobs are within 1e-3 of each other
  random weights in   judged by transformers in float32, our token loses at most four times the logprob that bfloat16
  bfloat16            costs transformers there; the rule of trained models fails, because logits are too close together
Exit code 1 if a family breaks its rule, 2 if there is no such device. With --device cpu it only shows that this script
works.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.failures import add_flags, cases_of, told
from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.build_engine import open_torch_engine
from tests.unit.engine.conftest import TINY, build_tiny

BUNDLED: Final = Path(__file__).parent.parent.parent / "pdserve/models/stdlib-5m"
TOP: Final = 5
PROMPTS: Final = (1, 17, 80, 300)
NEAR_TIE: Final = {"float32": 1e-3, "bfloat16": float("inf"), "fp8": float("inf")}


@dataclass
class Outcome:
    num_equal: int = 0
    num_texts: int = 0
    worst_gap: float = 0.0  # between the logprobs at which two texts first differ
    broken: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("own", "vllm"), default="own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=64)
    add_flags(parser, "models and dtypes")
    args = parser.parse_args()
    if args.engine == "vllm":
        from tests.gpu import check_vllm  # in vLLM's environment

        return check_vllm.run(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    transformers.utils.logging.disable_progress_bar()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print("| model | dtype | texts equal | worst logprob gap where they part | s |\n|---|---|---|---|---|")
    has_fp8 = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    pairs = [(family, dtype) for family in (*TINY, BUNDLED.name) for dtype in ("float32", "bfloat16")]
    pairs += [(BUNDLED.name, "fp8")] if has_fp8 else []
    cases = cases_of(
        args, [" ".join(pair) for pair in pairs], torch.cuda.synchronize if args.device == "cuda" else None
    )
    with tempfile.TemporaryDirectory() as parent:
        for family, dtype in pairs:
            began_s = time.monotonic()

            def say(outcome: Outcome, label: str = f"{family} | {dtype}", began_s: float = began_s) -> None:
                equal = f"{outcome.num_equal} of {outcome.num_texts}"
                took_s = time.monotonic() - began_s
                print(f"| {label} | {equal} | {outcome.worst_gap:.2g} {outcome.broken}| {took_s:.1f} |", flush=True)

            def check(family: str = family, dtype: str = dtype) -> None:
                folder = BUNDLED if family == BUNDLED.name else Path(parent) / family
                if not folder.exists():
                    build_tiny(family, folder)
                outcome = compare(folder, dtype, args.device, args.tokens)
                cases.num_failed += bool(outcome.broken)
                say(outcome)

            name = f"{family} {dtype}"
            cases.run(name, check, lambda error, name=name: say(Outcome(broken=f"**raised {told(name, error)}** ")))
    return int(cases.num_failed > 0)


def compare(folder: Path, dtype: str, device: str, num_tokens: int) -> Outcome:
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in PROMPTS]
    engine = open_torch_engine(
        WorkerConfig(
            worker_id="gpu", model=str(folder), device=device, dtype=dtype, kv_blocks=256, block_size=16, threads=2
        )
    )
    ours = write(engine, prompts, num_tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, "bfloat16" if dtype == "fp8" else dtype)
    ).to(device)
    exact: Any = None
    if dtype == "bfloat16" and folder != BUNDLED:
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    outcome = Outcome(num_texts=len(prompts))
    for prompt, outs in zip(prompts, ours, strict=True):
        given = torch.tensor([prompt], device=device)
        answer = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = answer.sequences[0, len(prompt) :].tolist()

        def exact_logits(num_sampled: int, prompt: list[int] = prompt, theirs: list[int] = theirs) -> torch.Tensor:
            with torch.inference_mode():
                logits: torch.Tensor = exact(torch.tensor([prompt + theirs[:num_sampled]], device=device)).logits[0, -1]
            return logits

        logits_TV = torch.stack(answer.logits)[:, 0]
        judge(outs, theirs, logits_TV, dtype, outcome, None if exact is None else exact_logits)
    return outcome


def judge(
    outs: list[TokenOut],
    theirs: list[int],
    logits_TV: torch.Tensor,
    dtype: str,
    outcome: Outcome,
    exact_logits: Callable[[int], torch.Tensor] | None = None,  # in float32, after that number of their tokens
) -> None:
    parted = next((at for at, (one, token) in enumerate(zip(outs, theirs, strict=True)) if one.token_id != token), None)
    if parted is None:
        outcome.num_equal += 1
        return
    their_top = logits_TV[parted].float().log_softmax(-1)
    gap = abs(float(their_top[theirs[parted]] - their_top[outs[parted].token_id]))
    outcome.worst_gap = max(outcome.worst_gap, gap)
    if exact_logits is not None:
        right_V = exact_logits(parted).log_softmax(-1)
        top_K = right_V.topk(4 * TOP).indices
        noise = float((their_top[top_K] - right_V[top_K]).abs().max())
        lost = float(right_V.max() - right_V[outs[parted].token_id])
        if not lost <= max(4 * noise, NEAR_TIE["float32"]):
            outcome.broken = f"**token {parted} loses {lost:.2g}, bfloat16's own noise is {noise:.2g}** "
        return
    in_theirs = outs[parted].token_id in their_top.topk(TOP).indices.tolist()
    in_ours = theirs[parted] in [token for token, _ in outs[parted].top]
    if not (in_theirs and in_ours and gap <= NEAR_TIE[dtype]):
        outcome.broken = f"**broken at token {parted}** "


def write(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[TokenOut]]:
    """All prompts at once: they are prefilled (in two chunks), then decoded. The end of sequence is ignored."""
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=TOP)
    size = engine.spec.block_size
    histories = [list(prompt) for prompt in prompts]
    tables, taken = [], 0
    for prompt in prompts:
        need = -(-(len(prompt) + num_tokens) // size)
        tables.append(list(range(taken, taken + need)))
        taken += need
    outs: list[list[TokenOut]] = [[] for _ in prompts]
    starts = [len(prompt) // 2 for prompt in prompts]
    first = [
        Row(tokens=prompt[:start], start=0, blocks=table)
        for prompt, start, table in zip(prompts, starts, tables, strict=True)
        if start
    ]
    engine.step(first)
    for _ in range(num_tokens):
        rows = [
            Row(
                tokens=history[start:],
                start=start,
                blocks=table,
                sample=sampling,
                history=history,
                prompt_len=len(prompt),
            )
            for history, start, table, prompt in zip(histories, starts, tables, prompts, strict=True)
        ]
        for index, out in enumerate(engine.step(rows)):
            outs[index] += out.sampled
            starts[index] = len(histories[index])
            histories[index].append(out.sampled[0].token_id)
    return outs


if __name__ == "__main__":
    sys.exit(main())
