"""Part of benchmarks.gpu end to end: a prefill and a decode worker process share the device, every prompt is remote."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.driver import RouterDriver, ServedAnswer, WorkerProcess
from benchmarks.gpu.ends import nccl_environment
from benchmarks.gpu.parts import LLAMA
from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import Setting
from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.memory.plan import MemoryPlan

CASE_S: Final = 80.0  # two workers start and compile
WORKER_SHARE: Final = 0.45  # of the device's memory, for each of two workers
BUNDLED: Final = Path(__file__).parents[2] / "pdserve/models/stdlib-5m"
MADE_UP: Final = f"{LLAMA}, made up"
TEXTS: Final = (
    "def read_lines(path):\n",
    "import os\n\nclass Node:\n    def __init__(self",
    "Return a list of the words in the string",
    "try:\n    import json\nexcept",
    "    if not isinstance(value, int):\n        raise",
    '"""Functions that walk a directory tree.',
    "for name, value in sorted(items.items()):",
    "assert ",
)


def serving(setting: Setting, folder: Path) -> None:
    columns = ["model", "over", "at once", "prompt", "TTFT ms", "TPOT ms", "tokens equal transformers'"]
    report = setting.report(folder, "a prefill and a decode worker on one device", columns)
    runs = {f"stdlib-5m over {transport}": transport for transport in transports_of(setting)}
    cases = setting.cases([*runs, MADE_UP], CASE_S)
    bundled: dict[str, Any] = {"model": str(BUNDLED), "dtype": "float32", "kv_blocks": 512}
    prompts = bundled_prompts()

    @cache
    def theirs() -> list[list[int]]:
        return transformers_tokens(setting, prompts, setting.serve_tokens)

    def compared(transport: str) -> None:
        labels = ["stdlib-5m, float32", transport]
        serve(setting, report, labels, bundled | {"transport": transport}, prompts, theirs())

    for name, transport in runs.items():
        cases.run(name, partial(compared, transport), partial(report.error, name))
    cases.run(MADE_UP, partial(serve_made_up, setting, report), partial(report.error, MADE_UP))


def transports_of(setting: Setting) -> tuple[str, ...]:
    return ("shm",) if setting.is_rehearsal else ("cuda_ipc", "nccl")


def serve_made_up(setting: Setting, report: Report) -> None:
    """The Llama shape with made-up weights, and what each worker does with its part of the device's memory."""
    with tempfile.TemporaryDirectory() as parent:
        shape = setting.folder(LLAMA, Path(parent))
        length = setting.peer_context
        prompts = [[3 + (at * 7 + which * 31) % 370 for at in range(length)] for which in range(setting.serve_at_once)]
        made_up: dict[str, Any] = {
            "model": str(shape),
            "load": "dummy",
            "dtype": "float32" if setting.is_rehearsal else "bfloat16",
            # The size of the pool is left to the worker, as with `pdserve up`: each has its share of the device.
            "gpu_memory_share": WORKER_SHARE,
            "transport": "shm" if setting.is_rehearsal else "cuda_ipc",
            "max_context_tokens": length + setting.serve_tokens,
        }
        serve(setting, report, [MADE_UP, str(made_up["transport"])], made_up, prompts, None)


def serve(
    setting: Setting,
    report: Report,
    labels: list[str],
    flags: dict[str, Any],
    prompts: list[list[int]],
    theirs: list[list[int]] | None,
) -> None:
    """Sends requests one after the other, then several at once; the warm-up is not counted."""
    common: dict[str, Any] = {
        "device": setting.clock.device.type,
        "threads": 1 if setting.is_rehearsal else 8,  # that generate weights
        "speculation": "off",
        "async_scheduling": "on",  # also in a rehearsal: its tokens come in another form (PlainTokens)
        "max_batch": setting.serve_at_once,
        "max_batch_tokens": setting.chunk_tokens,
        "is_prefix_cache_on": False,  # so that the second round is remote again
        "inbox_depth": 64,
    }
    environment = nccl_environment if flags["transport"] == "nccl" else lambda role: {}
    workers = [
        WorkerProcess(role, WorkerConfig(worker_id=f"{role.value}-0", **(common | flags)), environment(role.value))
        for role in Role
    ]
    try:
        alone, together = asyncio.run(drive(setting, workers, prompts))
        if not flags.get("kv_blocks"):
            for worker in workers:
                told = parts_of(asyncio.run(worker.memory()))
                report.row(f"{labels[0]}, memory of {worker.role.value}", *[""] * 5, told)
    finally:
        for worker in workers:
            worker.stop()
    size = statistics.median(len(prompt) for prompt in prompts)
    for at_once, answers in ((1, alone), (setting.serve_at_once, together)):
        equal = ""
        if theirs is not None:
            same = sum(answer.tokens == expected for answer, expected in zip(answers, theirs, strict=True))
            equal = f"{same} of {len(theirs)}"
            report.bar(f"{', '.join(labels)}, {at_once} at once: equal texts", same, least=len(theirs))
        ttft_ms, tpot_ms = (
            statistics.median(getattr(one, name) * 1e3 for one in answers) for name in ("ttft_s", "tpot_s")
        )
        report.row(*labels, at_once, float(size), ttft_ms, tpot_ms, equal)


def parts_of(plan: MemoryPlan) -> str:
    sizes = {name: size for name, size in asdict(plan).items() if isinstance(size, int) and size}
    tokens = sizes.pop("kv_tokens")
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
    return f"{plan.device}: {parts} GB; {tokens:,} tokens of KV"


async def drive(
    setting: Setting, workers: Sequence[WorkerProcess], prompts: list[list[int]]
) -> tuple[list[ServedAnswer], list[ServedAnswer]]:
    driver = RouterDriver()
    try:
        for worker, address in zip(workers, await asyncio.gather(*(one.address() for one in workers)), strict=True):
            await driver.attach(worker.role, address)
        count = setting.serve_tokens
        await driver.ask("warm", prompts[0], count)
        alone = [await driver.ask(f"alone-{index}", prompt, count) for index, prompt in enumerate(prompts)]
        together: list[ServedAnswer] = []
        for first in range(0, len(prompts), setting.serve_at_once):
            some = enumerate(prompts[first : first + setting.serve_at_once])
            asked = (driver.ask(f"together-{first + index}", prompt, count) for index, prompt in some)
            together += await asyncio.gather(*asked)
        return alone, together
    finally:
        await driver.close()


def bundled_prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def transformers_tokens(setting: Setting, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    written: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).to(setting.clock.device)
    texts = []
    for prompt in prompts:
        given = torch.tensor([prompt], device=setting.clock.device)
        done = written.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            do_sample=False,
            pad_token_id=0,
        )
        texts.append(done[0, len(prompt) :].tolist())
    return texts
