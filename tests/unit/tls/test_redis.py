"""A Redis behind TLS: rediss:// URLs, with the CA in the URL."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.client.aio import AsyncClient
from pdserve.launch.services import redis_answers
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.testing import Cluster, toy_answer
from tests.support.tls_files import TestAuthority


@asynccontextmanager
async def behind_tls(path: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a proxy that ends TLS before a real Redis, whose own binary has none."""
    tasks: set[asyncio.Task[Any]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        tasks.update((asyncio.create_task(pump(reader, inner_writer)), asyncio.create_task(pump(inner_reader, writer))))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_redis_over_tls_needs_its_ca(tmp_path: Path) -> None:
    ours, other = TestAuthority(tmp_path / "ours"), TestAuthority(tmp_path / "other", "another CA")
    with EmbeddedRedis.start() as redis:
        async with behind_tls(redis.url.removeprefix("unix://"), ours.tls("redis").current().caller_server) as port:
            url = f"rediss://127.0.0.1:{port}/0"
            assert await redis_answers(f"{url}?ssl_ca_certs={ours.ca}")
            assert not await redis_answers(f"{url}?ssl_ca_certs={other.ca}")
            assert not await redis_answers(f"redis://127.0.0.1:{port}/0"), "in plain text"


async def test_a_cluster_uses_redis_over_tls(tmp_path: Path) -> None:
    ours = TestAuthority(tmp_path)
    with EmbeddedRedis.start() as redis:
        async with behind_tls(redis.url.removeprefix("unix://"), ours.tls("redis").current().caller_server) as port:
            both = {"redis": f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ours.ca}"}
            patient = {"slo_ttft_s": 120.0, "slo_tpot_s": 20.0}
            async with (
                Cluster(router={**both, **patient}, worker=both) as cluster,
                AsyncClient(cluster.address) as client,
            ):
                done = await client.generate("hello", max_tokens=4, temperature=0.0)
                assert done.text == toy_answer("hello", 4)
