"""Clients in environments of their own, which `make clients` makes, and the cluster that they call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.programs import python_of, run_client
from pdserve.launch.running import Running
from tests.support.tooled_model import make_tooled_model

PROGRAMS = Path(__file__).parent / "programs"
CLIENT = "client"  # property of a test: the client that it runs
SETS = ("worker.deterministic=on", "router.slo_ttft_s=120", "router.slo_tpot_s=20")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tooled_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def cluster(model: Path) -> Iterator[Running]:
    """`pdserve up --http`, in processes of its own."""
    sets = [word for one in SETS for word in ("--set", one)]
    with Running.start("--model", str(model), "--http", "0", *sets) as cluster:
        yield cluster


@pytest.fixture
def need(record_property: Callable[[str, object], None]) -> Callable[[str], Path]:
    """The interpreter of a client's environment; skips the test if `make clients` has not made it."""

    def find(name: str) -> Path:
        record_property(CLIENT, name)
        python = python_of(name)
        if python is None:
            pytest.skip(f"the environment of {name} was not made: `make clients CLIENTS={name}`")
        return python

    return find


@pytest.fixture
def run_program(need: Callable[[str], Path], cluster: Running, model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a program of tests/clients/programs, and returns the object in its last line."""

    def run(environment: str, program: str) -> Any:
        words = [str(need(environment)), str(PROGRAMS / program), cluster.http_url, model.name]
        return json.loads(run_client(words, tmp_path).strip().splitlines()[-1])

    return run
