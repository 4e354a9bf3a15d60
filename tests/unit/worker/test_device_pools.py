"""Both role programs over pools on devices: stand-ins for CUDA and NCCL, real engines, real gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.nccl import NCCL
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.load import build_engine
from pdserve.engine.load_engine import load_engine
from pdserve.v1 import worker_pb2
from tests.support.fake_device import DeviceEngine, FakeDevice
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


@pytest.fixture
def load_heads_first(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads an engine whose pool is on a device and has heads first, as with PDSERVE_GPU=layout=heads."""

    def load(config: Any, role: Role) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(build_engine, "stores_heads_first", lambda device: True)
            return load_on_device(config, role)

    return load


@PATHS
async def test_heads_first_pools_exchange_blocks(
    devices: dict[int, FakeDevice],
    start: Callable[..., Any],
    attach: Callable[..., Any],
    ask: Callable[..., Any],
    model: str,
    transport: str,
    load_heads_first: Callable[..., Any],
) -> None:
    """In blocks of 64, also where the decode worker's prefix cache has the first block."""
    settings = {**COMMON, "model": model, "transport": transport, "block_size": 64, "deterministic": "off"}
    settings["is_prefix_cache_on"] = True
    p = start(Role.PREFILL, load_heads_first, **settings)
    d = start(Role.DECODE, load_heads_first, **settings)
    spec, sender = p.program.engine.spec, p.program._sender
    assert spec.layout == d.program.engine.spec.layout == "block-major-heads.v1"
    router = await attach(p, d)
    prompts = [PROMPT, [*PROMPT[:64], *PROMPT[:9]]]
    for number, (prompt, num_blocks) in enumerate(zip(prompts, (2, 1), strict=True)):
        before = sender.stats.moved_bytes
        tokens = await router.remote(ask(f"remote {number}", prompt, max_tokens=4))
        assert sender.stats.moved_bytes - before == num_blocks * spec.block_bytes
        assert await router.local(ask(f"local {number}", prompt, max_tokens=4)) == tokens
        assert [one.is_committed for one in router.all("transfer_ended", f"remote {number}")] == [True, True]


@PATHS
async def test_other_layout_is_refused_before_a_byte_moves(
    devices: dict[int, FakeDevice],
    start: Callable[..., Any],
    attach: Callable[..., Any],
    ask: Callable[..., Any],
    model: str,
    transport: str,
    load_heads_first: Callable[..., Any],
) -> None:
    settings = {**COMMON, "model": model, "transport": transport, "deterministic": "off"}
    p = start(Role.PREFILL, load_heads_first, **settings)
    d = start(Role.DECODE, load_on_device, **settings)
    router = await attach(p, d)
    sequence = ask("remote", PROMPT, max_tokens=4)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "remote")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    ended = await router.next("transfer_ended", "remote", Role.PREFILL)
    assert (ended.is_committed, ended.num_bytes, p.program._sender.stats.moved_bytes) == (False, 0, 0)
    expected = "kv_shape.layout: got block-major-heads.v1, expected a layout that can be converted to block-major.v1"
    assert ended.error == expected
    for role in (Role.PREFILL, Role.DECODE):
        await router.send(role, cancel=worker_pb2.Cancel(request_id="remote", attempt=1))
        await router.released("remote", role)
    assert len(await router.local(ask("local", PROMPT, max_tokens=4))) == 4


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
    p.program.scheduler.pushing.num_withheld += 3
    assert p.program.transfer_events()["layer_groups_withheld"] == 3
