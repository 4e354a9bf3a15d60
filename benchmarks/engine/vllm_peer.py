"""vLLM as a peer of benchmarks.engine, run by the python of its own environment. Imports nothing of pdserve.

The engine core runs in this process, with its default runner, compiled, and without prefix caching, tokenizer or
detokenizer. Timed is what costs least of a step of vLLM: its executor computes what its own scheduler chose, and its
own sampler draws. Scheduling before and bookkeeping after are not timed. Prompts of one turn are added before its first
step, and the budget of a step takes them all, so every step after the first is a decode step of the whole batch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.engine.child import Orders, Stopwatch, prompts, serve


def load(model: str, dtype: str, kv_bytes: int, max_batch: int, max_tokens: int, step_tokens: int) -> Orders:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.request import Request

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
    core: Any = llm.llm_engine.engine_core.engine_core
    vocab_size = llm.model_config.get_vocab_size()
    serial = 0

    def run(batch: int, prompt_tokens: int, steps: int, salt: int) -> tuple[Stopwatch, list[int]]:
        """The time of each step, and the tokens of the first row."""
        nonlocal serial
        params = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True, detokenize=False)
        first = f"{serial}-0"
        for index, row in enumerate(prompts(batch, prompt_tokens, vocab_size, salt)):
            core.add_request(Request(f"{serial}-{index}", row, params, None))
        serial += 1
        watch = Stopwatch()
        tokens: list[int] = []
        while core.scheduler.has_requests():
            scheduled = core.scheduler.schedule()
            with watch:
                output = core.model_executor.execute_model(scheduled)
                if output is None:
                    output = core.model_executor.sample_tokens(None)
            for done in core.scheduler.update_from_output(scheduled, output).values():
                for one in done.outputs:
                    if one.request_id == first:
                        tokens += one.new_token_ids
        return watch, tokens

    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        watch, tokens = run(batch, prompt_tokens, warm + steps, salt)
        return {**watch.steps(1 + warm, steps), "tokens": tokens}

    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        return run(1, tokens, 0, salt)[0].steps(0, 1)

    return {"decode": decode, "prefill": prefill}


if __name__ == "__main__":
    name, dtype, *sizes = sys.argv[1:]
    serve(lambda: load(name, dtype, *map(int, sizes)))
