"""A local server with the part of the Hugging Face Hub's API that downloads need."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve_hub(repositories: Mapping[str, Mapping[str, bytes]], requests: list[str]) -> Iterator[str]:
    """Serves the files of `repositories` (name -> path -> content) and yields the URL. `requests` gets each path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            requests.append(path)
            for name, files in repositories.items():
                api = f"/api/models/{name}"
                if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                    siblings = [{"rfilename": each} for each in files]
                    self._send_json({"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})
                    return
                if path.startswith(f"{api}/tree/"):
                    entries = [
                        {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for each, data in files.items()
                    ]
                    self._send_json(entries)
                    return
                prefix, _, file = path.partition("/resolve/")
                if prefix == f"/{name}" and (data := files.get(file.partition("/")[2])) is not None:
                    self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
                    return
                if path.startswith(f"{api}/"):
                    self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                    return
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            self._send(403 if "gated" in path else 404, b"", {"X-Error-Code": code})

        def _send_json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
