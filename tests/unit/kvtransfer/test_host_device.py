"""Host memory as a device (kvtransfer/transports/tcp_staged.py). The tests of its transports are in
test_tcp_staged.py."""

from __future__ import annotations

import resource

from kvtransfer.transports.tcp_staged import zeroed


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_new_memory_is_zero_and_takes_no_pages_until_it_is_used() -> None:
    before = resident_bytes()
    memory = zeroed(2**30)
    assert resident_bytes() - before < 2**28, "some of a connection's staging is never used"
    assert len(memory) == 2**30
    assert memory[0] == memory[2**29] == memory[-1] == 0
    memory[5:7] = b"ab"
    assert bytes(memory[4:8]) == b"\0ab\0"
