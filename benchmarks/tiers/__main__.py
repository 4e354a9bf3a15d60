"""What the host tier of the KV cache costs and saves: `python -m benchmarks.tiers [--shape 125m]`. With `--pull`: what
pulls between workers do (pulls.py).

- Copies of blocks out of the pool and back, beside one memcpy of as many bytes; rounds alternate.
- A decode step of the engine with one block saved and one loaded before it, beside a step alone; steps alternate.
- Sessions that grow, as those of agents do: each turn sends the conversation so far. Their KV needs `--times` as much
  memory as the pool has, and the turns of all sessions alternate, so without a tier a pool that evicts the least
  recently used block first has none of them when they come back. Rounds with and without a tier alternate, with a new
  cluster of one decode worker each, which also computes the prompts. With `--agents SCALE`, only these, and the
  sessions are the published ones of the simulator (`coding_agents`), with `SCALE` times their numbers of tokens, in the
  order of their arrivals, without the pauses.

With `--disk FOLDER` only the disk tier, in that folder: fetches of blocks that are not in memory, beside
sequential reads of a file of as many bytes, buffered and direct; and a decode step of the engine while blocks are
fetched, beside a step alone. Rounds alternate. Bars: 0.8 of the sequential read, and 1.05 of a step.

With `--store URL` only a shared store: fetches, which verify what they read, beside a loop of the same client.

Of a turn, the blocks of its session's earlier turns are *reusable*; `cached_prompt_tokens` of the answer says how many
were served from the cache. Bars: copies at least 0.8 of a memcpy, a step at most 1.05 of one alone, at least 97 % of
the reusable tokens served, and the 90th percentile of the time of a request per output token 2.5 times better.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import table
from benchmarks.tiers.fetches import disk_reads, steps_beside_reads, store_reads
from benchmarks.tiers.host import CONTEXT, ROWS, copies, steps
from benchmarks.tiers.pulls import pulls
from benchmarks.tiers.sessions import BLOCK_SIZE, sessions
from examples.make_random_model import SHAPES, write_model
from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.load_engine import load_engine
from pdserve.prefix.embedded import EmbeddedRedis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--growth", type=int, default=128, help="tokens of each turn beside the conversation so far")
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--agents", type=float, metavar="SCALE", help="published sessions, such as 0.01")
    parser.add_argument("--requests", type=int, default=150, help="of published sessions, at most")
    parser.add_argument("--times", type=int, default=4, help="working set, in pools")
    parser.add_argument("--at-once", type=int, default=1, help="requests that run together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="only the disk tier, in a new folder of this one")
    parser.add_argument("--store", metavar="URL", help="only a shared store; redis: a real one, started for this")
    parser.add_argument("--blocks", type=int, default=768, help="of a fetch from disk or store")
    parser.add_argument("--pull", action="store_true", help="measure pulls between workers instead (pulls.py)")
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of a prompt that is pulled")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.shape
        write_model(model, arguments.shape, torch.float32, 0)
        is_slow = arguments.disk is not None or arguments.store
        blocks = ROWS * (CONTEXT // BLOCK_SIZE + 1) + (arguments.blocks if is_slow else 1)
        engine = load_engine(
            WorkerConfig(model=str(model), worker_id="d0", block_size=BLOCK_SIZE, kv_blocks=blocks), Role.DECODE
        )
        block_bytes = engine.spec.block_bytes
        print(f"{arguments.shape}: blocks of {block_bytes / 2**20:.2f} MiB\n", flush=True)
        if arguments.pull:
            engine.close()
            del engine
            print(table(pulls(model, arguments.prompt, arguments.rounds, Path(folder), block_bytes)))
            return
        if arguments.store:
            with contextlib.ExitStack() as stack:
                url = stack.enter_context(EmbeddedRedis.start()).url if arguments.store == "redis" else arguments.store
                print(table(store_reads(engine, url, arguments.rounds)), flush=True)
            engine.close()
            return
        if arguments.disk is not None:
            with tempfile.TemporaryDirectory(dir=arguments.disk) as where:
                print(table(disk_reads(engine, Path(where), arguments.rounds)), "\n", flush=True)
            with tempfile.TemporaryDirectory(dir=arguments.disk) as where:
                print(table(steps_beside_reads(engine, Path(where), arguments.rounds)), flush=True)
            engine.close()
            return
        if arguments.agents is None:
            print(table(copies(engine, arguments.rounds)), "\n", flush=True)
            print(table(steps(engine, arguments.rounds)), "\n", flush=True)
        engine.close()
        print(table(sessions(model, block_bytes, arguments)))


if __name__ == "__main__":
    main()
