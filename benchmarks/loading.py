"""Compares the loading of a checkpoint with `cat FILES > /dev/null` of the same bytes, and measures its memory.

    python -m benchmarks.loading [--gb 1] [--stored F32,BF16] [--dtype float32,int8] [--repeat 5] [--threads 0]

It writes a Llama-shaped checkpoint of --gb in four shards to a temporary folder. Rounds alternate between cat and the
load, cold and warm, so that other work on the machine affects both; medians are compared. Each load is a separate
process. Its time is that of `load_weights`, after headers were read and processes started. Its memory is VmHWM minus
what torch and pdserve used before the load; the model's memory is VmRSS after the load, minus the same. Cold means
fsync, then posix_fadvise DONTNEED on every shard, and /proc/sys/vm/drop_caches if that may be written.
Bars: a cold load at 0.8 of cat's speed or more, a peak of 1.15 of the final memory or less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.harness import JsonProcess
from pdserve.core.json_text import to_json
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.device import choose_precision
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model.config import read_config

NUM_SHARDS: Final = 4
SPEED_BAR: Final = 0.8
MEMORY_BAR: Final = 1.15
DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16}
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")


def write_checkpoint(folder: Path, num_bytes: int, stored: str) -> int:
    """Returns its size. The values are a repeated page of noise: the loader does not look at them."""
    hidden, mlp, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 512
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    item_bytes = DTYPES[stored].itemsize
    rest = 2 * CONFIG["vocab_size"] * hidden * item_bytes
    layer_bytes = sum(item_bytes * torch.Size(shape).numel() for shape in layer.values())
    num_layers = max(1, round((num_bytes - rest) / layer_bytes))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    names = list(shapes)
    per_shard = -(-len(names) // NUM_SHARDS)
    weight_map: dict[str, str] = {}
    for number in range(NUM_SHARDS):
        part = names[number * per_shard : (number + 1) * per_shard]
        file = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        write_shard(folder / file, {name: shapes[name] for name in part}, DTYPES[stored])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    noise = torch.randn(2**20, dtype=dtype) * 0.02
    tensors = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = noise.repeat(-(-size // len(noise)))[:size].view(shape).clone()
    save_file(tensors, file)
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def drop(files: Sequence[Path]) -> str:
    """Empties the page cache of the files; says how."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return "posix_fadvise"
    return "posix_fadvise and drop_caches"


def cat(files: Sequence[Path]) -> float:
    began_s = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *map(str, files)], stdout=nowhere, check=True)
    return time.perf_counter() - began_s


def load_once(folder: Path, dtype: str, threads: int) -> None:
    """The child: waits for a line on stdin, loads, prints what it took."""
    if threads:
        torch.set_num_threads(threads)
    torch.randn(256, 256) @ torch.randn(256, 256)  # wakes the threads
    config, checkpoint = read_config(folder), open_checkpoint(folder)
    print("{}", flush=True)  # it is ready
    sys.stdin.readline()
    before = memory("VmRSS")
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    device = torch.device("cpu")
    precision = choose_precision(dtype, device, config.dtype)
    weights = load_weights(config, checkpoint, device, precision.compute, rounding=precision.rounding)
    load_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    result = {"load_s": load_s, "cpu_s": cpu_s, "peak": memory("VmHWM") - before, "final": memory("VmRSS") - before}
    print(json.dumps(result | {"num_layers": len(weights.layers)}), flush=True)


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def load(folder: Path, dtype: str, threads: int, files: Sequence[Path], *, is_cold: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loading", "--child", str(folder)]
    command += ["--dtype", dtype, "--threads", str(threads)]
    child = JsonProcess(command)
    child.hear()
    if is_cold:
        drop(files)
    result: dict[str, float] = child.ask({})
    child.close()
    return result


def measure(folder: Path, stored: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    times: dict[str, list[float]] = {"cat cold": [], "load cold": [], "cat warm": [], "load warm": []}
    peaks, finals, cpu_s = [], [], []
    how = ""
    for _ in range(args.repeat):
        how = drop(files)
        times["cat cold"].append(cat(files))
        cold = load(folder, dtype, args.threads, files, is_cold=True)
        times["load cold"].append(cold["load_s"])
        times["cat warm"].append(cat(files))
        warm = load(folder, dtype, args.threads, files, is_cold=False)
        times["load warm"].append(warm["load_s"])
        peaks += [cold["peak"], warm["peak"]]
        finals += [cold["final"], warm["final"]]
        cpu_s += [cold["cpu_s"], warm["cpu_s"]]
    speeds = {name: num_bytes / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    best = {name: num_bytes / min(seconds) / 1e9 for name, seconds in times.items()}
    return {
        "stored": stored,
        "dtype": dtype,
        "gb": num_bytes / 1e9,
        "dropped_by": how,
        "gb_per_s": speeds,
        "best_gb_per_s": best,
        "cold_ratio": speeds["load cold"] / speeds["cat cold"],
        "best_cold_ratio": best["load cold"] / best["cat cold"],
        "peak_over_final": max(peaks) / statistics.median(finals),
        "cpu_s_per_gb": statistics.median(cpu_s) / num_bytes * 1e9,
        "final_gb": statistics.median(finals) / 1e9,
    }


def report(result: dict[str, Any]) -> str:
    speed, best = result["gb_per_s"], result["best_gb_per_s"]
    fast = "met" if result["cold_ratio"] >= SPEED_BAR else "MISSED"
    lean = "met" if result["peak_over_final"] <= MEMORY_BAR else "MISSED"
    shown = "  ".join(f"{name} {speed[name]:.2f} (best {best[name]:.2f})" for name in speed)
    return (
        f"{result['stored']} -> {result['dtype']}, {result['gb']:.2f} GB, dropped by {result['dropped_by']}\n"
        f"  GB/s: {shown}\n"
        f"  CPU seconds of a load: {result['cpu_s_per_gb']:.2f} per GB read\n"
        f"  cold load / cat {result['cold_ratio']:.2f} (best {result['best_cold_ratio']:.2f}), bar {SPEED_BAR}: "
        f"{fast}\n"
        f"  peak / final {result['peak_over_final']:.3f} of {result['final_gb']:.2f} GB, bar {MEMORY_BAR}: {lean}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.loading", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--stored", default="F32,BF16")
    parser.add_argument("--dtype", default="float32,int8")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 takes torch's own number")
    parser.add_argument("--folder", default=None, help="where the checkpoint is written; the system's temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        load_once(Path(args.child), args.dtype, args.threads)
        return
    for stored in args.stored.split(","):
        folder = Path(tempfile.mkdtemp(prefix="pdserve-loading-", dir=args.folder))
        try:
            write_checkpoint(folder, int(args.gb * 1e9), stored)
            for dtype in args.dtype.split(","):
                result = measure(folder, stored, dtype, args)
                print(to_json(result) if args.json else report(result), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
