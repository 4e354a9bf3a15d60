"""Parts of benchmarks.gpu in one process: the device's rates, decode and prefill of a model, transformers beside it."""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.work import decode_work, prefill_work
from benchmarks.gpu.claims import GOALS, PREFILL_GOAL, expected_of_copy
from benchmarks.gpu.clock import copy_gb_s, kernels_of, matrix_tflop_s
from benchmarks.gpu.floor import decode_floor, shape_of
from benchmarks.gpu.report import FILE, Report, read
from benchmarks.gpu.setting import Setting
from pdserve.engine.model.config import read_config

LLAMA = "llama-3.1-8b"
NAMED_ROWS = (1, 128)
_TELLING = (
    "CUDA",
    "NCCL",
    "PYTORCH",
    "TORCH",
    "TRITON",
)  # prefixes of environment variables that change what is measured
_PROFILED_STEPS = 4
_NAMED_KERNELS = 14  # number of a step's longest kernels that are reported


def device(setting: Setting, folder: Path) -> None:
    report = setting.report(folder, "what all other figures are shares of", ["fact", "value"])
    kinds = ("bfloat16", "fp8, exact sums", "fp8, fast sums")
    cases = setting.cases(["facts", "copy", *kinds])

    def tell_facts() -> None:
        for name, value in facts(setting):
            report.row(name, value)

    def copy() -> None:
        report.row("device copy, GB/s read and written", copy_gb_s(setting.clock, setting.copy_bytes))

    def product(kind: str) -> None:
        report.row(f"product of {setting.matrix_size}^3, {kind}, TFLOP/s", matrix(setting, kind))

    cases.run("facts", tell_facts, partial(report.error, "facts"))
    cases.run("copy", copy, partial(report.error, "copy"))
    for kind in kinds:
        cases.run(kind, partial(product, kind), partial(report.error, kind))


def facts(setting: Setting) -> list[tuple[str, str]]:
    """The installed versions; a part reports a missing package itself."""
    found = [("python", platform.python_version()), ("torch", str(torch.__version__))]
    modules = ("triton", "numpy", "transformers", "tokenizers", "safetensors", "grpc", "google.protobuf", "cupy")
    found += [(name, text_of(lambda name=name: importlib.import_module(name).__version__)) for name in modules]  # type: ignore[misc]
    if setting.clock.device.type != "cuda":
        return [*found, ("device", "CPU: a rehearsal, no figure counts")]
    properties: Any = torch.cuda.get_device_properties(0)
    found += [("device", properties.name), ("memory, GB", f"{properties.total_memory / 1e9:.1f}")]
    found += [("free, GB", f"{torch.cuda.mem_get_info()[0] / 1e9:.1f}")]
    found += [("multiprocessors", str(properties.multi_processor_count)), ("CUDA", str(torch.version.cuda))]
    found += [(name, value) for name, value in os.environ.items() if name.split("_")[0] in _TELLING]
    found += [("cuDNN", text_of(torch.backends.cudnn.version)), ("NCCL of CuPy", text_of(nccl_version))]
    found += [
        ("driver", text_of(driver_version)),
        ("C compiler, for Triton", str(shutil.which("gcc") or shutil.which("cc"))),
    ]
    return found


def text_of(ask: Callable[[], object]) -> str:
    try:
        return str(ask())
    except Exception as error:
        return f"missing: {type(error).__name__}: {error}"[:200]


def nccl_version() -> int:
    nccl = importlib.import_module("cupy.cuda.nccl")
    return int(nccl.get_version())


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20.0).stdout.strip()


def matrix(setting: Setting, kind: str) -> float:
    return matrix_tflop_s(setting.clock, setting.matrix_size, kind)


def model(setting: Setting, folder: Path, shape: str, dtype: str) -> None:
    """Decode at every batch and context, then prefill, then the sums of the steps' kernels, of one shape and dtype.

    The profiler comes last: once it has been started, everything after it is timed with it attached.
    """
    from benchmarks.gpu.engine import AsyncRows, decode, open_model, prefill_s

    columns = ["what", "rows", "context", "tok/s", "step ms", "computed ms"]
    columns += ["of copy bandwidth", "step / kernels", "idle %", "note"]
    report = setting.report(folder, f"{shape} in {dtype}", columns)
    decodes = {f"decode {rows} x {context}": (rows, context) for rows, context in setting.decodes}
    prefills = {f"prefill {num_tokens}": num_tokens for num_tokens in setting.prefills}
    profiled = {f"kernels {rows} x {context}": (rows, context) for rows, context in setting.decodes}
    cases = setting.cases([*decodes, *prefills, *profiled])
    copy = copy_gb_s(setting.clock, setting.copy_bytes)
    with tempfile.TemporaryDirectory() as parent:
        opened = open_model(setting, shape, dtype, Path(parent))
        config = read_config(Path(parent) / shape)
    report.row("loaded", *[""] * 8, f"{opened.load_s:.1f} s, {opened.engine.spec.num_blocks:,} blocks")
    graphs = f"{len(opened.replays.buckets)} graphs in {opened.capture_s:.1f} s"
    report.row("captured", *[""] * 8, graphs)
    is_judged = shape == LLAMA and dtype == "bfloat16"
    steps_s = steps_of(folder, setting)

    def decode_one(rows: int, context: int) -> None:
        done = decode(opened, rows, context, setting.num_steps)
        steps_s[rows, context] = done.step_s
        work = decode_work(config, "int8" if dtype == "fp8" else "bfloat16", 2, rows, context)
        read = work.read_bytes + (config.hidden_size * config.vocab_size if dtype == "fp8" else 0)  # the head
        share = read / done.step_s / 1e9 / copy
        shared = opened.shared_kv(rows, context + setting.num_steps)
        floor = decode_floor(shape_of(config), rows, context, copy)
        report.row(
            "decode",
            rows,
            context,
            rows / done.step_s,
            done.step_s * 1e3,
            floor.step_s * 1e3 if dtype == "bfloat16" else "",
            share,
            "",
            100 * done.idle,
            f"{shared:.0%} of the KV shared" if shared else "",
        )
        if is_judged and context == setting.decodes[0][1]:
            bars(report, rows, rows / done.step_s, share)
            report.bar(f"b={rows}: GPU idle between steps, %", 100 * done.idle, most=2.0)

    @cache
    def rate() -> float:
        return matrix(setting, "fp8, fast sums" if dtype == "fp8" and not setting.is_rehearsal else "bfloat16")

    def prefill_one(num_tokens: int) -> None:
        took_s = prefill_s(opened, num_tokens, setting.chunk_tokens)
        share = prefill_work(config, "bfloat16", num_tokens).flops / took_s / 1e12 / rate()
        note = f"{share:.0%} of the measured matrix rate, chunks of {setting.chunk_tokens}"
        report.row("prefill", 1, num_tokens, num_tokens / took_s, took_s * 1e3, "", "", "", "", note)
        if is_judged and num_tokens == 4096:
            goal = PREFILL_GOAL
            report.bar("prefill of 4096 tokens, tok/s", num_tokens / took_s, least=goal.least, expected=goal.expected)

    def profile(rows: int, context: int) -> None:
        count = 1 if setting.is_rehearsal else _PROFILED_STEPS
        async_rows = AsyncRows(opened, rows, context, count)
        kernels = kernels_of(setting.clock, lambda: async_rows.steps(count))
        kernels_s = kernels.seconds / count
        over = steps_s.get((rows, context), math.nan) / kernels_s if kernels_s else math.nan
        report.row("kernels of a step", rows, context, "", kernels_s * 1e3, "", "", over, "", "")
        if rows in NAMED_ROWS and context == setting.decodes[0][1]:
            for name, launches, total_s in kernels.by_name[:_NAMED_KERNELS]:
                each = f"{launches / count:.4g} of {total_s / launches * 1e6:.1f} us: {name[:70]}".replace("|", "/")
                report.row("of them", rows, context, "", total_s / count * 1e3, "", "", "", "", each)
        if is_judged and context == setting.decodes[0][1]:
            report.bar(f"b={rows}: step / sum of its kernels", over, most=1.10)

    for name, batch in decodes.items():
        cases.run(name, partial(decode_one, *batch), partial(report.error, name))
    for name, num_tokens in prefills.items():
        cases.run(name, partial(prefill_one, num_tokens), partial(report.error, name))
    for name, batch in profiled.items():
        cases.run(name, partial(profile, *batch), partial(report.error, name))
    opened.engine.close()


def steps_of(folder: Path, setting: Setting) -> dict[tuple[int, int], float]:
    """Seconds of the steps that an earlier process of this part has measured, by rows and context."""
    label = setting.choice.label
    rows = read(folder / FILE)[label].rows if setting.choice.num_failed else []
    numbers = [[float(cell.replace(",", "")) for cell in row[1:5]] for row in rows if row[0] == "decode"]
    return {(int(count), int(context)): step_ms / 1e3 for count, context, _, step_ms in numbers}


def bars(report: Report, rows: int, tokens_per_s: float, share: float) -> None:
    if goal := GOALS.get(rows):
        report.bar(f"b={rows}: tok/s", tokens_per_s, least=goal.least, expected=goal.expected)
    if rows == 1:
        report.bar("b=1: share of measured copy bandwidth", share, least=0.8, expected=expected_of_copy())


def peer(setting: Setting, folder: Path) -> None:
    """transformers on the same shape, with a static cache and its defaults: eager, no compiler."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    report = setting.report(folder, f"{LLAMA}, static cache, not compiled", ["what", "rows", "tok/s", "ms"])
    batches = {f"{rows} rows": rows for rows in setting.peer_rows}
    cases = setting.cases(list(batches))
    dtype = torch.float32 if setting.is_rehearsal else torch.bfloat16
    with tempfile.TemporaryDirectory() as parent, torch.device(setting.clock.device):
        config = AutoConfig.from_pretrained(setting.folder(LLAMA, Path(parent)))
        written: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def measure(rows: int) -> None:
        given = torch.randint(3, 300, (rows, setting.peer_context), device=setting.clock.device)
        few, many = 2, 2 + setting.num_steps
        generate(setting, written, given, few)
        read_s = generate(setting, written, given, few)
        took_s = (generate(setting, written, given, many) - read_s) / (many - few)
        report.row("decode", rows, rows / took_s, took_s * 1e3)
        report.row(f"prefill of {rows} x {setting.peer_context}", rows, given.numel() / read_s, read_s * 1e3)

    for name, rows in batches.items():
        cases.run(name, partial(measure, rows), partial(report.error, name))
        gc.collect()


def generate(setting: Setting, written: Any, given: torch.Tensor, num_tokens: int) -> float:
    setting.clock.sync()
    from benchmarks.gpu.engine import timed

    def run() -> None:
        written.generate(
            given,
            attention_mask=torch.ones_like(given),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
        )
        setting.clock.sync()

    return timed(run)
