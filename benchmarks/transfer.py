"""Times KV transfers between two processes beside a plain copy and a raw socket of the same bytes, in the same run.

    python -m benchmarks.transfer [--sizes 65536,...] [--block-bytes 65536] [--repeat 15] [--json]

A transfer is timed on the sender, from the push of finished blocks to the receiver's word that every checksum
matched; grant and connection exist already. Blocks are scattered in runs of --run-blocks on both sides. The floors,
with the same bytes between the same two processes' kind of memory:
  copy    one thread copies the bytes once in large pieces (what shm would cost if sharing were free)
  socket  sendall in one process, recv_into in the other, one byte back (what tcp would cost without frames or checks)
Rounds of all ways alternate, so that a noisy neighbour hits each alike. Medians are shown, with the quartiles of each
round's ratio. `best` compares the fastest round of each way, which a crowded machine disturbs least. `checksum` is
the time to hash the bytes once, chunk by chunk as the sender does, over the transfer's time; sender and receiver
each do it, at the same time.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.transfer_ends import WAIT_S, GrpcHost, HostPool, fingerprint
from kvtransfer import checksum
from kvtransfer.endpoint import make_receiver, make_sender
from kvtransfer.plan import DEFAULT_CHUNK_BYTES
from kvtransfer.transport import Grant, SendOutcome, Sent, TransferKey

SIZES: Final = "65536,1048576,16777216,134217728"
TRANSPORTS: Final = ("tcp", "shm")


def scattered(num_blocks: int, run_blocks: int) -> list[int]:
    """Every block of the pool once: runs of consecutive blocks, the runs in reverse order."""
    runs = [range(at, min(at + run_blocks, num_blocks)) for at in range(0, num_blocks, run_blocks)]
    return [block for run in reversed(runs) for block in run]


def grant_of(transport: str, endpoint: str, number: int, blocks: list[int], block_bytes: int) -> Grant:
    return Grant(
        key=TransferKey(transfer_id="bench", attempt=1, generation=number),
        endpoint=endpoint,
        worker_id=f"d-{transport}",
        incarnation="1",
        fingerprint=fingerprint(block_bytes),
        blocks=tuple(blocks),
        held_blocks=0,
    )


def serve(max_bytes: int, block_bytes: int, run_blocks: int) -> None:
    """The receiving process: obeys one JSON line at a time on stdin, answers on stdout."""
    pool = HostPool(max_bytes // block_bytes, block_bytes)
    receivers = {
        name: make_receiver(
            pool, fingerprint(block_bytes), worker_id=f"d-{name}", incarnation="1", host="127.0.0.1", transport=name
        )
        for name in TRANSPORTS
    }
    hosts = {name: GrpcHost(receiver.servicer) for name, receiver in receivers.items()}
    door = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_drain_socket, args=(door, pool.buffer), daemon=True).start()
    answer: dict[str, Any] = {name: host.endpoint for name, host in hosts.items()}
    print(json.dumps({**answer, "socket": door.getsockname()[1]}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        blocks = scattered(order["bytes"] // block_bytes, run_blocks)
        grant = grant_of(order["transport"], "", order["number"], blocks, block_bytes)
        receivers[order["transport"]].expect(grant, lambda received: None)
        print("{}", flush=True)


def _drain_socket(door: socket.socket, memory: memoryview) -> None:
    sock, _ = door.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(8)
    while sock.recv_into(head) == 8:
        view = memory[: int.from_bytes(head, "little")]
        while view:
            view = view[sock.recv_into(view) :]
        sock.sendall(b"k")


class Bench:
    def __init__(self, max_bytes: int, block_bytes: int, run_blocks: int) -> None:
        self._block_bytes, self._run_blocks = block_bytes, run_blocks
        command = [sys.executable, "-m", "benchmarks.transfer", "--serve", str(max_bytes)]
        command += ["--block-bytes", str(block_bytes), "--run-blocks", str(run_blocks)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pool = HostPool(max_bytes // block_bytes, block_bytes, seed=1)
        self._copy = bytearray(max_bytes)
        self._ends: dict[str, Any] = self._hear()
        self._socket = socket.create_connection(("127.0.0.1", self._ends["socket"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._senders = {
            name: make_sender(
                self._pool, fingerprint(block_bytes), worker_id=f"p-{name}", incarnation="1", transport=name
            )
            for name in TRANSPORTS
        }
        self._hash = checksum.hasher(checksum.available()[0])
        self._number = 0

    def _hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        said: dict[str, Any] = json.loads(self._child.stdout.readline())
        return said

    def transfer(self, transport: str, num_bytes: int) -> float:
        assert self._child.stdin is not None
        self._number += 1
        blocks = scattered(num_bytes // self._block_bytes, self._run_blocks)
        order = {"transport": transport, "number": self._number, "bytes": num_bytes}
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        self._hear()
        grant = grant_of(transport, self._ends[transport], self._number, blocks, self._block_bytes)
        ended, ends = threading.Event(), list[Sent]()

        def on_end(sent: Sent) -> None:
            ends.append(sent)
            ended.set()

        sender = self._senders[transport]
        sender.start(grant, on_end)
        pushes = list(enumerate(blocks))
        began_s = time.perf_counter()
        sender.push(grant.key, pushes, True)
        assert ended.wait(WAIT_S), "the transfer hangs"
        took_s = time.perf_counter() - began_s
        assert ends[0].outcome is SendOutcome.SENT, ends[0].error
        return took_s

    def copy(self, num_bytes: int) -> float:
        source, target = self._pool.buffer, memoryview(self._copy)
        began_s = time.perf_counter()
        for at in range(0, num_bytes, DEFAULT_CHUNK_BYTES):
            end = min(at + DEFAULT_CHUNK_BYTES, num_bytes)
            target[at:end] = source[at:end]
        return time.perf_counter() - began_s

    def raw_socket(self, num_bytes: int) -> float:
        view = self._pool.buffer[:num_bytes]
        began_s = time.perf_counter()
        self._socket.sendall(num_bytes.to_bytes(8, "little"))
        self._socket.sendall(view)
        assert self._socket.recv(1) == b"k"
        return time.perf_counter() - began_s

    def hash(self, num_bytes: int) -> float:
        view = self._pool.buffer
        began_s = time.perf_counter()
        for at in range(0, num_bytes, DEFAULT_CHUNK_BYTES):
            self._hash([view[at : min(at + DEFAULT_CHUNK_BYTES, num_bytes)]])
        return time.perf_counter() - began_s

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._socket.close()
        self._child.kill()
        self._child.wait()


def measure(bench: Bench, num_bytes: int, repeat: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "copy": lambda: bench.copy(num_bytes),
        "socket": lambda: bench.raw_socket(num_bytes),
        "tcp": lambda: bench.transfer("tcp", num_bytes),
        "shm": lambda: bench.transfer("shm", num_bytes),
        "hash": lambda: bench.hash(num_bytes),
    }
    rounds: list[dict[str, float]] = []
    for number in range(repeat + 2):
        times = {name: way() for name, way in ways.items()}
        if number >= 2:  # the first ones warm pages, caches and socket buffers
            rounds.append(times)
    median = {name: statistics.median(one[name] for one in rounds) for name in ways}
    row: dict[str, Any] = {"bytes": num_bytes, "seconds": median}
    for name, floor in (("tcp", "socket"), ("shm", "copy")):
        ratios = sorted(one[floor] / one[name] for one in rounds)
        quarters = statistics.quantiles(ratios, n=4)
        row[name] = {"ratio": statistics.median(ratios), "quartiles": [quarters[0], quarters[2]]}
        row[name]["best_ratio"] = min(one[floor] for one in rounds) / min(one[name] for one in rounds)
        row[name]["best_s"] = min(one[name] for one in rounds)
        row[name]["checksum_share"] = median["hash"] / median[name]
    return row


def show(row: dict[str, Any]) -> None:
    size, seconds = row["bytes"], row["seconds"]
    for name, floor in (("tcp", "socket"), ("shm", "copy")):
        low, high = row[name]["quartiles"]
        print(
            f"{size / 2**20:9.3f} MiB  {name}  {seconds[name] * 1e3:9.3f} ms  {size / seconds[name] / 1e9:6.2f} GB/s   "
            f"{floor:6s} {seconds[floor] * 1e3:9.3f} ms  {size / seconds[floor] / 1e9:6.2f} GB/s   "
            f"ratio {row[name]['ratio']:4.2f} ({low:4.2f}..{high:4.2f})   "
            f"best {size / row[name]['best_s'] / 1e9:5.2f} GB/s {row[name]['best_ratio']:4.2f}   "
            f"checksum {row[name]['checksum_share']:5.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="bytes per transfer, comma-separated")
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--run-blocks", type=int, default=16, help="consecutive blocks in each run")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags.serve, flags.block_bytes, flags.run_blocks)
        return
    sizes = [int(size) for size in flags.sizes.split(",")]
    bench = Bench(max(sizes), flags.block_bytes, flags.run_blocks)
    try:
        rows = []
        for size in sizes:
            rows.append(measure(bench, size, flags.repeat))
            if not flags.json:
                show(rows[-1])
        if flags.json:
            print(json.dumps(rows))
    finally:
        bench.close()


if __name__ == "__main__":
    main()
