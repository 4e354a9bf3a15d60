"""Makes cuda_ipc, nccl and tcp_staged of this process run over stand-ins for CUDA and NCCL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.transports.common.on_device import DeviceOf
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.cuda_ipc import CUDA_IPC, CudaIpc
from kvtransfer.transports.nccl import NCCL, Nccl
from kvtransfer.transports.tcp_staged import TCP_STAGED, TcpStaged
from tests.support.fake_device import PLAIN, FakeDevice, Trouble
from tests.support.fake_nccl import FakeConnector

DEVICE_TRANSPORTS: Final = ("cuda_ipc", "nccl", "tcp_staged")


def stand_in(pool: Any, trouble: Trouble = PLAIN) -> FakeDevice:
    """Installs stand-ins until the process ends, for a process with one pool."""
    device = FakeDevice(pool, trouble)
    install(lambda _: device, trouble)
    return device


def stand_in_each(trouble: Trouble = PLAIN, limits: CopyLimits | None = None) -> dict[int, FakeDevice]:
    """Installs stand-ins until the process ends, with one device for the pool of each tensor-parallel rank.

    Returns the devices by the id of their pool; a device is added when its pool is first used."""
    made: dict[int, FakeDevice] = {}
    lock = threading.Lock()

    def device_of(pool: Any) -> FakeDevice:
        with lock:
            if id(pool) not in made:
                made[id(pool)] = FakeDevice(pool, trouble, limits)
            return made[id(pool)]

    install(device_of, trouble)
    return made


def install(device_of: DeviceOf, trouble: Trouble = PLAIN) -> None:
    TRANSPORTS[CUDA_IPC], TRANSPORTS[NCCL] = CudaIpc(device_of), Nccl(device_of, FakeConnector(trouble=trouble))
    TRANSPORTS[TCP_STAGED] = TcpStaged(device_of)


@contextmanager
def stand_ins(trouble: Trouble = PLAIN) -> Iterator[dict[int, FakeDevice]]:
    """Stand-ins for both ends in this process; gives the devices by the id of their pool."""
    before = dict(TRANSPORTS)
    made = stand_in_each(trouble)
    try:
        yield made
    finally:
        TRANSPORTS.update(before)
        for device in made.values():
            device.end()
