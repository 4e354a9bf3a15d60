"""A server of streamed chats that only waits: what the client itself measures without a router.

python -m benchmarks.peers.http_worker --port 9401 [--step-s 0.005]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, Final, final

from benchmarks.peers.client import OUTPUT_TOKENS

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@final
class Answering(asyncio.Protocol):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self._buffer.clear()
            self._transport.write(_HEAD)
            self._write_token(0)

    def _write_token(self, number: int) -> None:
        event = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        if number + 1 == OUTPUT_TOKENS:
            self._transport.write(chunk + _END)
            return
        self._transport.write(chunk)
        self._timer = asyncio.get_running_loop().call_later(self._step_s, self._write_token, number + 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.005)
    flags = parser.parse_args()
    loop = asyncio.get_running_loop()
    await (await loop.create_server(lambda: Answering(flags.step_s), "127.0.0.1", flags.port)).serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
