"""Arize Phoenix, a tracing backend with a page, as a process. `make clients CLIENTS=phoenix` installs it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.launch.ports import free_ports

START_S: Final = 180.0  # it creates its database
PROJECT: Final = "default"


@dataclass(frozen=True, slots=True)
class Phoenix:
    url: str
    otlp: str  # what --otlp takes

    def spans(self) -> list[dict[str, Any]]:
        """The last ones that it has stored."""
        return list(self._get(f"/v1/projects/{PROJECT}/spans?limit=1000")["data"])

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)


@contextmanager
def running_phoenix(python: Path, folder: Path) -> Iterator[Phoenix]:
    """`python` is the interpreter of its environment; it stores everything in `folder`."""
    http, grpc = free_ports(2)
    environ = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([python.parent / "phoenix", "serve"], env=environ, stdout=log, stderr=log)
    phoenix = Phoenix(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    try:
        _wait_until_it_answers(phoenix, process, folder / "log")
        yield phoenix
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(phoenix: Phoenix, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            phoenix.spans()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"Phoenix did not start: {log.read_text()[-2000:]}") from None
        time.sleep(0.5)
