"""The SDK loads few modules in a new interpreter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "ray", "redis", "opentelemetry", "numpy", "transformers")


def loaded_by(statement: str) -> set[str]:
    return {name.split(".")[0] for name in modules_of(statement)}


def modules_of(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_clients_load_nothing_heavy() -> None:
    assert loaded_by("from pdserve import Client, AsyncClient, Slo, Overloaded").isdisjoint(HEAVY)


def test_every_public_name_can_be_imported() -> None:
    assert loaded_by("import pdserve; [getattr(pdserve, name) for name in pdserve.__all__]").isdisjoint(HEAVY)


def test_importing_pdserve_alone_does_not_even_load_grpc() -> None:
    assert "grpc" not in loaded_by("import pdserve")


def test_the_client_loads_little_beside_grpc_and_protobuf() -> None:
    """Counts modules instead of seconds, which depend on the machine."""
    theirs = modules_of("import grpc, google.protobuf.message")
    ours = modules_of("from pdserve import Client") - theirs
    assert len(ours) < 150, sorted(ours)
