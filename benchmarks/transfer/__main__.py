"""Times KV transfers between two processes beside one memcpy, a raw socket and NIXL of the same bytes, in one run.

    python -m benchmarks.transfer [--sizes 1,16,128,1024] [--block-bytes 393216] [--repeat 9] [--at-once 1,4,16]
                                  [--nixl-python PYTHON] [--quick] [--tls] [--json]

A transfer is timed on the sender, from the push of finished blocks until the receiver reports that every checksum
matched; the grant and the connection already exist. The floors and the peers:
  memcpy    one call in the receiving process that copies the bytes out of the sender's memory into its own
  socket    sendall in one process, recv_into in the other, one byte back: tcp without frames or checks
  nixl      a WRITE of the same blocks by prepared lists, UCX free to choose (pip install nixl in an environment of its
            own; --nixl-python names its python); nixl-tcp: the same held to sockets by UCX_TLS=tcp
A block holds 16 tokens; its default size is that of a model with 125M parameters in float32 (12 layers, 4 kv heads of
64), and sizes are rounded up to whole blocks. Blocks lie in order on both sides, or at random (fragmented: nothing in
a row). Each round runs every method once, in random order. NIXL's processes are
stopped except for their turn, which counts from the second try on the same bytes. Ratios are computed per round, and
their medians shown. A bar is judged for each size. Our transfers need both cores, and NIXL polls on both: do not use
figures from a machine that does other work.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.harness import table_head, table_row
from benchmarks.transfer.ways import TLS, TRANSPORTS, Ways, serve
from pdserve.core.json_text import to_json
from tests.support.tls_files import TestAuthority

MIB: Final = 2**20
WARM_ROUNDS: Final = 2  # pages, caches, socket buffers

PlacementOption = tuple[str, bool, int]  # name, whether fragmented, how many at once


@dataclass(frozen=True)
class TransferBar:
    """`way` moves bytes at least `least` times as fast as `against`."""

    name: str
    way: PlacementOption
    against: PlacementOption
    least: float


def plain(name: str) -> PlacementOption:
    return (name, False, 1)


BARS: Final = (
    TransferBar("shm, of one memcpy", plain("shm"), plain("memcpy"), 0.8),
    TransferBar("tcp, of a raw socket", plain("tcp"), plain("socket"), 0.8),
    TransferBar("shm, of NIXL over UCX", plain("shm"), plain("nixl"), 1.5),
    TransferBar("tcp, of NIXL over UCX held to sockets", plain("tcp"), plain("nixl-tcp"), 1.5),
    TransferBar("shm fragmented, of contiguous", ("shm", True, 1), plain("shm"), 0.7),
    TransferBar("tcp fragmented, of contiguous", ("tcp", True, 1), plain("tcp"), 0.7),
)


@dataclass
class Rounds:
    num_bytes: int
    seconds: dict[PlacementOption, list[float]]

    def rate(self, way: PlacementOption) -> float:
        """GB/s."""
        return self.num_bytes / statistics.median(self.seconds[way]) / 1e9

    def ratio(self, way: PlacementOption, against: PlacementOption) -> tuple[float, float, float]:
        """Ratio of the rates: the median of the rounds, and the quartiles."""
        pairs = zip(self.seconds[way], self.seconds[against], strict=True)
        low, middle, high = statistics.quantiles([floor / own for own, floor in pairs], n=4)
        return middle, low, high


def measure(ways: Ways, num_bytes: int, at_once: list[int], repeat: int, say: Callable[[str], None]) -> Rounds:
    turns: dict[PlacementOption, Callable[[], float]] = {
        plain("memcpy"): lambda: ways.memcpy(num_bytes),
        plain("socket"): lambda: ways.raw_socket(num_bytes),
    }
    ours = [(name, fragmented, count) for name in TRANSPORTS for fragmented in (False, True) for count in at_once]
    if ways.has_tls:
        ours += [plain(TLS)]
    for way in ours:
        turns[way] = lambda way=way: ways.transfer(way[0], num_bytes, *way[1:])  # type: ignore[misc]
    for name in ways.nixl:
        for fragmented in (False, True):
            turns[name, fragmented, 1] = lambda n=name, f=fragmented: ways.peer(n, num_bytes, f, 1)  # type: ignore[misc]
    rounds = Rounds(num_bytes, {way: [] for way in turns})
    order, rng = list(turns), random.Random(num_bytes)
    for number in range(WARM_ROUNDS + repeat):
        rng.shuffle(order)
        say(f"{num_bytes / MIB:.4g} MiB: round {number + 1} of {WARM_ROUNDS + repeat}")
        for way in order:
            took_s = turns[way]()
            if number >= WARM_ROUNDS:
                rounds.seconds[way].append(took_s)
    assert ways.is_equal(num_bytes), "the bytes that arrived are not those that were sent"
    return rounds


def title(way: PlacementOption) -> str:
    name, is_fragmented, at_once = way
    return name + (", fragmented" if is_fragmented else "") + (f", {at_once} at once" if at_once > 1 else "")


def table(sizes: list[Rounds], missing: dict[str, str]) -> str:
    heads = [f"{one.num_bytes / MIB:.4g} MiB" for one in sizes]
    lines = [table_head(["GB/s", *heads])]
    for way in sizes[-1].seconds:  # the largest size is divided among the most transfers
        cells = [f"{one.rate(way):.2f}" if way in one.seconds else "" for one in sizes]
        lines.append(table_row([title(way), *cells]))
    lines += [f"| {name} | missing: {why} |" for name, why in missing.items()]
    if plain(TLS) in sizes[0].seconds:
        cells = ["{:.2f} ({:.2f}..{:.2f})".format(*one.ratio(plain(TLS), plain("tcp"))) for one in sizes]
        lines.append(table_row(["tcp with TLS, of tcp", *cells]))
    lines += ["", table_head(["bar", *heads])]
    for bar in BARS:
        if bar.against not in sizes[0].seconds:
            lines.append(f"| {bar.name} >= {bar.least:g} | not judged: {bar.against[0]} is missing |")
            continue
        cells = []
        for one in sizes:
            middle, low, high = one.ratio(bar.way, bar.against)
            cells.append(f"{middle:.2f} ({low:.2f}..{high:.2f}) {'met' if middle >= bar.least else 'missed'}")
        lines.append(table_row([f"{bar.name} >= {bar.least:g}", *cells]))
    return "\n".join(lines)


def as_json(sizes: list[Rounds], missing: dict[str, str]) -> str:
    bars = [
        {**asdict(bar), "bytes": one.num_bytes, "ratio": one.ratio(bar.way, bar.against)[0]}
        for bar in BARS
        if bar.against in sizes[0].seconds
        for one in sizes
    ]
    seconds = [{"bytes": one.num_bytes, **{title(way): took for way, took in one.seconds.items()}} for one in sizes]
    return to_json({"bars": bars, "seconds": seconds, "missing": missing})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help="MiB per transfer, comma-separated (default 1,16,128,1024)")
    parser.add_argument("--at-once", help="transfers that share the bytes (default 1,4,16)")
    parser.add_argument("--block-bytes", type=int, default=393_216, help="of 16 tokens, with all layers")
    parser.add_argument("--repeat", type=int, help="rounds that count (default 9)")
    parser.add_argument("--nixl-python", default="", metavar="PYTHON", help="of an environment that has nixl")
    parser.add_argument("--quick", action="store_true", help="1, 16 and 64 MiB, 1 and 4 at once, 5 rounds")
    parser.add_argument("--tls", action="store_true", help="also time tcp over TLS")
    parser.add_argument("--json", action="store_true", help="every figure, for programs")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tls-folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--source-fd", type=int, default=-1, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags.serve, flags.block_bytes, flags.source_fd, flags.tls_folder)
        return
    usual = ("1,16,64", "1,4", 5) if flags.quick else ("1,16,128,1024", "1,4,16", 9)
    block_bytes: int = flags.block_bytes
    blocks = [math.ceil(float(size) * MIB / block_bytes) for size in (flags.sizes or usual[0]).split(",")]
    at_once = [int(count) for count in (flags.at_once or usual[1]).split(",")]
    repeat = flags.repeat or usual[2]
    if min(blocks) < 1 or min(at_once) < 1 or repeat < 2:
        parser.error("sizes and numbers at once are positive, and there are at least 2 rounds")
    num_bytes = [count * block_bytes for count in blocks]
    with TemporaryDirectory() as folder:
        tls = str(Path(TestAuthority(Path(folder)).files("worker").cert).parent) if flags.tls else ""
        sizes, missing = run(Ways(max(num_bytes), block_bytes, flags.nixl_python, tls), num_bytes, at_once, repeat)
    print(as_json(sizes, missing) if flags.json else table(sizes, missing))


def run(ways: Ways, num_bytes: list[int], at_once: list[int], repeat: int) -> tuple[list[Rounds], dict[str, str]]:
    try:
        return [
            measure(ways, size, [c for c in sorted({1, *at_once}) if c <= size // ways.block_bytes], repeat, say)
            for size in num_bytes
        ], ways.missing
    finally:
        ways.close()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
