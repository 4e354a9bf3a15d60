"""`pdserve top`: the live view in a terminal."""

from __future__ import annotations

import argparse
import asyncio

from pdserve.client.target_flags import add_target_flags, async_client
from pdserve.progress import require_terminal

HELP = "watch workers, requests and KV transfers in the terminal"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    from pdserve.top.app import RouterSource, TopApp

    require_terminal("`pdserve topology --json` is for programs")

    async def watch() -> int:
        async with async_client(args) as client:
            await client.topology()  # raises at once where there is no router, or it rejects the token
            return await TopApp(RouterSource(client, args.target)).run_async() or 0

    return asyncio.run(watch())
