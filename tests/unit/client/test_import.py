"""The SDK is light: what a fresh interpreter loads for it."""

from __future__ import annotations

import subprocess
import sys
import time

HEAVY = ("torch", "ray", "redis", "opentelemetry", "numpy", "transformers")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_clients_load_nothing_heavy() -> None:
    assert loaded_by("from pdserve import Client, AsyncClient, Slo, Overloaded").isdisjoint(HEAVY)


def test_every_public_name_can_be_had() -> None:
    assert loaded_by("import pdserve; [getattr(pdserve, name) for name in pdserve.__all__]").isdisjoint(HEAVY)


def test_importing_pdserve_alone_does_not_even_load_grpc() -> None:
    assert "grpc" not in loaded_by("import pdserve")


def test_importing_the_client_takes_under_half_a_second() -> None:
    best_s = min(_import_s() for _ in range(3))
    assert best_s < 0.5


def _import_s() -> float:
    code = "import time; t = time.process_time(); from pdserve import Client; print(time.process_time() - t)"
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert time.monotonic() - begin_s < 30
    return float(done.stdout)
