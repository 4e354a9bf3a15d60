"""Engines are chosen by name: ours, and those that other distributions register (tests/support/installed_engine)."""

import json
import sys
from pathlib import Path

import pytest

from pdserve.client.sync import Client
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import KvShape, check_convertible, wire_dtype
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Row
from pdserve.engine.load_engine import engine_names, load_engine
from pdserve.engine.toy import ToyEngine
from pdserve.launch import settings
from pdserve.testing import Cluster

INSTALLED = Path(__file__).parents[2] / "support" / "installed_engine"
PROMPT = [104, 105]


def open_engine(engine: str, model: str = "toy", **more: int):
    return load_engine(WorkerConfig(model=model, worker_id="worker", engine=engine, **more), Role.DECODE)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(INSTALLED))
    monkeypatch.delitem(sys.modules, "adder_engine", raising=False)


def test_auto_takes_toy_for_a_toy_model() -> None:
    assert isinstance(open_engine("auto"), ToyEngine)
    assert isinstance(open_engine("toy"), ToyEngine)


@pytest.mark.parametrize(("engine", "model"), [("torch", "toy"), ("toy", "stdlib-5m")])
def test_an_engine_rejects_models_of_the_other(engine: str, model: str) -> None:
    with pytest.raises(ConfigError, match=f"engine: got '?{engine}"):
        open_engine(engine, model)


def test_an_unknown_engine_is_rejected_with_the_installed_ones(installed: None) -> None:
    with pytest.raises(ConfigError, match=r"auto, or an installed engine: absent, adder, .*torch, toy") as caught:
        open_engine("vlm")
    assert (caught.value.field, caught.value.seen) == ("engine", "vlm")


def test_installed_engines_are_listed(installed: None) -> None:
    assert {"adder", "torch", "toy"} <= set(engine_names())


def test_an_engine_that_is_not_installed_is_not_listed() -> None:
    assert engine_names() == ["torch", "toy"]


def test_a_registered_engine_gets_the_settings_and_the_role(installed: None) -> None:
    engine = open_engine("adder", kv_blocks=3, block_size=8)
    assert (engine.role, engine.spec.num_blocks, engine.spec.block_size) == (Role.DECODE, 3, 8)
    row = Row(tokens=PROMPT, start=0, blocks=[2], sample=Sampling(), history=PROMPT, prompt_len=2)
    assert engine.step([row])[0].sampled[0].token_id == 32 + (104 + 105) % 95


@pytest.mark.parametrize(
    ("engine", "field", "expected"),
    [
        ("absent", "engine", "adder-engine 1.0: ModuleNotFoundError"),
        ("number", "engine", "adder_engine:NOT_A_FACTORY"),
        ("object", "engine", "object lacks spec, pool, step, close"),
        ("no-pool", "engine", "AdderEngine lacks pool.block_bytes, pool.runs_per_block"),
        ("no-spec", "engine.spec", "got dict, expected an EngineSpec"),
        ("other-model", "engine.model", "got adder, expected toy"),
        ("other-size", "engine.num_blocks", "257, as in its pool"),
        ("in-layers", "engine.runs_per_block", "KV transfers move a block as one run of bytes"),
    ],
)
def test_an_engine_that_workers_cannot_use_is_rejected(installed: None, engine: str, field: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        open_engine(engine)
    assert caught.value.field == field


def test_two_packages_of_one_engine_are_rejected(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "second_engine-2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: second-engine\nVersion: 2.0\n")
    (folder / "entry_points.txt").write_text("[pdserve.engines]\nadder = second_engine:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"adder-engine 1\.0 and second-engine 2\.0 register it"):
        open_engine("adder")


def test_our_names_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "taker-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: taker\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[pdserve.engines]\ntoy = taker:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(open_engine("toy"), ToyEngine)


def test_a_cluster_serves_with_a_registered_engine(installed: None) -> None:
    """Prefill, transfer of KV and decode: an answer is the sum of all tokens, so it needs every transferred block."""
    from adder_engine import next_token

    prompt, tokens = "a prompt of more than two blocks of tokens", []
    history = list(prompt.encode())
    for _ in range(8):
        tokens.append(next_token(history))
        history.append(tokens[-1])
    with (
        Cluster(worker={"engine": "adder"}, router={"local_max_uncached_tokens": 0}) as cluster,
        Client(cluster.address) as client,
    ):
        done = client.generate(prompt, max_tokens=8)
        assert client.explain(done.request_id).decision == "remote"
    assert done.text == bytes(tokens).decode()


def test_up_rejects_an_unknown_engine_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="an installed engine: torch, toy"):
        settings.read({"model": "toy"}, None, ["worker.engine=vlm"])


def test_up_leaves_the_config_to_an_engine_that_is_not_ours(installed: None, tmp_path: Path) -> None:
    source = settings.bundled_model()
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["New"], "model_type": "new"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = settings.read({"model": str(tmp_path)}, None, ["worker.engine=adder"])
    assert asked.spec.model == str(tmp_path)
    assert "adder_engine" not in sys.modules, "the launcher needs no engine"
    with pytest.raises(ConfigError):
        settings.read({"model": str(tmp_path)}, None, [])


# --- opaque layouts -------------------------------------------------------------------------------------------

SHAPE = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "block_size": 16}


def shape(layout: str = "opaque.other.v1", **changes: object) -> KvShape:
    return KvShape(**{"layout": layout, **SHAPE, **changes})


def test_blocks_of_an_opaque_layout_move_only_between_equal_shapes() -> None:
    check_convertible(shape(), shape())
    for name, value in (("dtype", "bfloat16"), ("block_size", 8), ("tp_degree", 2)):
        with pytest.raises(ConfigError) as caught:
            check_convertible(shape(), shape(**{name: value}))
        assert caught.value.field == f"kv_shape.{name}"


@pytest.mark.parametrize("other", ["opaque.third.v1", "block-major.v1"])
def test_an_opaque_layout_is_not_converted_to_another(other: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_shape\.layout"):
        check_convertible(shape(), shape(other))


def test_an_opaque_layout_is_sent_as_it_is_stored() -> None:
    assert wire_dtype(shape(), shape(), is_quantised=True) == "float32"


@pytest.mark.parametrize("layout", ["opaque.", "opaque." + "x" * 65, "opaque.a b", "other.v1"])
def test_a_wrong_name_of_a_layout_is_rejected(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_shape\.layout"):
        shape(layout)
