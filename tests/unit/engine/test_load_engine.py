"""Engines are chosen by name: ours, and those that other distributions register (tests/support/installed_engine)."""

import json
import re
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.ranks.joint import rank_pairs
from pdserve.client.sync import Client
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.kv.kv_shape import KvShape, check_convertible, is_same_bytes, wire_dtype
from pdserve.core.types import FinishReason, Role, Sampling
from pdserve.engine.interface import Row
from pdserve.engine.load_engine import engine_names, load_engine
from pdserve.engine.toy import ToyEngine
from pdserve.engine.vllm import checks
from pdserve.isolated.tied_program import tied_command
from pdserve.launch import settings
from pdserve.launch.spec import processes
from pdserve.launch.supervisor import supervised
from pdserve.testing import Cluster
from pdserve.text.tokenizer import load_tokenizer

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


def test_torch_rejects_a_toy_model() -> None:
    with pytest.raises(ConfigError, match=r"engine: got '?torch"):
        open_engine("torch")


# --- the toy in place of a model ------------------------------------------------------------------------------


def changed_model(folder: Path, **config: object) -> str:
    """The bundled model without weights, and with other fields in config.json; None removes one."""
    source = settings.bundled_model()
    folder.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(source / file)
    fields = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: one for name, one in fields.items() if one is not None}))
    return str(folder)


def test_the_toy_stands_in_for_a_model_without_weights(tmp_path: Path) -> None:
    spec = open_engine("toy", changed_model(tmp_path / "my-model")).spec
    assert (spec.model, spec.vocab_size, spec.max_context_tokens) == ("my-model", 4096, 2048)
    assert (spec.eos_token_ids, spec.layout) == ((0,), "toy.v1")
    assert open_engine("toy", str(tmp_path / "my-model"), max_context_tokens=131072).spec.max_context_tokens == 131072


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"architectures": ["New"], "model_type": "new"}, (4096, 2048)),
        ({"text_config": {"vocab_size": 5000, "max_position_embeddings": 77}}, (5000, 77)),
        ({"vocab_size": None, "max_position_embeddings": None, "n_positions": 1024}, (4096, 1024)),
        ({"max_position_embeddings": None}, (4096, 8192)),
    ],
)
def test_the_toy_stands_in_for_a_model_that_no_engine_knows(
    tmp_path: Path, config: dict[str, object], facts: tuple[int, int]
) -> None:
    spec = open_engine("toy", changed_model(tmp_path / "new", **{"architectures": ["New"], **config})).spec
    assert (spec.vocab_size, spec.max_context_tokens) == facts


def test_the_toy_answers_with_words_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(settings.bundled_model()))
    prompt = tokenizer.encode("def f(x):", has_special_tokens=False)
    with (
        Cluster(
            worker={"model": str(settings.bundled_model()), "engine": "toy", "kv_blocks": 64},
            router={"model": str(settings.bundled_model()), "local_max_uncached_tokens": 0},
        ) as cluster,
        Client(cluster.address) as client,
    ):
        assert client.model().is_mock
        done = client.generate(prompt, max_tokens=40, temperature=0)
        assert done.finish_reason is FinishReason.LENGTH
        assert re.fullmatch("( [a-z]{2,}){40}", done.text)
        assert client.generate(prompt, max_tokens=40, temperature=0).text == done.text
        assert client.generate(prompt[:-1], max_tokens=40, temperature=0).text != done.text


@pytest.mark.parametrize(
    ("file", "text", "field"),
    [
        ("config.json", "", "config.json"),
        ("config.json", '{"vocab_size": 0}', "vocab_size"),
        ("config.json", '{"max_position_embeddings": "many"}', "max_position_embeddings"),
        ("tokenizer.json", "", "tokenizer.json"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"é": 0, "<s>": 1}}, "added_tokens": [{"content": "<s>"}]}',
            "tokenizer.json",
        ),
        ("tokenizer.json", '{"model": {"vocab": [[1, 0.0], ["\\u00e9"], 3]}}', "tokenizer.json"),
        ("tokenizer.json", '{"model": {"vocab": {"hello": 5000}}}', "tokenizer.json"),
    ],
)
def test_a_folder_that_the_toy_cannot_stand_in_for_is_rejected(
    tmp_path: Path, file: str, text: str, field: str
) -> None:
    model = changed_model(tmp_path / "new", architectures=["New"])
    (tmp_path / "new" / file).unlink()
    if text:
        (tmp_path / "new" / file).write_text(text)
    with pytest.raises(ModelError) as caught:
        open_engine("toy", model)
    assert caught.value.field == field


def test_a_token_adds_to_the_toys_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    engine = open_engine("toy", toy_step_s=0.5, toy_token_s=0.25)
    engine.step([Row(tokens=[1, 2, 3], start=0, blocks=[0]), Row(tokens=[4], start=0, blocks=[1])])
    assert slept == [1.5]


def test_an_unknown_engine_is_rejected_with_the_installed_ones(installed: None) -> None:
    with pytest.raises(ConfigError, match=r"auto, or an installed engine: absent, adder, .*torch, toy") as caught:
        open_engine("vlm")
    assert (caught.value.field, caught.value.seen) == ("engine", "vlm")


def test_installed_engines_are_listed(installed: None) -> None:
    assert {"adder", "torch", "toy"} <= set(engine_names())


def test_an_engine_that_is_not_installed_is_not_listed() -> None:
    assert engine_names() == ["torch", "toy", "vllm"]


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
        ("in-runs", "engine.runs_per_block", "got 2, expected 1: one, or one for each layer"),
        ("scaled-in-layers", "engine.runs_per_block", "got 2, expected 1: .* if blocks have no scales"),
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


@pytest.mark.parametrize("engine", ["adder", "layered"])
def test_a_cluster_serves_with_a_registered_engine(installed: None, engine: str) -> None:
    """Prefill, transfer of KV and decode: an answer is the sum of all tokens, so it needs every transferred block.

    `layered` stores a block in one run per layer on prefill workers, and in one run on decode workers.
    """
    from adder_engine import next_token

    prompt, tokens = "a prompt of more than two blocks of tokens", []
    history = list(prompt.encode())
    for _ in range(8):
        tokens.append(next_token(history))
        history.append(tokens[-1])
    with (
        Cluster(worker={"engine": engine}, router={"local_max_uncached_tokens": 0}) as cluster,
        Client(cluster.address) as client,
    ):
        done = client.generate(prompt, max_tokens=8)
        assert client.explain(done.request_id).decision == "remote"
    assert done.text == bytes(tokens).decode()


def test_up_rejects_an_unknown_engine_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="an installed engine: torch, toy"):
        settings.read({"model": "toy"}, None, ["worker.engine=vlm"])


@pytest.fixture
def new_family(tmp_path: Path) -> str:
    """The folder of a model of an architecture that we do not serve."""
    source = settings.bundled_model()
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["New"], "model_type": "new"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_up_leaves_the_config_to_an_engine_that_is_not_ours(installed: None, new_family: str) -> None:
    asked = settings.read({"model": new_family}, None, ["worker.engine=adder"])
    assert asked.spec.model == new_family
    assert "adder_engine" not in sys.modules, "the launcher needs no engine"
    with pytest.raises(ConfigError):
        settings.read({"model": new_family, "engine": "own"}, None, [])


# --- vLLM's workers have a Python of their own ----------------------------------------------------------------


def worker_table(flags: dict[str, str], *words: str) -> dict[str, object]:
    return dict(settings.read(flags, None, words).spec.settings["worker"])


def test_auto_takes_vllm_for_a_model_that_we_do_not_serve(new_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_python", lambda: "/env/bin/python")
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    assert worker_table({"model": new_family}) == {"engine": "vllm", "engine_python": "/env/bin/python"}
    assert "engine" not in settings.read({"model": "stdlib-5m"}, None, []).spec.settings.get("worker", {})


def test_without_vllm_a_model_that_we_do_not_serve_is_rejected(
    new_family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "vllm_python", lambda: None)
    for flags in ({}, {"engine": "vllm"}):
        with pytest.raises(ConfigError, match="make vllm-env"):
            settings.read({"model": new_family, **flags}, None, [])


@pytest.mark.parametrize(
    "form", [{"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}]
)
def test_auto_takes_vllm_for_a_form_of_weights_that_we_do_not_serve(
    form: dict[str, object], new_family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json.loads((settings.bundled_model() / "config.json").read_text())
    (Path(new_family) / "config.json").write_text(json.dumps(source | {"quantization_config": form}))
    monkeypatch.setattr(settings, "vllm_python", lambda: "/env/bin/python")
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    assert worker_table({"model": new_family})["engine"] == "vllm"
    monkeypatch.setattr(settings, "vllm_python", lambda: None)
    for flags in ({}, {"engine": "own"}):
        with pytest.raises(ModelError, match="quantization_config") as caught:
            settings.read({"model": new_family, **flags}, None, [])
        assert ("make vllm-env" in str(caught.value)) == (not flags)


def test_vllm_in_our_own_environment_needs_no_other_python(new_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_python", lambda: sys.executable)
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    assert worker_table({"model": new_family, "engine": "vllm"}) == {"engine": "vllm"}


@pytest.mark.parametrize("word", ["worker.lora=a=/adapters/a,b=/adapters/b", "decode_worker.lora_folders=/adapters"])
def test_auto_takes_vllm_for_adapters(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_python", lambda: "/env/bin/python")
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    assert worker_table({"model": "stdlib-5m"}, word)["engine"] == "vllm"
    for engine in ("own", "torch"):
        with pytest.raises(ConfigError, match="engine vllm: our own engine") as caught:
            settings.read({"model": "stdlib-5m", "engine": engine}, None, [word])
        assert caught.value.field == word.partition("=")[0]
    monkeypatch.setattr(settings, "vllm_python", lambda: None)
    with pytest.raises(ConfigError, match="make vllm-env"):
        settings.read({"model": "stdlib-5m"}, None, [word])


def test_our_engine_rejects_adapters_before_it_reads_weights(tmp_path: Path) -> None:
    for setting in ("lora", "lora_folders"):
        config = WorkerConfig(model=str(tmp_path), worker_id="worker", engine="torch", **{setting: ("a=/a",)})
        with pytest.raises(ConfigError, match=f"{setting}: got a=/a, expected engine vllm"):
            load_engine(config, Role.DECODE)


def test_one_role_may_run_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_python", lambda: "/env/bin/python")
    monkeypatch.setattr(settings, "check_python", lambda field, python, *, is_for_vllm: None)
    tables = settings.read({"model": "stdlib-5m"}, None, ["decode_worker.engine=vllm"]).spec.settings
    assert dict(tables["decode_worker"]) == {"engine": "vllm", "engine_python": "/env/bin/python"}
    assert "worker" not in tables


def test_an_absent_python_is_rejected_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="the python of an environment with pdserve") as caught:
        settings.read({"model": "toy"}, None, ["worker.engine_python=/no/python"])
    assert caught.value.field == "worker.engine_python"


def test_a_worker_runs_with_the_python_of_its_engine() -> None:
    asked = settings.read({"model": "toy"}, None, [f"decode_worker.engine_python={sys.executable}"])
    pythons = {one.name: supervised(one).python for one in processes(asked.spec)}
    assert pythons == {"p0": "", "d0": sys.executable, "router": ""}
    assert tied_command("decode_worker", "--port", "1", python="/env/bin/python")[0] == "/env/bin/python"
    assert tied_command("decode_worker")[0] == sys.executable


def test_vllm_rejects_a_toy_and_an_environment_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no weights"):
        open_engine("vllm")
    monkeypatch.setattr(checks, "version", lambda package: absent(package))
    with pytest.raises(ConfigError, match=r"vllm, which is not installed.*make vllm-env"):
        open_engine("vllm", "stdlib-5m")


def absent(package: str) -> str:
    raise PackageNotFoundError(package)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "1.0", "0.x"])
def test_another_version_of_vllm_is_rejected(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(checks, "version", lambda package: found)
    with pytest.raises(ConfigError, match=r">=0\.32,<0\.33"):
        open_engine("vllm", "stdlib-5m")


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "int8"), ("dtype", "int4"), ("kv_dtype", "int8"), ("deterministic", "on")],
)
def test_settings_of_our_own_engine_are_rejected_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(checks, "version", lambda package: "0.32.1+cu130")
    with pytest.raises(ConfigError) as caught:
        open_engine("vllm", "stdlib-5m", **{name: value})
    assert caught.value.field == name


def test_what_vllm_needs_of_the_host_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs and libraries that no Python package brings, and that slim images lack."""
    for name in ("lscpu", "g++"):
        (tmp_path / name).touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(checks, "_NUMA", "libc.so.6")
    config = WorkerConfig(model="model", worker_id="worker", engine="vllm")
    checks.check_host(config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"cuda_graphs: .*not found as no-such-compiler; or false"):
        checks.check_host(config)
    checks.check_host(replace(config, cuda_graphs=False))
    monkeypatch.setattr(checks, "_NUMA", "libnothing.so.1")
    with pytest.raises(ConfigError, match=r"without the library libnothing\.so\.1"):
        checks.check_host(config)
    (tmp_path / "lscpu").unlink()
    with pytest.raises(ConfigError, match="util-linux"):
        checks.check_host(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"local_ranks": 1, "rendezvous": "127.0.0.1:7000"}, "rendezvous: got 127.0.0.1:7000, expected none"),
        ({"lora": ("a=/b",)}, "tensor_parallel: got 2, expected 1 with LoRA adapters"),
    ],
)
def test_what_ranks_of_vllm_cannot_do_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    config = WorkerConfig(model="model", worker_id="worker", engine="vllm", tensor_parallel=2)
    checks.check_settings(config)
    with pytest.raises(ConfigError) as caught:
        checks.check_settings(replace(config, **changes))
    assert str(caught.value).startswith(expected)


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


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_ranks_exchange_opaque_blocks_with_the_rank_of_their_number(num_kv_heads: int) -> None:
    """Also if several ranks store a head: what else is in their blocks is unknown."""
    one = shape(num_kv_heads=num_kv_heads, tp_degree=4)
    assert rank_pairs(one, one) == [(rank, rank) for rank in range(4)]
    assert all(is_same_bytes(replace(one, tp_rank=rank), replace(one, tp_rank=rank)) for rank in range(4))


@pytest.mark.parametrize("other", ["opaque.third.v1", "block-major.v1"])
def test_an_opaque_layout_is_not_converted_to_another(other: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_shape\.layout"):
        check_convertible(shape(), shape(other))


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_only_an_opaque_layout_has_the_dtypes_of_other_engines(dtype: str) -> None:
    assert wire_dtype(shape(dtype=dtype), shape(dtype=dtype)) == dtype
    with pytest.raises(ConfigError, match="the dtypes of block-major"):
        shape("block-major.v1", dtype=dtype)


def test_an_opaque_layout_is_sent_as_it_is_stored() -> None:
    assert wire_dtype(shape(), shape(), is_quantised=True) == "float32"


@pytest.mark.parametrize("layout", ["opaque.", "opaque." + "x" * 65, "opaque.a b", "other.v1"])
def test_a_wrong_name_of_a_layout_is_rejected(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_shape\.layout"):
        shape(layout)
