"""Our engine, transformers and the machine's own limits, each as a child process of benchmarks.engine.

ours: Engine.step, with rows built anew for each step as a worker does.
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

from benchmarks.engine.child import Orders, prompts, serve
from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.build_engine import open_torch_engine

BLOCK_SIZE: Final = 16
MATRIX_SIDE: Final = 2048
GREEDY: Final = Sampling(temperature=0.0, max_tokens=4096, ignore_eos=True)
PROBES: Final = 3  # of which the best counts, because a limit is the machine's best result


def ours(model: str, dtype: str, kv_dtype: str, threads: int, kv_tokens: int) -> Orders:
    settings: dict[str, Any] = {"kv_dtype": kv_dtype} if kv_dtype else {}
    engine = open_torch_engine(
        WorkerConfig(
            model=model,
            worker_id="bench",
            dtype=dtype,
            threads=threads,
            block_size=BLOCK_SIZE,
            kv_blocks=kv_tokens // BLOCK_SIZE,
            **settings,
        )
    )

    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        histories = prompts(batch, prompt_tokens, engine.spec.vocab_size, salt)
        first = step(engine, histories, [0] * batch, prompt_tokens)
        for history, token in zip(histories, first, strict=True):
            history.append(token)
        took_s = []
        for _ in range(warm + steps):
            began_s = time.perf_counter()
            sampled = step(engine, histories, [len(one) - 1 for one in histories], prompt_tokens)
            took_s.append(time.perf_counter() - began_s)
            for history, token in zip(histories, sampled, strict=True):
                history.append(token)
        return {"step_s": took_s[warm:], "tokens": histories[0][prompt_tokens:]}

    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        histories = prompts(1, tokens, engine.spec.vocab_size, salt)
        began_s = time.perf_counter()
        step(engine, histories, [0], tokens)
        return {"prefill_s": time.perf_counter() - began_s}

    return {"decode": decode, "prefill": prefill}


def step(engine: Engine, histories: list[list[int]], starts: list[int], prompt_len: int) -> list[int]:
    """Computes every history from its start on; each sequence owns a run of blocks of equal length."""
    each = engine.spec.num_blocks // len(histories)
    rows = [
        Row(
            tokens=history[start:],
            start=start,
            blocks=range(index * each, index * each - len(history) // -BLOCK_SIZE),
            sample=GREEDY,
            history=history,
            prompt_len=prompt_len,
        )
        for index, (history, start) in enumerate(zip(histories, starts, strict=True))
    ]
    return [out.sampled[0].token_id for out in engine.step(rows)]


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
        took_s, tokens = [], [int(token_B1[0])]
        for _ in range(warm + steps):
            began_s = time.perf_counter()
            token_B1 = forward(token_B1, cache)
            tokens.append(int(token_B1[0]))
            took_s.append(time.perf_counter() - began_s)
        return {"step_s": took_s[warm:], "tokens": tokens}

    @torch.inference_mode()
    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        ids_1T = torch.tensor(prompts(1, tokens, vocab_size, salt))
        began_s = time.perf_counter()
        forward(ids_1T, DynamicCache(config=net.config)).tolist()
        return {"prefill_s": time.perf_counter() - began_s}

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
        model, dtype, kv_dtype, threads, kv_tokens = rest
        serve(lambda: ours(model, dtype, kv_dtype, int(threads), int(kv_tokens)))
    elif kind == "transformers":
        model, threads = rest
        serve(lambda: transformers(model, int(threads)))
    else:
        serve(lambda: limits(int(rest[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
