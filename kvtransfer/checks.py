"""The checks of `pdserve doctor` for KV transfers on this host."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pdserve.core.installation import EXTRAS, CheckResult, advice, missing

_SHARED_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def shared_memory() -> Iterator[CheckResult]:
    # Imported here, because `doctor` also runs without the packages of the extra `server`.
    from kvtransfer.transports.shm import Shm

    if why_not := Shm().why_not():
        yield CheckResult("warn", "shm", why_not, "workers of this host send KV over tcp")
        return
    try:
        setting = _SHARED_HUGE_PAGES.read_text()
    except OSError:
        setting = ""
    # The file has the form "always within_size [advise] never"; the value in brackets is active.
    chosen = next((word.strip("[]") for word in setting.split() if word.startswith("[")), "unknown")
    yield CheckResult("ok", "shm", f"workers of this host read each other's KV in place; huge pages for it: {chosen}")


def pairs() -> Iterator[CheckResult]:
    """Tests each transport between two workers of this host, and reports which one they would use."""
    try:
        from kvtransfer.pair_probe import AUTO, probe
    except ModuleNotFoundError as error:
        absent = missing(error)
        if absent is None:
            raise
        yield CheckResult("warn", "kv", f"not measured: {absent.field} is not installed", advice(EXTRAS[absent.field]))
        return
    gpu_pairs = list(_gpu_pairs())
    for where, devices in (("kv", ("cpu", "cpu")), *gpu_pairs):
        for found in probe(*devices):
            is_choice = found.asked == AUTO
            name = f"{where} choice" if is_choice else f"{where} {found.asked}"
            if found.error and found.asked in EXTRAS and not gpu_pairs:
                continue  # a package for transfers between GPUs, which are absent
            if found.error:
                repair = "start a worker with --transport tcp to see why" if is_choice else ""
                yield CheckResult("fail" if is_choice else "warn", name, found.error, repair)
                continue
            speed = f"{found.block_s * 1e3:.2f} ms for 256 KiB, {found.bytes_per_s / 1e9:.2f} GB/s"
            yield CheckResult("ok", name, f"{found.transport}: {found.reason}" if is_choice else speed)


def _gpu_pairs() -> Iterator[tuple[str, tuple[str, str]]]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        other = min(1, torch.cuda.device_count() - 1)
        yield f"gpu 0-{other}", ("cuda:0", f"cuda:{other}")
