"""vLLM as a peer of benchmarks.engine, run by the python of its own environment. Imports nothing of pdserve.

The engine core runs in this process (no RPC between steps), without prefix caching, tokenizer or detokenizer. A step is
one LLMEngine.step: schedule, compute, draw, process the output. Prompts of one turn are added before its first step,
and the budget of a step takes them all, so every step after the first is a decode step of the whole batch.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.engine.child import Orders, prompts, serve


def load(model: str, dtype: str, kv_bytes: int, max_batch: int, max_tokens: int, step_tokens: int) -> Orders:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max_tokens,
        max_num_batched_tokens=step_tokens,
        kv_cache_memory_bytes=kv_bytes,
        max_num_seqs=max_batch,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    vocab_size = llm.model_config.get_vocab_size()
    serial = 0

    def run(batch: int, prompt_tokens: int, steps: int, salt: int) -> tuple[list[float], list[int]]:
        """Seconds of each step, and the tokens of the first row."""
        nonlocal serial
        params = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True, detokenize=False)
        first = f"{serial}-0"
        for index, row in enumerate(prompts(batch, prompt_tokens, vocab_size, salt)):
            engine.add_request(f"{serial}-{index}", TokensPrompt(prompt_token_ids=row), params)
        serial += 1
        took_s: list[float] = []
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            began_s = time.perf_counter()
            outs = engine.step()
            took_s.append(time.perf_counter() - began_s)
            for out in outs:
                if out.request_id.startswith(first):
                    tokens = list(out.outputs[0].token_ids)
        return took_s, tokens

    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        took_s, tokens = run(batch, prompt_tokens, warm + steps, salt)
        # The last step may only hand in what was computed before it.
        return {"step_s": took_s[1 + warm : 1 + warm + steps], "tokens": tokens}

    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        took_s, _ = run(1, tokens, 0, salt)
        return {"prefill_s": sum(took_s)}

    return {"decode": decode, "prefill": prefill}


if __name__ == "__main__":
    name, dtype, *sizes = sys.argv[1:]
    serve(lambda: load(name, dtype, *map(int, sizes)))
