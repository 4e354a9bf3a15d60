"""NIXL over UCX between two processes, as a peer of the transfer benchmark. Runs in an environment that has nixl.

    PYTHON -m benchmarks.transfer.nixl_peer BYTES BLOCK_BYTES

Registers BYTES in this process and in a child, then runs one JSON order per line on stdin:
{"blocks": source blocks, "targets": target blocks, "at_once": transfers that share them} -> {"seconds": s}.
A transfer is timed from prepared descriptor lists to the last one that reports DONE, by WRITE, as NIXL users push.
It imports nothing from this repository, so any environment with nixl can run it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import IO, Any

SELF = "NIXL_INIT_AGENT"  # the library's name for this side of a transfer


def quiet_stdout() -> IO[str]:
    """The real standard output; what the library prints goes to standard error. Dies with its parent from here on.

    A process that stands stopped would not see the end of its standard input.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def opened(name: str, num_bytes: int) -> tuple[Any, mmap.mmap, int]:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = mmap.mmap(-1, num_bytes)
    view = memoryview(memory)
    for at in range(0, num_bytes, 2**20):
        end = min(at + 2**20, num_bytes)
        view[at:end] = (bytes(range(256)) * 4096)[: end - at] if name == "source" else bytes(end - at)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
    return agent, memory, address


def target(num_bytes: int) -> None:
    out = quiet_stdout()
    agent, memory, address = opened("target", num_bytes)
    print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": address}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        agent.get_new_notifs()  # the library asks for progress on this side too
        at, size = order["at"], order["size"]
        print(json.dumps({"bytes": memory[at : at + size].hex()}), file=out, flush=True)


def source(num_bytes: int, block_bytes: int) -> None:
    out = quiet_stdout()
    command = [sys.executable, __file__, "target", str(num_bytes)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    theirs = json.loads(child.stdout.readline())
    agent, memory, address = opened("source", num_bytes)
    remote = agent.add_remote_agent(bytes.fromhex(theirs["metadata"]))
    offsets = range(0, num_bytes, block_bytes)
    mine = agent.prep_xfer_dlist(SELF, [(address + at, block_bytes, 0) for at in offsets], "DRAM")
    other = agent.prep_xfer_dlist(remote, [(theirs["address"] + at, block_bytes, 0) for at in offsets], "DRAM")
    print(json.dumps({"is_ready": True}), file=out, flush=True)

    def move(blocks: list[int], targets: list[int], at_once: int) -> float:
        began_s = time.perf_counter()
        pending = []
        for number in range(at_once):
            part = slice(len(blocks) * number // at_once, len(blocks) * (number + 1) // at_once)
            handle = agent.make_prepped_xfer("WRITE", mine, blocks[part], other, targets[part], b"done")
            pending.append((handle, agent.transfer(handle)))
        handles = [handle for handle, _ in pending]
        while pending:
            pending = [(handle, agent.check_xfer_state(handle)) for handle, state in pending if state != "DONE"]
            if any(state == "ERR" for _, state in pending):
                raise RuntimeError("NIXL reports ERR")
        took_s = time.perf_counter() - began_s
        for handle in handles:
            agent.release_xfer_handle(handle)
        return took_s

    for line in sys.stdin:
        order = json.loads(line)
        blocks, targets = order["blocks"], order["targets"]
        move(blocks, targets, order["at_once"])  # not counted: both processes were stopped, and wake up during it
        took_s = move(blocks, targets, order["at_once"])
        child.stdin.write(json.dumps({"at": targets[-1] * block_bytes, "size": 64}) + "\n")
        child.stdin.flush()
        at = blocks[-1] * block_bytes
        if json.loads(child.stdout.readline())["bytes"] != memory[at : at + 64].hex():
            raise RuntimeError("NIXL said DONE and the bytes are not there")
        print(json.dumps({"seconds": took_s}), file=out, flush=True)
    child.stdin.close()
    child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(int(sys.argv[2]))
    else:
        source(int(sys.argv[1]), int(sys.argv[2]))
