"""A server of the live page for its tests: `/ui` and a feed that the test scripts. Uses the standard library only.

python -m tests.support.ui_server [--rate RPS] [--port PORT]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import unquote

from pdserve.gateway.ui.page import page
from tests.support.ui_frames import START_S, Frame, FrameSource, Load

HELLO = {"model": "toy-model", "router_id": "r-1", "period_s": 0.25, "is_operator": True}


@final
class UiServer:
    """Serves frames of `feed()` to each stream; a test changes the attributes while it runs."""

    def __init__(self, feed: Callable[[], Iterator[Frame]], *, period_s: float = 0.25, port: int = 0) -> None:
        self.feed = feed
        self.period_s = period_s
        self.hello: dict[str, Any] = dict(HELLO)
        self.token: str | None = None
        self.refuse: tuple[int, str] | None = None  # status and message of every stream
        self.explanations: dict[str, dict[str, Any]] = {}
        self.worker_status = 204
        self.actions: list[tuple[str, str, str | None]] = []  # worker, action, the header against cross-site requests
        self.streams = 0
        self._open: list[Any] = []
        self._stopping = threading.Event()
        outer = self

        class Handler(_Handler):
            server_state = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def drop(self) -> None:
        """Ends every stream, as a router that stops."""
        self._stopping.set()
        for connection in list(self._open):
            connection.close_connection = True
        self._stopping = threading.Event()

    def close(self) -> None:
        self._stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def stream(self, handler: _Handler) -> None:
        self.streams += 1
        stopping = self._stopping
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()
        try:
            handler.event({"hello": self.hello})
            began = time.monotonic()
            for number, frame in enumerate(self.feed()):
                handler.event(frame)
                if stopping.wait(max(0.0, began + (number + 1) * self.period_s - time.monotonic())):
                    return
            stopping.wait()
        except OSError:
            pass  # the page left


class _Handler(BaseHTTPRequestHandler):
    server_state: UiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def do_GET(self) -> None:
        state = self.server_state
        if self.path.split("?")[0] in ("/ui", "/ui/"):
            body, headers = page()
            self._answer(200, body, dict(headers))
        elif not self._is_allowed():
            self._error(401, "no valid token")
        elif self.path == "/ui/events":
            if state.refuse:
                self._error(*state.refuse)
            else:
                self.close_connection = True
                state.stream(self)
        elif self.path.startswith("/ui/requests/"):
            found = state.explanations.get(unquote(self.path.removeprefix("/ui/requests/")))
            if found is None:
                self._error(404, "no longer kept")
            else:
                self._answer(200, json.dumps(found).encode(), {"content-type": "application/json"})
        else:
            self._error(404, "no such path")

    def do_POST(self) -> None:
        state = self.server_state
        _, _, worker, action = self.path.strip("/").split("/") if False else ("", "", *self.path.split("/")[3:5])
        state.actions.append((unquote(worker), action, self.headers.get("x-pdserve-ui")))
        if state.worker_status == 204:
            self._answer(204, b"", {})
        else:
            self._error(state.worker_status, "the operator's token is needed")

    def _is_allowed(self) -> bool:
        token = self.server_state.token
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


def replay(source: FrameSource, *, warm_s: float = 0.0, period_s: float = 0.25) -> Iterator[Frame]:
    """Endless frames. The first `warm_s` seconds are handed out in one go: they are the history."""
    number = 0
    while True:
        yield source.frame(START_S + warm_s + number * period_s)
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=8090)
    args = parser.parse_args()
    server = UiServer(lambda: replay(FrameSource(Load(rate_rps=args.rate))), port=args.port)
    print(server.url + "/ui")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
