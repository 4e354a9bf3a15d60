"""The whole product on a CUDA device: `pdserve up` as a user starts it, called over gRPC and HTTP. Prints a table.

    python -m tests.gpu.check_cluster [--only bundled,serve] [--rehearse]

  bundled     1 prefill and 2 decode workers, the bundled model: every token is that of float64 (tests/oracle.py), for
              greedy, seeded and penalised answers, JSON schemas, and while a decode worker is killed
  tiers       one decode worker whose pool holds a third of the texts: what left it comes back from the host's memory,
              from a disk, and from a shared store
  FAMILY      the same for greedy answers of a tiny model of each other family
  serve       Llama-3.1-8B's shape with made-up weights: `pdserve bench` at several loads; a prefill and a decode
              worker share the device, and one worker alone has it

All in one device, whose memory the workers divide. --rehearse: on the CPU, a small shape. Exit code 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.failures import add_flags, cases_of, out_folder, told
from benchmarks.gpu.parts import LLAMA
from benchmarks.gpu.setting import SHAPES, SMALL
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED, VOCAB, build, prompts
from tests.cluster.suite import LENGTHS, generate_all, sampling_of, tokens_of
from tests.oracle import Oracle

TOKENS: Final = 64
OTHERS: Final = ("gemma-3", "qwen3-moe")
TEXTS: Final = tuple(
    "import os\n" * (1 + 4 * number) + f"\n\ndef work_{number}(self, value):\n" for number in range(16)
)
BENCH_S: Final = 120.0
CASE_S: Final = 150.0
#: One caller at a time gets through few requests, hence the duration.
LOAD: Final = "--concurrency 1,32,128 --requests 256 --duration 6 --input-tokens 512:1536 --output-tokens 64:192"
LOAD_REHEARSED: Final = "--concurrency 1,2 --requests 4 --input-tokens 16:32 --output-tokens 4:8"
NO_TIER: Final = ("--set", "worker.kv_host_bytes=0")  # to pin its memory takes seconds
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, "bundled, tiers, a family, or serve")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    device = ("--device", "cpu" if args.rehearse else "cuda", "--log-level", "warning")
    print("| case | result | s |\n|---|---|---|")
    cases = cases_of(args, ["bundled", "serve", *OTHERS, "tiers"], None, CASE_S)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        bodies: dict[str, Callable[[], str]] = {"bundled": lambda: bundled(device)}
        bodies["tiers"] = lambda: tiers(device, folder)
        bodies["serve"] = lambda: serve(folder / "serve", device, is_rehearsal=args.rehearse)
        bodies |= {name: lambda name=name: family(name, folder / name, device) for name in OTHERS}  # type: ignore[misc]
        for name, body in bodies.items():
            began_s = time.monotonic()

            def say(result: str, name: str = name, began_s: float = began_s) -> None:
                print(f"| {name} | {result} | {time.monotonic() - began_s:.1f} |", flush=True)

            cases.run(
                name,
                lambda body=body, say=say: say(body()),  # type: ignore[misc]
                lambda error, name=name, say=say: say(f"**failed: {told(name, error)}**"),  # type: ignore[misc]
            )
    return int(cases.num_failed > 0)


def bundled(device: Sequence[str]) -> str:
    oracle = Oracle(BUNDLED)
    greedy = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    seeded = {"max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1234, "ignore_eos": True}
    penalised = {**seeded, "bad_words": ["return"], "logit_bias": {10: -1.5}, "repetition_penalty": 1.1}
    with Cluster(*device, *NO_TIER, "--decode", "2", "--dtype", "float32", "--set", "worker.kv_blocks=512") as cluster:
        ids = [cluster.client.tokenize(text) for text in TEXTS]
        done = generate_all(cluster, TEXTS, **greedy)
        oracle.assert_exact(ids, tokens_of(done, TOKENS))
        paths = sorted({str(one.timings.path) for one in done})
        for options in (seeded, penalised):
            answers = generate_all(cluster, TEXTS[:8], **options)
            oracle.assert_exact(ids[:8], tokens_of(answers, 48), sampling=sampling_of(BUNDLED, **options))
        document = cluster.client.generate("A file: ", max_tokens=200, temperature=0.5, seed=3, json_schema=SCHEMA)
        if sorted(json.loads(document.text)) != ["name", "size"]:
            raise AssertionError(f"the document does not match its schema: {document.text!r}")
        most_attempts = 1
        for _ in range(5):
            done = generate_all(
                cluster,
                TEXTS,
                **{**greedy, "max_tokens": 256},
                meanwhile=lambda one: cluster.kill(cluster.decode_worker_of(one)),
            )
            oracle.assert_exact(ids, tokens_of(done, 256))
            most_attempts = max(one.timings.attempts for one in done)
            cluster.wait_until_idle(within_s=60)
            if most_attempts > 1:
                break
        if most_attempts == 1:
            raise AssertionError("no answer was on the killed worker")
        links = [link for worker in cluster.client.topology().workers for link in worker.kv_links]
    transports = sorted({link.transport for link in links})
    if "remote" not in paths:
        raise AssertionError(f"no answer took the remote path, but {paths}")
    return f"exact, {' and '.join(paths)}, over {', '.join(transports)}; a killed worker's answers too"


def tiers(device: Sequence[str], folder: Path) -> str:
    """Each text comes three times, after all others. By the profile, computing takes as long as for a large model."""
    oracle = Oracle(BUNDLED)
    shares = []
    (folder / "store").mkdir()
    for name, settings in {
        "memory": {"kv_host_bytes": 2**28},
        "disk": {"kv_host_bytes": 0, "kv_disk_path": str(folder / "disk")},
        "store": {"kv_host_bytes": 0, "kv_store": f"file://{folder / 'store'}"},
    }.items():
        try:
            shares.append(f"{name} {cached_share(device, oracle, settings):.0%}")
        except Exception as error:
            error.add_note(f"tier: {name}")
            raise
    return f"exact, cached blocks: {', '.join(shares)}, with a pool of a third"


def cached_share(device: Sequence[str], oracle: Oracle, settings: Mapping[str, object]) -> float:
    """Of the blocks of the texts, in the second and the third round."""
    num_blocks = 128
    shape = {"kv_blocks": num_blocks, "block_size": 16, "profile": "h100-sxm.llama-3.1-8b.bf16"}
    flags = [part for name, value in {**shape, **settings}.items() for part in ("--set", f"worker.{name}={value}")]
    with Cluster(*device, "--prefill", "0", "--dtype", "float32", *flags) as cluster:
        texts = [f"# file {number}\n" + TEXTS[-1] * 4 for number in range(8)]
        ids = [cluster.client.tokenize(text) for text in texts]
        working = sum(len(each) // 16 for each in ids)
        cached = 0
        for turn in range(3):
            for text, tokens in zip(texts, ids, strict=True):
                done = generate_all(cluster, [text], max_tokens=16, temperature=0, ignore_eos=True)
                oracle.assert_exact([tokens], tokens_of(done, 16))
                cached += done[0].usage.cached_prompt_tokens if turn else 0
    if cached // 16 <= 2 * num_blocks:
        raise AssertionError(f"only {cached} tokens were cached, which the pool alone may have had")
    return cached / 2 / 16 / working


def family(name: str, folder: Path, device: Sequence[str]) -> str:
    build(name, folder)
    texts = prompts(LENGTHS)
    flags = ("--model", str(folder), "--dtype", "float32", "--set", "worker.kv_blocks=1024")
    with Cluster(*device, *NO_TIER, *flags) as cluster:
        done = generate_all(cluster, texts, max_tokens=TOKENS, temperature=0, ignore_eos=True)
        Oracle(folder).assert_exact(texts, tokens_of(done, TOKENS))
    return f"exact, {sum(one.timings.path == 'remote' for one in done)} of {len(done)} remote"


def serve(folder: Path, device: Sequence[str], *, is_rehearsal: bool) -> str:
    folder.mkdir()
    small = SMALL | {"vocab_size": VOCAB} if is_rehearsal else {}
    (folder / "config.json").write_text(json.dumps(SHAPES[LLAMA] | small))
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    model = [
        "--model",
        str(folder),
        "--load",
        "dummy",
        "--dtype",
        "float32" if is_rehearsal else "bfloat16",
        "--http",
        "0",
    ]
    model += ["--set", "worker.kv_blocks=256" if is_rehearsal else "worker.max_context_tokens=4096"]
    load = LOAD_REHEARSED if is_rehearsal else LOAD
    print(
        "\n| workers on the device | callers | requests/s | tokens/s | TTFT p50, p95 ms | TPOT p50, p95 ms | failed |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    num_loads = 0
    for label, prefill in (("1 prefill, 1 decode", "1"), ("1 decode", "0")):
        with Cluster(*device, *model, "--prefill", prefill) as cluster:
            for one in bench(cluster.running.http_url, load):
                num_loads += 1
                latencies = (f"{one[f'p50_{name}_ms']:.4g}, {one[f'p95_{name}_ms']:.4g}" for name in ("ttft", "tpot"))
                rates = f"{one['request_throughput']:.4g} | {one['output_throughput']:,.0f}"
                bad = one["failed"] + one["rejected"]
                print(f"| {label} | {one['max_concurrency']} | {rates} | {' | '.join(latencies)} | {bad} |", flush=True)
                if bad:
                    raise AssertionError(f"{bad} requests failed: {one['error_examples']}")
    return f"{num_loads} loads"


def bench(url: str, load: str) -> list[dict[str, Any]]:
    """The report of each load; all are kept in $OUT."""
    command = [sys.executable, "-m", "pdserve", "bench", "--url", url, "--json", *load.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S, check=False)
    if done.returncode:
        raise RuntimeError(f"pdserve bench ended with {done.returncode}: {done.stderr[-600:]}")
    with (out_folder() / "bench.jsonl").open("a") as file:
        file.write(done.stdout)
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


if __name__ == "__main__":
    sys.exit(main())
