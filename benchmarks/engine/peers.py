"""Our engine, transformers and the machine's own limits, each as a child process of benchmarks.engine.

ours: Engine.step of an engine of pdserve, with rows built anew for each step as a worker does; building them is not
timed. The engine vllm runs with the python of vLLM's environment.
transformers: model.forward on a static batch with its DynamicCache, sdpa attention, inference mode, no mask (every
prompt has the same length), the head on the last position only, and argmax: what `generate` does in a greedy step
without its bookkeeping. The order `generate` times the real thing, as a check that nothing was taken from it.
limits: reads a tensor larger than the last cache by torch.sum, and multiplies square float32 matrices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.engine.child import Orders, Stopwatch, prompts, serve
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine

BLOCK_SIZES: Final = {"own": 16, "vllm": 32}  # the defaults of workers; vLLM's kernels take multiples of 32
MATRIX_SIDE: Final = 2048
GREEDY: Final = Sampling(temperature=0.0, max_tokens=4096, ignore_eos=True)
PROBES: Final = 3  # of which the best counts, because a limit is the machine's best result


def ours(
    engine_name: str, model: str, dtype: str, kv_dtype: str, threads: int, kv_tokens: int, step_tokens: int
) -> Orders:
    engine = load_engine(
        WorkerConfig(
            model=model,
            worker_id="bench",
            engine=engine_name,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=threads,
            block_size=BLOCK_SIZES[engine_name],
            kv_blocks=kv_tokens // BLOCK_SIZES[engine_name],
            max_batch_tokens=step_tokens,
        ),
        Role.DECODE,
    )

    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        histories = prompts(batch, prompt_tokens, engine.spec.vocab_size, salt)
        watch = Stopwatch()
        step(engine, watch, histories, [0] * batch, prompt_tokens)
        for _ in range(warm + steps):
            step(engine, watch, histories, [len(one) - 1 for one in histories], prompt_tokens)
        return {**watch.steps(1 + warm, steps), "tokens": histories[0][prompt_tokens:]}

    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        watch = Stopwatch()
        step(engine, watch, prompts(1, tokens, engine.spec.vocab_size, salt), [0], tokens)
        return watch.steps(0, 1)

    return {"decode": decode, "prefill": prefill}


def step(engine: Engine, watch: Stopwatch, histories: list[list[int]], starts: list[int], prompt_len: int) -> None:
    """Computes every history from its start on, and appends its next token. Each sequence owns a run of blocks of equal
    length."""
    each = engine.spec.num_blocks // len(histories)
    rows = [
        Row(
            tokens=history[start:],
            start=start,
            blocks=range(index * each, index * each - len(history) // -engine.spec.block_size),
            sample=GREEDY,
            history=history,
            prompt_len=prompt_len,
        )
        for index, (history, start) in enumerate(zip(histories, starts, strict=True))
    ]
    with watch:
        outs = engine.step(rows)
    for history, out in zip(histories, outs, strict=True):
        history.append(out.sampled[0].token_id)


def transformers(model: str, threads: int) -> Orders:
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    vocab_size: int = net.config.vocab_size

    def forward(ids_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = net(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token_B1: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return token_B1

    @torch.inference_mode()
    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        cache: Any = DynamicCache(config=net.config)
        token_B1 = forward(torch.tensor(prompts(batch, prompt_tokens, vocab_size, salt)), cache)
        watch, tokens = Stopwatch(), [int(token_B1[0])]
        for _ in range(warm + steps):
            with watch:
                token_B1 = forward(token_B1, cache)
                tokens.append(int(token_B1[0]))
        return {**watch.steps(warm, steps), "tokens": tokens}

    @torch.inference_mode()
    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        ids_1T = torch.tensor(prompts(1, tokens, vocab_size, salt))
        watch = Stopwatch()
        with watch:
            forward(ids_1T, DynamicCache(config=net.config)).tolist()
        return watch.steps(0, 1)

    @torch.inference_mode()
    def generate(batch: int, prompt_tokens: int, steps: int, salt: int) -> dict[str, Any]:
        """Seconds of a step: what `steps` more tokens cost."""
        ids_BT = torch.tensor(prompts(batch, prompt_tokens, vocab_size, salt))
        mask_BT = torch.ones_like(ids_BT)

        def run(tokens: int) -> float:
            began_s = time.perf_counter()
            net.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            return time.perf_counter() - began_s

        run(1)
        return {"step_s": [(run(1 + steps) - run(1)) / steps]}

    return {"decode": decode, "prefill": prefill, "generate": generate}


def limits(threads: int) -> Orders:
    torch.set_num_threads(threads)
    read = torch.ones(read_bytes() // 4)
    side = torch.randn(MATRIX_SIDE, MATRIX_SIDE)

    def probe() -> dict[str, Any]:
        return {
            "read_bytes_per_s": read.nbytes / _best_s(lambda: read.sum()),
            "flops_per_s": 2 * MATRIX_SIDE**3 / _best_s(lambda: side @ side),
        }

    return {"probe": probe}


def read_bytes() -> int:
    """Four times the last cache that the kernel tells of, and at least 256 MiB: far from fitting."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] for text in (p.read_text().strip() for p in found)]
    return max(4 * max(sizes, default=0), 256 * 2**20)


def _best_s(work: Callable[[], torch.Tensor]) -> float:
    took_s = []
    for _ in range(PROBES):
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def main(kind: str, *rest: str) -> None:
    if kind == "ours":
        engine, model, dtype, kv_dtype, *sizes = rest
        serve(lambda: ours(engine, model, dtype, kv_dtype, *map(int, sizes)))
    elif kind == "transformers":
        model, threads = rest
        serve(lambda: transformers(model, int(threads)))
    else:
        serve(lambda: limits(int(rest[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
