"""The router's socket file for the gateway of the same host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdserve.client.aio import AsyncClient
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.owned_folder import OwnedFolder
from router.service.server import RouterServer
from tests.support.cluster_secret import TEXT

TOKEN = "the-token-of-this-test"


def router(path: Path) -> RouterServer:
    return RouterServer(RouterConfig(model="toy", port=0, unix_socket=str(path), token=TOKEN, cluster_secret=TEXT))


async def test_callers_need_the_token_there_too() -> None:
    folder = OwnedFolder.for_socket("test", "router.sock")
    path = folder.path / "router.sock"
    with socket.socket(socket.AF_UNIX) as ended:  # of a router that was killed
        ended.bind(str(path))
    server = router(path)
    try:
        await server.start()
        async with AsyncClient(f"unix:{path}", token=TOKEN) as client:
            assert (await client.topology()).workers == ()
        async with AsyncClient(f"unix:{path}", token="another-token-of-nobody") as client:
            with pytest.raises(Unauthenticated):
                await client.topology()
    finally:
        await server.stop()
        folder.remove()


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770])
async def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    server = router(tmp_path / "router.sock")
    try:
        with pytest.raises(ConfigError, match="mode 0700"):
            await server.start()
    finally:
        await server.stop()


async def test_a_path_that_is_taken_or_too_long_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("precious")
    for name in ("file", "x" * 200):
        server = router(tmp_path / name)
        try:
            with pytest.raises(ConfigError, match="unix_socket: got"):
                await server.start()
        finally:
            await server.stop()
    assert (tmp_path / "file").read_text() == "precious"
