"""Measures what sending KV during prefill saves: `python -m benchmarks.overlap [--quick]`.

Real prefill and decode worker processes with one thread each are connected over tcp limited to a slow link's rate, over
unlimited tcp, and over shm. For each prompt length, a worker that sends everything at the end and a worker that decides
itself (`--push auto`) prefill the same prompt in turns. The times of sending at the end are given to a copy of the
worker's cost model, which predicts the saving of the other.

    gap     first token to second, on the driver's clock: a step, and the part of the transfer that is not hidden
    second  time to the second token: also shows how much the transfer slows prefill
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overlap.message import message_s
from benchmarks.overlap.work import Pairs, Seen, write_shape
from pdserve.core.cost.latency import CostPrior
from pdserve.core.effects import StepAccount
from prefill_worker.pushing import AT_END, PushRule

CHUNK, BLOCK = 512, 16
SLOW_BYTES_S = 50e6
SHORT = (16, 128, 512)
LONG = (2048, 4096, 8000)
NUM_LAYERS = 8
WITHIN = 0.2  # of the predicted gain
WORSE = 0.05  # a delay of a short prompt's second token below this counts as noise of the machine
HEAD = (
    f"{'link':<12}{'tokens':>7}{'MB':>7}  {'plan':<9}{'gap: end':>9}{'auto':>8}{'gained':>8}{'model':>8}"
    f"{'hidden':>8}  {'second: end':>11}{'auto':>8}{'ratio':>7}  bar"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """Medians over the rounds, seconds."""

    link: str
    num_tokens: int
    end: Seen
    auto: Seen
    predicted_s: float

    @property
    def gained_s(self) -> float:
        return self.end.gap_s - self.auto.gap_s

    @property
    def verdict(self) -> str:
        if self.auto.plan == "end":
            return "met: sent at the end too"  # what differs is the machine's noise
        if self.num_tokens <= CHUNK:
            return "met" if self.auto.second_s <= (1 + WORSE) * self.end.second_s else "missed: later"
        off = abs(self.gained_s - self.predicted_s)
        return "met" if off <= WITHIN * self.predicted_s else f"missed: off by {off / self.predicted_s:.0%}"


def median(seen: Sequence[Seen]) -> Seen:
    """The median of each figure."""
    first_s = statistics.median(one.first_s for one in seen)
    return Seen(
        first_s=first_s,
        second_s=statistics.median(one.second_s for one in seen),
        gap_s=statistics.median(one.gap_s for one in seen),
        exposed_s=statistics.median(one.exposed_s for one in seen),
        busy_s=statistics.median(one.busy_s for one in seen),
        num_tokens=seen[0].num_tokens,
        num_bytes=seen[0].num_bytes,
        saved_bytes=seen[0].saved_bytes,
        plan=Counter(one.plan for one in seen).most_common(1)[0][0],
        tokens=seen[0].tokens,
    )


def learn(pairs: Pairs, seen: Sequence[Seen], num_layers: int) -> PushRule:
    """The worker's cost model, trained with the times of sending at the end."""
    hello = pairs.prefill["end"].hello
    cost = CostPrior(
        prefill_base_s=hello.cost.prefill_base_s,
        prefill_per_token_s=hello.cost.prefill_per_token_s,
        prefill_per_token_context_s=hello.cost.prefill_per_token_context_s,
    )
    block_bytes = seen[0].num_bytes // -(-seen[0].num_tokens // BLOCK)
    rule = PushRule(
        cost, block_size=BLOCK, block_bytes=block_bytes, num_layers=num_layers, max_batch_tokens=CHUNK, choice="auto"
    )
    for batch in pairs.batches["end"]:
        account = StepAccount(prefill_tokens=batch.prefill_tokens, prefill_token_context=batch.prefill_token_context)
        rule.stepped(account, batch.step_s, 0)
    for one in seen:
        rule.sent("d0", one.num_bytes, one.exposed_s)
    return rule


def measure(link: str, pairs: Pairs, lengths: Sequence[int], rounds: int, num_layers: int) -> list[OverlapRow]:
    draw = random.Random(7)
    seen: dict[tuple[str, int], list[Seen]] = {(push, length): [] for push in pairs.prefill for length in lengths}
    for number in range(-1, rounds):  # from the first one the workers learn the link's rate
        for length in lengths:
            prompt = [draw.randrange(3, 4096) for _ in range(length)]
            order = list(pairs.prefill)[:: 1 if number % 2 else -1]
            answers = {push: pairs.ask(push, prompt) for push in order}
            if len({one.tokens for one in answers.values()}) > 1:
                raise AssertionError(f"{link}, {length} tokens: the answers differ: {answers}")
            for push, answer in answers.items():
                if number >= 0:
                    seen[push, length].append(answer)
            print(f"  {link}: round {number + 1} of {rounds}, {length} tokens", file=sys.stderr, flush=True)
    rule = learn(pairs, [one for length in lengths for one in seen["end", length]], num_layers)
    rows = []
    for length in lengths:
        exposed = rule.exposed("d0", cached=0, num_tokens=length, receiver_cached_blocks=0)
        auto = median(seen["auto", length])
        rows.append(
            OverlapRow(
                link=link,
                num_tokens=length,
                end=median(seen["end", length]),
                auto=auto,
                predicted_s=exposed[AT_END] - min(exposed[push] for push in exposed if push.name == auto.plan),
            )
        )
    return rows


def show(rows: Sequence[OverlapRow]) -> None:
    for row in rows:
        hidden = max(0.0, 1.0 - row.auto.exposed_s / row.auto.busy_s) if row.auto.busy_s else 0.0
        print(
            f"{row.link:<12}{row.num_tokens:>7}{row.end.num_bytes / 1e6:>7.1f}  {row.auto.plan:<9}{row.end.gap_s:>9.3f}"
            f"{row.auto.gap_s:>8.3f}{row.gained_s:>8.3f}{row.predicted_s:>8.3f}{hidden:>8.0%}  "
            f"{row.end.second_s:>11.3f}{row.auto.second_s:>8.3f}{row.auto.second_s / row.end.second_s:>7.2f}  "
            f"{row.verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a folder with config.json; weights are made up")
    parser.add_argument("--slow-mb-s", type=float, default=SLOW_BYTES_S / 1e6, help="of the paced link")
    parser.add_argument("--links", nargs="+", default=["tcp, slow", "tcp", "shm"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[*SHORT, *LONG])
    parser.add_argument("--quick", action="store_true", help="the slow link and two lengths, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.links, options.tokens = 2, ["tcp, slow"], [128, 2048]
    print(f"{platform.machine()}, Python {platform.python_version()}; seconds, medians of {options.rounds} rounds")
    for transport in dict.fromkeys(link.split(",")[0] for link in options.links):
        print(f"one more part over {transport}: {message_s(transport) * 1e6:.0f} us of CPU on both ends together")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_shape(Path(folder))
        blocks = max(options.tokens) // BLOCK + 8
        flags = ["--kv-blocks", str(blocks), "--max-batch-tokens", str(CHUNK), "--no-is-prefix-cache-on"]
        for link in options.links:
            rate = options.slow_mb_s * 1e6 if "slow" in link else 0.0
            pairs = Pairs(model, link.split(",")[0], rate, ["end", "auto"], flags)
            try:
                rows = measure(link, pairs, options.tokens, options.rounds, NUM_LAYERS)
            finally:
                pairs.close()
            show(rows)


if __name__ == "__main__":
    main()
