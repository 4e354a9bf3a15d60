"""What the transports between GPUs share: the device of a pool, or what this system lacks for one."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.device import Device, Fence
from pdserve.engine.interface import KvPool

DeviceOf = Callable[[KvPool], Device]


def _nobody() -> None:
    """Waits: the copies are drained."""


class OnDevice:
    is_for_devices = True
    divides_blocks = False
    packages: tuple[str, ...] = ()  # that it needs beside torch and Triton

    def __init__(self, device_of: DeviceOf | None = None) -> None:
        """`device_of` stands in for CUDA."""
        self._device_of = device_of

    def why_not(self) -> str:
        if self._device_of is not None:
            return ""
        from kvtransfer.cuda import why_no_cuda

        return why_no_cuda(*self.packages)

    def prepare(self, pool: KvPool) -> None:
        """The first copies of a process import, compile and load for seconds, in which its connections would be silent
        and taken for dead. Called before there are any."""
        device = self._device(pool)
        source, scratch = device.pool(), device.staging(1)
        try:
            device.copy(source, [0], None, (), _nobody, None)
            device.copy(source, [0], scratch, [0], _nobody, None)
        finally:
            device.drain()
            scratch.close()

    def fence(self, pool: KvPool) -> Fence:
        """What the pool's engine has queued until now."""
        return self._device(pool).fence()

    def _device(self, pool: KvPool) -> Device:
        if self._device_of is not None:
            return self._device_of(pool)
        from kvtransfer.cuda import device_of

        return device_of(pool)
