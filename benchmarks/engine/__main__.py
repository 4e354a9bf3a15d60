"""Our engine beside transformers, and beside vLLM where its environment's python is given: in turns, in one run.

    python -m benchmarks.engine --model FOLDER [--dtypes float32,bfloat16,int8,int4,int8/int8] [--out DIR]
        [--peer-python PYTHON] [--peer-dtypes float32,bfloat16]
    python -m benchmarks.engine --model FOLDER --engine vllm --peer-python PYTHON --dtypes bfloat16   # its overhead

With --engine vllm our engine is vLLM's model runner behind our interface, and its peer is vLLM's own step.

Decode: prompts of 32 tokens, two steps to warm up, then --steps measured ones; a turn counts with the median of its
steps. Prefill: one prompt in one step, to its first token. Greedy everywhere, end of sequence ignored, the same
prompts, --threads threads each. Every peer is a process of its own and stands stopped while another computes; the
order changes from round to round, ratios are taken round by round, and medians are shown with the least and the
greatest. The machine's read and matrix rates are measured before and after every turn; a step's share of them is
what it must read (each matrix once, the KV) and compute at the least. peers.py and vllm_peer.py in benchmarks/engine
say how each peer is driven.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.engine.report import Memory, cost_table, limits_line, peer_table, points_of, speed_table
from benchmarks.engine.turns import PROMPT_TOKENS, WARM_STEPS, PeerEngine, PeerFailed, Point, Turn, take_turns
from benchmarks.engine.work import WEIGHT_BYTES, EngineWork, decode_work, prefill_work
from benchmarks.harness import numbers, table, vllm_env
from pdserve.core.errors import PdserveError
from pdserve.engine.model.config import ModelConfig, read_config
from pdserve.launch.spec import waiting_env

ROOM_TOKENS: Final = 128  # vLLM's block on a CPU: the KV of each sequence is rounded up to it
PEERS: Final = "benchmarks.engine.peers"
TRANSFORMERS: Final = "transformers float32"


def main() -> int:
    flags = _flags()
    model = read_config(flags.model)
    points = _points(flags, model)
    out = flags.out or Path(tempfile.mkdtemp(prefix="pdserve-bench-"))
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        limits = stack.enter_context(
            _running("limits", [sys.executable, "-m", PEERS, "limits", str(flags.threads)], {}, out)
        )
        peers = [
            stack.enter_context(_running(name, *how, out)) for name, how in _commands(flags, model, points).items()
        ]
        turns: list[Turn] = []
        began_s = time.monotonic()
        num_rounds = len(points) * flags.rounds
        for number, done in enumerate(take_turns(peers, limits, points, flags.rounds, flags.steps), start=1):
            turns += done
            left_s = (time.monotonic() - began_s) / number * (num_rounds - number)
            _say(f"{done[0].point.label}: round {done[0].round + 1} of {flags.rounds}; about {left_s:.0f} s left")
        (out / "engine.json").write_text(json.dumps([asdict(turn) for turn in turns]) + "\n")
        memory = {peer.name: _memory(peer) for peer in peers}
        check = _check_generate(peers, turns, flags.steps)
    others = [name for name in memory if not name.startswith("pdserve")]
    report = "\n\n".join(
        [
            f"{flags.model.resolve().name}, {flags.threads} threads, {platform.processor() or platform.machine()}, "
            f"Python {platform.python_version()}, {flags.rounds} rounds, {flags.steps} steps; {limits_line(turns)}",
            table(speed_table(turns, others, lambda turn: _work(model, flags.steps, turn))),
            *(table(cost_table(turns, name)) for name in others if name != TRANSFORMERS),
            table(peer_table(turns, memory, others[0])),
            *check,
        ]
    )
    print(report)
    (out / "engine.md").write_text(report + "\n")
    _say(f"written to {out}: engine.md, engine.json, and each peer's output")
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--engine", choices=("own", "vllm"), default="own", help="of pdserve; vllm: by --peer-python")
    parser.add_argument("--dtypes", default="float32", help="our engine's: weights, or weights/KV; comma-separated")
    parser.add_argument("--peer-python", type=Path, help="python of an environment with vllm; not measured without")
    parser.add_argument(
        "--peer-dtypes", help="vllm's, comma-separated (float32,bfloat16; with --engine vllm: --dtypes)"
    )
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048], help="tokens of the prefills")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="measured decode steps of a turn")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the report and the raw figures")
    flags = parser.parse_args()
    if flags.engine == "vllm" and not flags.peer_python:
        parser.error("--engine vllm: give --peer-python, the python of an environment with vllm (make vllm-env)")
    if not flags.peer_dtypes:
        flags.peer_dtypes = flags.dtypes.partition("/")[0] if flags.engine == "vllm" else "float32,bfloat16"
    return flags


def _points(flags: argparse.Namespace, model: ModelConfig) -> list[Point]:
    points = [Point("decode", batch) for batch in flags.batches]
    for tokens in flags.prompts:
        if tokens < model.max_context_tokens:
            points.append(Point("prefill", tokens))
        else:
            _say(f"prefill of {tokens} tokens left out: the model's limit is {model.max_context_tokens}")
    return points


def _commands(
    flags: argparse.Namespace, model: ModelConfig, points: Sequence[Point]
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each peer, by name."""
    folder, threads = str(flags.model), str(flags.threads)
    longest = max([PROMPT_TOKENS + WARM_STEPS + flags.steps + 1, *(p.size + 1 for p in points if p.kind == "prefill")])
    room = -(-longest // ROOM_TOKENS) * ROOM_TOKENS
    each = -(-(PROMPT_TOKENS + WARM_STEPS + flags.steps + 1) // ROOM_TOKENS) * ROOM_TOKENS
    batch = max([1, *flags.batches])
    kv_tokens = max(room, batch * each)
    prompts_tokens = max(room, batch * PROMPT_TOKENS)
    env = vllm_env(flags.peer_python, flags.threads) if flags.peer_python else {}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {}
    for kind in flags.dtypes.split(","):
        weights, _, kv = kind.partition("/")
        ours = ["ours", flags.engine, folder, weights, kv or "auto", threads, str(kv_tokens), str(prompts_tokens)]
        if flags.engine == "vllm":
            # As `up` starts a worker: without the OpenMP runtime that vLLM's documentation asks for.
            started = {"OMP_NUM_THREADS": threads, "PYTHONPATH": env["PYTHONPATH"], **waiting_env({})}
            commands[f"pdserve-vllm {kind}"] = [str(flags.peer_python), "-m", PEERS, *ours], started
        else:
            commands[f"pdserve {kind}"] = [sys.executable, "-m", PEERS, *ours], {}
    if flags.engine == "own":
        commands[TRANSFORMERS] = [sys.executable, "-m", PEERS, "transformers", folder, threads], {}
    for dtype in flags.peer_dtypes.split(",") if flags.peer_python else ():
        values = (kv_tokens + ROOM_TOKENS) * model.num_layers * 2 * model.num_kv_heads * model.head_dim
        sizes = (values * WEIGHT_BYTES[dtype], batch, min(room, model.max_context_tokens), prompts_tokens)
        command = [str(flags.peer_python), "-m", "benchmarks.engine.vllm_peer", folder, dtype, *map(str, sizes)]
        commands[f"vllm {dtype}"] = command, env
    return commands


@contextmanager
def _running(name: str, command: Sequence[str], env: dict[str, str], out: Path) -> Iterator[PeerEngine]:
    _say(f"starting {name}")
    peer = PeerEngine(name, command, env, out / f"{name.replace(' ', '-').replace('/', '-')}.log")
    try:
        yield peer
    finally:
        peer.close()


def _memory(peer: PeerEngine) -> Memory:
    used = peer.ask("memory")
    return Memory(
        load_s=peer.loaded["load_s"],
        load_peak_bytes=peer.loaded["peak_bytes"],
        run_peak_bytes=used["peak_bytes"],
        own_bytes=used["own_bytes"],
    )


def _check_generate(peers: Sequence[PeerEngine], turns: Sequence[Turn], steps: int) -> list[str]:
    """One line on transformers' own `generate` beside the loop that stands for it."""
    oracle = next((peer for peer in peers if peer.name == TRANSFORMERS), None)
    decoded = points_of(turns, "decode")
    if oracle is None or not decoded:
        return []
    point = decoded[len(decoded) // 2]
    loop, whole = [], []
    for number in range(3):
        answer = oracle.ask(**point.order(steps, salt=number))
        loop.append(sorted(answer["step_s"])[steps // 2])
        whole += oracle.ask("generate", batch=point.size, prompt_tokens=PROMPT_TOKENS, steps=steps, salt=number)[
            "step_s"
        ]
    loop_ms, whole_ms = (1e3 * sorted(values)[1] for values in (loop, whole))
    return [f"transformers, {point.label}: `generate` {whole_ms:.1f} ms a step, the measured loop {loop_ms:.1f} ms"]


def _work(model: ModelConfig, steps: int, turn: Turn) -> EngineWork:
    weights, _, kv = turn.peer.split()[1].partition("/")
    if turn.point.kind == "prefill":
        return prefill_work(model, weights, turn.point.size)
    kv_bytes = 1 if kv == "int8" else 2 if weights == "bfloat16" else 4
    return decode_work(model, weights, kv_bytes, turn.point.size, PROMPT_TOKENS + WARM_STEPS + steps // 2)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PeerFailed, PdserveError) as error:
        sys.exit(str(error))
