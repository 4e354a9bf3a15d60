"""Both role programs over pools on devices: stand-ins for CUDA and NCCL, real engines, real gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from kvtransfer.transports.nccl import NCCL
from kvtransfer.transports.registry import TRANSPORTS
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.load import load_engine
from tests.support.fake_device import FakeDevice, HiddenPool
from tests.support.fake_ends import stand_ins

pytestmark = pytest.mark.gpu_checks

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
NUM_LAYERS: Final = 32
# With the profile's prefill times and 2.6 MB of KV, the price model prefers layer groups over an unmeasured link.
PROMPT: Final = [(37 * n) % 500 + 5 for n in range(75)]
COMMON: Final[dict[str, Any]] = {
    "block_size": 16,
    "max_context_tokens": 256,
    "max_batch_tokens": 512,
    "is_prefix_cache_on": False,
    "deterministic": "on",
    "profile": "h100-sxm.llama-3.1-8b.bf16",
}
PATHS = pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "tcp"])


class DeviceEngine:
    """An engine whose pool seems to be on a device."""

    def __init__(self, engine: Engine) -> None:
        self.step, self.spec, self.close = engine.step, engine.spec, engine.close
        self.pool = HiddenPool(engine.pool)


def load_on_host(config: Any, role: Role) -> Engine:
    return load_engine(replace(config, load="dummy"), role)


def load_on_device(config: Any, role: Role) -> Any:
    return DeviceEngine(load_on_host(config, role))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a narrow model of 32 layers."""
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    }
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def devices() -> Iterator[dict[int, FakeDevice]]:
    """cuda_ipc and nccl over stand-ins; the devices by the identity of their pools."""
    with stand_ins() as made:
        yield made


@PATHS
async def test_default_push_between_devices(
    devices: dict[int, FakeDevice],
    start: Callable[..., Any],
    attach: Callable[..., Any],
    ask: Callable[..., Any],
    model: str,
    transport: str,
) -> None:
    settings = {**COMMON, "model": model, "transport": transport, "push": "auto"}
    p = start(Role.PREFILL, load_on_device, **settings)
    d = start(Role.DECODE, load_on_device, **settings)
    router = await attach(p, d)
    expected = await router.local(ask("local", PROMPT, max_tokens=4))
    for name in ("first", "second"):
        assert await router.remote(ask(name, PROMPT, max_tokens=4)) == expected
        assert [one.is_committed for one in router.all("transfer_ended", name)] == [True, True]
    assert p.program._sender.stats.failed == d.program._receiver.stats.failed == 0
    assert p.program._sender.stats.moved_bytes == 2 * 5 * p.program.engine.spec.block_bytes
    assert d.program._receiver.stats.chunks > 2, "the first prompt leaves by groups of layers"


def test_push_layers_needs_transport(
    devices: dict[int, FakeDevice], start: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRANSPORTS[NCCL], "divides_blocks", False)
    with pytest.raises(ConfigError, match="push: got layers, expected auto, end or chunk: the transport sends whole"):
        start(Role.PREFILL, load_on_device, **COMMON, model=model, transport="auto", push="layers")


def test_push_layers_needs_equal_runs(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="push: got layers, expected auto, end or chunk: these KV blocks"):
        start(Role.PREFILL, model="toy", push="layers")


async def test_withheld_groups_are_counted(start: Callable[..., Any]) -> None:
    p = start(Role.PREFILL, model="toy")
    assert p.program.transfer_events()["layer_groups_withheld"] == 0
    p.program.batching.pushing.num_withheld += 3
    assert p.program.transfer_events()["layer_groups_withheld"] == 3
