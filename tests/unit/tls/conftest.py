"""A cluster with TLS in this process, a gateway before it, and the CA of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import GatewayConfig
from pdserve.gateway.server import GatewayHost
from pdserve.launch.ports import listeners
from pdserve.testing import Cluster
from tests.support.tls_files import TestAuthority

PATIENT = {"slo_ttft_s": 120.0, "slo_tpot_s": 20.0}


@dataclass(frozen=True)
class TlsCluster:
    cluster: Cluster
    gateway: GatewayHost
    authority: TestAuthority
    ports: frozenset[int]  # of all its processes
    callers: TestAuthority | None  # whose certificates callers need

    @property
    def ca(self) -> str:
        return str(self.authority.ca)

    @property
    def url(self) -> str:
        return f"https://{self.gateway.address}/v1"

    def rotate(self) -> None:
        """New certificates for all processes, from the same CA."""
        for name in ("router", "worker", "gateway"):
            self.authority.files(name)


@contextmanager
def tls_cluster(folder: Path, callers: TestAuthority | None = None, **changes: float) -> Iterator[TlsCluster]:
    """`changes`: settings of the router."""
    authority = TestAuthority(folder)
    before = {one.port for one in listeners([os.getpid()])}
    asked = {} if callers is None else {"tls_client_ca": str(callers.ca)}
    router: dict[str, Any] = {**PATIENT, **authority.settings("router"), **asked, **changes}
    worker: dict[str, Any] = {**authority.settings("worker"), "transport": "tcp"}
    with Cluster(router=router, worker=worker) as cluster:
        config = GatewayConfig(router=cluster.address, port=0, **authority.settings("gateway"), **asked)
        gateway = GatewayHost(config)
        gateway.start()
        try:
            ports = frozenset(one.port for one in listeners([os.getpid()])) - before
            yield TlsCluster(cluster, gateway, authority, ports, callers)
        finally:
            gateway.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    with tls_cluster(tmp_path_factory.mktemp("tls")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    """Callers need a certificate of the CA in `callers`."""
    folder = tmp_path_factory.mktemp("mtls")
    callers = TestAuthority(folder / "callers", "callers")
    with tls_cluster(folder, callers) as cluster:
        yield cluster
