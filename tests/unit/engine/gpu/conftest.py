"""Kernels run on a CUDA device if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu.interpreter import prepare
from tests.gpu.strict_interpreter import strict_interpreter
from tests.unit.engine.conftest import build_tiny

torch.set_num_threads(1)
DEVICE = prepare()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the interpreter, tests of single kernels check every address."""
    if "case" not in request.fixturenames or DEVICE.type == "cuda":
        yield
        return
    with strict_interpreter(seed=len(request.node.name)):
        yield


MAX_ROWS = 3


@contextmanager
def plain_products() -> Iterator[None]:
    """Weights that are loaded in it are stored as on a GPU."""
    from pdserve.engine.model import forms

    with mock.patch.object(forms, "FORMS", [one for one in forms.FORMS if one.rounding != "none"]):
        yield


def few_rows_of(model: Any, products: Any) -> Any:
    """As build_engine opens them; `fastest` finds each method fastest in turn."""
    from pdserve.engine.gpu.few_rows import open_few_rows, sites_of

    turn, sites = cycle(range(5)), sites_of(model._weights)
    assert sites or products == "cublas"
    return open_few_rows(products, model.products, sites, DEVICE, 4, lambda run: float(next(turn)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model with two layers, because an interpreted kernel takes milliseconds per program."""

    @cache
    def get(name: str) -> Path:
        return build_tiny(name, tmp_path_factory.mktemp("shallow") / name, num_hidden_layers=2)

    return get


@pytest.fixture(scope="session")
def make_pair(tiny: Callable[[str], Path], open_engine: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """An eager engine, and one with static buffers over the same weights, each with its own pool.

    `most_tokens`: maximum of a step whose rows have drafts.
    """
    from pdserve.engine.gpu.engine import GraphEngine
    from pdserve.engine.gpu.graphs import EagerReplays, StaticDecode
    from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for
    from pdserve.engine.gpu.kernels.switches import gpu_switches

    def get(
        name: str,
        most_rows: int = MAX_ROWS,
        grammars: Any = None,
        most_tokens: int = 0,
        most_queries: int = 4,
        block_size: int = 16,
    ) -> tuple[Any, Any]:
        settings = {"kv_blocks": 64, "block_size": block_size, "max_context_tokens": 128, "device": DEVICE.type}
        products = gpu_switches().products
        eager = open_engine(tiny(name), **settings)
        with plain_products() if products != "cublas" else nullcontext():
            inner = open_engine(tiny(name), **settings)
        if grammars is not None:
            eager.grammars = inner.grammars = grammars
        model = copy(inner.model)  # the eager engine keeps its own products
        model.products = few_rows_of(model, products)
        decode = StaticDecode(
            model,
            inner.pool,
            most_rows=most_rows,
            max_context_tokens=inner.spec.max_context_tokens,
            vocab_size=inner.spec.vocab_size,
            num_processors=4,
            most_tokens=most_tokens,
            most_queries=most_queries if most_tokens else 1,
        )
        verify = EagerReplays(decode, buckets_for(most_tokens), most_queries) if most_tokens else None
        return eager, GraphEngine(inner, decode, EagerReplays(decode, buckets_for(most_rows)), verify)

    return get
