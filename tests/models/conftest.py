"""The engine vllm, in the environment of `make vllm-env`: `make test-models` runs these tests. Elsewhere they are not
collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.load_engine import load_engine
from tests.models.far_oracle import FarOracle
from tests.models.tiny import OTHER_LOGITS, REFUSED, TINY, build, reference
from tests.unit.engine.conftest import make_prompt, request_of, serve
from tests.unit.engine.test_drafts import SpoiltDrafts

__all__ = ["make_prompt", "request_of", "serve"]  # fixtures

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model with that name."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            family, own = TINY[name] if name in TINY else REFUSED[name][:2]
            built[name] = build(family, own, tmp_path_factory.mktemp("models") / name)
        return built[name]

    return get


def open_vllm(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_blocks": 200, "dtype": "float32", "cuda_graphs": False, "threads": 1} | settings
    return load_engine(WorkerConfig(model=str(folder), worker_id="w", engine="vllm", **settings), Role.DECODE)


@pytest.fixture(scope="module", params=TINY)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def engine(name: str, tiny: Callable[[str], Path]) -> Iterator[Engine]:
    opened = open_vllm(tiny(name))
    yield opened
    opened.close()


@pytest.fixture
def has_equal_logits(name: str) -> None:
    if name in OTHER_LOGITS:
        pytest.skip(OTHER_LOGITS[name])


@pytest.fixture(scope="module")
def oracle(name: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> FarOracle:
    return FarOracle(reference(name, tiny(name), tmp_path_factory.mktemp("reference") / name))


def with_and_without_drafts(
    serve: Callable[..., list[list[int]]], engine: Any, requests: Callable[[], list[Any]]
) -> tuple[list[Any], list[Any]]:
    """The same requests, served without drafts, and then with right and wrong ones."""
    plain, guessed = requests(), requests()
    expected = serve(engine, plain, chunk=48)
    answers = {(*one.prompt, one.sampling.seed): tokens for one, tokens in zip(plain, expected, strict=True)}
    serve(engine, guessed, chunk=48, seed=1, guess=SpoiltDrafts(answers, seed=5))
    return plain, guessed
