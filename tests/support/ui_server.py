"""A server of the live page for its tests: `/ui` and a feed that the test scripts. Uses the standard library only.

python -m tests.support.ui_server [--rate RPS] [--port PORT]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import unquote

from pdserve.gateway.ui.page import page
from tests.support.ui_frames import START_S, Frame, FrameSource, Load


@final
class UiServer:
    """Serves the frames of `feed()` to each stream; a test changes the attributes while it runs."""

    def __init__(
        self, feed: Callable[[], Iterator[Frame]], *, burst: int = 0, period_s: float = 0.25, port: int = 0
    ) -> None:
        self.feed = feed
        self.burst = burst  # frames that are sent at once: the history. Then one per period, until there is none
        self.period_s = period_s
        self.hello: dict[str, Any] = {
            "model": "toy-model",
            "router_id": "router-1",
            "period_s": period_s,
            "is_operator": True,
        }
        self.token: str | None = None
        self.refuse: tuple[int, str] | None = None  # status and message for every stream
        self.explanations: dict[str, dict[str, Any]] = {}
        self.worker_error: tuple[int, str] | None = None
        self.logs: dict[str, list[dict[str, Any]]] = {}  # lines by worker
        self.actions: list[tuple[str, str, str | None]] = []  # worker, action, the header against cross-site requests
        self._stopping = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def drop(self) -> None:
        """Ends every stream, as a router that stops."""
        stopping, self._stopping = self._stopping, threading.Event()
        stopping.set()

    def close(self) -> None:
        self._stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def stream(self, send: Callable[[dict[str, Any]], None]) -> None:
        stopping = self._stopping
        send({"hello": self.hello})
        began_s = time.monotonic()
        for number, frame in enumerate(self.feed(), 1 - self.burst):
            send(frame)
            if number > 0 and stopping.wait(max(0.0, began_s + number * self.period_s - time.monotonic())):
                return
        stopping.wait()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, state: UiServer, *args: Any) -> None:
        self._state = state
        super().__init__(*args)  # answers the requests of the connection

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _stream(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):  # the page left
            self._state.stream(self._send)

    def _send(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def do_GET(self) -> None:
        state = self._state
        if self.path.split("?")[0] in ("/ui", "/ui/"):
            body, headers = page()
            self._answer(200, body, dict(headers))
        elif not self._is_allowed():
            self._error(401, "no valid token")
        elif self.path == "/ui/events":
            if state.refuse:
                self._error(*state.refuse)
            else:
                self._stream()
        elif self.path.startswith("/ui/requests/"):
            found = state.explanations.get(unquote(self.path.removeprefix("/ui/requests/")))
            if found is None:
                self._error(404, "no longer kept")
            else:
                self._answer(200, json.dumps(found).encode(), {"content-type": "application/json"})
        elif self.path.startswith("/ui/workers/") and self.path.endswith("/log"):
            worker = unquote(self.path.removeprefix("/ui/workers/").removesuffix("/log"))
            if state.worker_error:
                self._error(*state.worker_error)
            else:
                body = json.dumps({"lines": state.logs.get(worker, [])}).encode()
                self._answer(200, body, {"content-type": "application/json"})
        else:
            self._error(404, "no such path")

    def do_POST(self) -> None:
        state = self._state
        _, _, _, worker, action = self.path.split("/")
        state.actions.append((unquote(worker), action, self.headers.get("x-pdserve-ui")))
        if state.worker_error:
            self._error(*state.worker_error)
        else:
            self._answer(204, b"", {})

    def _is_allowed(self) -> bool:
        token = self._state.token
        return token is None or self.headers.get("authorization") == f"Bearer {token}"

    def _error(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "error", "code": None}}).encode()
        self._answer(status, body, {"content-type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def endless(source: FrameSource, period_s: float = 0.25) -> Iterator[Frame]:
    for number in itertools.count():
        yield source.frame(START_S + number * period_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=8090)
    args = parser.parse_args()
    server = UiServer(lambda: endless(FrameSource(Load(rate_rps=args.rate))), burst=240, port=args.port)
    print(server.url + "/ui")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
