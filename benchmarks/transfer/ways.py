"""The methods that the transfer benchmark times between two processes: ours, the floors, and NIXL."""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import JsonProcess
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.transport import SendOutcome, Sent
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.tls.certificates import ReloadingCertificates
from tests.support.tls_files import files_in
from tests.support.transfer_ends import WAIT_S, GrpcHost, HostPool, endpoint_config, fingerprint

LEAST_POOL_BYTES: Final = 256 * 2**20  # far larger than the caches
TRANSPORTS: Final = ("tcp", "shm")
TLS: Final = "tcp-tls"
NIXL: Final = {"nixl": {}, "nixl-tcp": {"UCX_TLS": "tcp"}}  # UCX chooses; UCX is held to sockets


@cache
def layout(first: int, num_blocks: int, is_fragmented: bool) -> list[int]:
    """Each block of a range of the pool once, in order or at random."""
    blocks = list(range(first, first + num_blocks))
    if is_fragmented:
        random.Random(num_blocks).shuffle(blocks)
    return blocks


def grants(order: dict[str, Any], endpoint: str) -> list[Grant]:
    """The transfers among which an order's bytes are divided; both sides compute the same ones."""
    blocks = layout(order["first"], order["blocks"], order["is_fragmented"])
    at_once = order["at_once"]
    return [
        Grant(
            key=TransferKey(transfer_id="bench", attempt=1, generation=order["number"] * 1000 + part),
            endpoint=endpoint,
            worker_id=f"d-{order['end']}",
            incarnation="1",
            fingerprint=fingerprint(order["block_bytes"]),
            blocks=tuple(blocks[len(blocks) * part // at_once : len(blocks) * (part + 1) // at_once]),
            num_cached_blocks=0,
        )
        for part in range(at_once)
    ]


End = tuple[str, ReloadingCertificates | None]  # transport, certificates


def ends(tls: ReloadingCertificates | None) -> dict[str, End]:
    found: dict[str, End] = {name: (name, None) for name in TRANSPORTS}
    if tls is not None:
        found[TLS] = ("tcp", tls)
    return found


def certificates(folder: str) -> ReloadingCertificates | None:
    return ReloadingCertificates(files_in(Path(folder)), is_mutual=True) if folder else None


def serve(max_bytes: int, block_bytes: int, source_fd: int, tls_folder: str = "") -> None:
    """The receiving process: runs one JSON order per line on stdin, answers on stdout."""
    pool = HostPool(max_bytes // block_bytes, block_bytes)
    _touch(pool.buffer)
    source = memoryview(mmap.mmap(source_fd, max_bytes, prot=mmap.PROT_READ))
    found = ends(certificates(tls_folder))
    receivers = {
        end: PlainReceiver(
            endpoint_config(
                pool,
                fingerprint(block_bytes),
                worker_id=f"d-{end}",
                incarnation="1",
                transport=transport,
                tls=tls,
            ),
            host="127.0.0.1",
        )
        for end, (transport, tls) in found.items()
    }
    hosts = {end: GrpcHost(receiver.servicer, tls=found[end][1]) for end, receiver in receivers.items()}
    endpoints = {end: host.endpoint for end, host in hosts.items()}
    door = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_drain_socket, args=(door, pool.buffer), daemon=True).start()
    print(json.dumps({"endpoints": endpoints, "socket": door.getsockname()[1]}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if "memcpy" in order:
            began_s = time.perf_counter()
            begin, end = order["memcpy"]
            pool.buffer[begin:end] = source[begin:end]
            answer["seconds"] = time.perf_counter() - began_s
        elif "compare" in order:
            begin, end = order["compare"]
            answer["is_equal"] = pool.buffer[begin:end] == source[begin:end]
        else:
            for grant in grants(order, ""):
                receivers[order["end"]].expect(grant, lambda received: None)
        print(json.dumps(answer), flush=True)


def _touch(memory: memoryview) -> None:
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1


def _drain_socket(door: socket.socket, memory: memoryview) -> None:
    sock, _ = door.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(16)
    while sock.recv_into(head) == 16:
        view = memory[int.from_bytes(head[:8], "little") : int.from_bytes(head[8:], "little")]
        while view:
            view = view[sock.recv_into(view) :]
        sock.sendall(b"k")


class Ways:
    """Each turn moves another stretch of the pools, so that nobody finds the bytes in a cache for having had them last.

    `missing` says which peers could not be had, and why.
    """

    def __init__(self, max_bytes: int, block_bytes: int, nixl_python: str, tls_folder: str = "") -> None:
        """`tls_folder`: certificate files for tcp over TLS; empty: it is left out."""
        max_bytes = max(max_bytes, -(-LEAST_POOL_BYTES // block_bytes) * block_bytes)
        self._max_bytes, self._at = max_bytes, 0
        self.block_bytes, self._number = block_bytes, 0
        self._pool = HostPool(max_bytes // block_bytes, block_bytes)
        pattern = random.Random(1).randbytes(2**20 + 8192)  # so that no two blocks are equal
        for at in range(0, max_bytes, 2**20):
            start, end = at // 2**20 % 8192, min(at + 2**20, max_bytes)
            self._pool.buffer[at:end] = pattern[start : start + end - at]
        assert self._pool.descriptor is not None, "the floor needs memory that can be shared"
        command = [sys.executable, "-m", "benchmarks.transfer", "--serve", str(max_bytes)]
        command += ["--block-bytes", str(block_bytes), "--source-fd", str(self._pool.descriptor)]
        command += [f"--tls-folder={tls_folder}"]
        self._child = JsonProcess(command, fds=(self._pool.descriptor,))
        heard = self._child.hear()
        self._endpoints: dict[str, str] = heard["endpoints"]
        self._socket = socket.create_connection(("127.0.0.1", heard["socket"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._senders = {
            end: PlainSender(
                endpoint_config(
                    self._pool,
                    fingerprint(block_bytes),
                    worker_id=f"p-{end}",
                    incarnation="1",
                    transport=transport,
                    tls=tls,
                )
            )
            for end, (transport, tls) in ends(certificates(tls_folder)).items()
        }
        self.has_tls = bool(tls_folder)
        self.missing: dict[str, str] = {}
        self.nixl: dict[str, JsonProcess] = {}
        script = str(Path(__file__).with_name("nixl_peer.py"))
        for name, env in NIXL.items():
            if not nixl_python:
                self.missing[name] = "no --nixl-python was given"
                continue
            command = [nixl_python, script, str(max_bytes), str(block_bytes)]
            child = JsonProcess(command, {**os.environ, **env}, stderr=subprocess.DEVNULL, is_alone=True)
            try:
                child.hear()
            except OSError:
                self.missing[name] = f"{nixl_python} could not start it"
                child.close()
                continue
            self.nixl[name] = child
        for one in self._senders:  # every page of every mapping is touched once
            self.transfer(one, max_bytes, False, 1)
        self._child.ask({"memcpy": (0, max_bytes)})

    def _next(self, num_bytes: int) -> tuple[int, int]:
        """The pool range of the next turn."""
        if self._at + num_bytes > self._max_bytes:
            self._at = 0
        begin, self._at = self._at, self._at + num_bytes
        return begin, begin + num_bytes

    def transfer(self, end: str, num_bytes: int, is_fragmented: bool, at_once: int) -> float:
        """Seconds from the push of finished blocks until the receiver reports that every checksum matched."""
        self._number += 1
        begin, _ = self._next(num_bytes)
        order = {
            "end": end,
            "number": self._number,
            "first": begin // self.block_bytes,
            "blocks": num_bytes // self.block_bytes,
            "block_bytes": self.block_bytes,
            "is_fragmented": is_fragmented,
            "at_once": at_once,
        }
        self._child.ask(order)
        all_ended, ends = threading.Event(), list[Sent]()

        def on_end(sent: Sent) -> None:
            ends.append(sent)
            if len(ends) == at_once:
                all_ended.set()

        sender, parts = self._senders[end], grants(order, self._endpoints[end])
        sources = iter(
            layout(order["first"], order["blocks"], is_fragmented)
        )  # the same permutation: the pools end up equal
        pushes = [[(index, next(sources)) for index in range(len(grant.blocks))] for grant in parts]
        for grant in parts:
            sender.start(grant, on_end)
        began_s = time.perf_counter()
        for grant, push in zip(parts, pushes, strict=True):
            sender.push(grant.key, push, True)
        assert all_ended.wait(WAIT_S), "the transfer hangs"
        took_s = time.perf_counter() - began_s
        assert all(one.outcome is SendOutcome.SENT for one in ends), ends
        return took_s

    def memcpy(self, num_bytes: int) -> float:
        """One call that copies out of the source's memory, in the receiving process."""
        return float(self._child.ask({"memcpy": self._next(num_bytes)})["seconds"])

    def raw_socket(self, num_bytes: int) -> float:
        """sendall here, recv_into there, one byte back."""
        begin, end = self._next(num_bytes)
        view = self._pool.buffer[begin:end]
        began_s = time.perf_counter()
        self._socket.sendall(begin.to_bytes(8, "little") + end.to_bytes(8, "little"))
        self._socket.sendall(view)
        assert self._socket.recv(1) == b"k"
        return time.perf_counter() - began_s

    def peer(self, name: str, num_bytes: int, is_fragmented: bool, at_once: int) -> float:
        begin, _ = self._next(num_bytes)
        blocks = layout(begin // self.block_bytes, num_bytes // self.block_bytes, is_fragmented)
        answer = self.nixl[name].ask({"blocks": blocks, "targets": blocks, "at_once": at_once})
        return float(answer["seconds"])

    def is_equal(self, num_bytes: int) -> bool:
        """Whether the receiver's pool has the source's bytes at the places to which the last turn moved them."""
        return bool(self._child.ask({"compare": (self._at - num_bytes, self._at)})["is_equal"])

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._socket.close()
        for child in (self._child, *self.nixl.values()):
            child.close()
