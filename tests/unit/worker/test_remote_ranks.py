"""A decode worker whose second rank is on another host (127.0.0.2): `pdserve rank`, real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pdserve.core.types import Role
from tests.oracle import Oracle
from tests.unit.worker.conftest import TEXT
from tests.unit.worker.test_tensor_parallel import BUNDLED, COMMON, PROMPTS


async def test_a_rank_on_another_host_transfers_its_heads(start: Any, attach: Any, ask: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "pdserve", "rank", address, "--host=127.0.0.2"]
    environ = {**os.environ, "PDSERVE_CLUSTER_SECRET": TEXT, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "rank.log"
    with log.open("wb") as stderr:
        rank = subprocess.Popen(command, env=environ, stderr=stderr)
    try:
        remote = {**COMMON, "tensor_parallel": 2, "local_ranks": 1, "rendezvous": address}
        p, d = start(Role.PREFILL, **COMMON), start(Role.DECODE, **remote)
        [endpoint] = d.program._receiver.rank_endpoints
        assert endpoint.startswith("127.0.0.2:")
        router = await attach(p, d)
        tokens = await router.remote(ask("r", PROMPTS[2], max_tokens=8, ignore_eos=True))
        Oracle(BUNDLED).assert_exact([PROMPTS[2]], [tokens])
        moved = [one for one in router.all("transfer_ended", "r") if one.is_committed]
        assert sum(one.num_bytes for one in moved) > 0
        # Effects of the end of a rank on its worker, and of the end of a worker on its ranks.
        [pid] = [int(one) for one in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
        await d.until_fatal()
        ended = asyncio.get_running_loop().time() + 60.0
        while "joining again" not in log.read_text():
            assert rank.poll() is None
            assert asyncio.get_running_loop().time() < ended
            await asyncio.sleep(0.05)
    finally:
        rank.kill()
        rank.wait()
