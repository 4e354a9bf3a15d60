"""Which folders a running cluster may be rolled out to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, InvalidRequest, ModelError, PdserveError
from pdserve.launch.changes.weights import check_weights, folder_of, with_revision
from pdserve.launch.settings import bundled_model
from pdserve.launch.spec import ClusterSpec, Process


def spec(model: str | Path, **changes: Any) -> ClusterSpec:
    return ClusterSpec(model=str(model), **changes)


def workers(**settings: Any) -> list[Process]:
    config = WorkerConfig(model="unused", worker_id="d0", **settings)
    return [Process(name="d0", module="decode_worker", config=config)]


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the bundled model, whose weights are a link."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in bundled_model().iterdir():
            if file.suffix == ".safetensors":
                (folder / file.name).symlink_to(file)
            elif file.is_file():
                shutil.copy(file, folder)
        return folder

    return make


def change(file: Path, **values: object) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, **values}))


def test_a_revision_has_the_name_of_its_folder() -> None:
    first = spec("/models/llama")
    second, overlay = with_revision(first, {"worker": {"max_batch": 8}}, "/models/llama v2")
    assert overlay == {"worker": {"max_batch": 8, "revision": "llama-v2"}}
    assert second.revisions == {"llama-v2": "/models/llama v2"}
    assert with_revision(second, overlay, "/models/llama v2") == (second, overlay), "the same folder, the same name"
    third, overlay = with_revision(second, overlay, "/snapshots/llama")
    assert overlay["worker"]["revision"] == "snapshots-llama"
    assert with_revision(third, overlay, "/models/llama") == (third, {"worker": {"max_batch": 8}})
    assert with_revision(third, {"worker": {"revision": "llama-v2"}}, "/models/llama")[1] == {}
    with pytest.raises(ConfigError, match="another name than"):
        with_revision(third, {}, "/other/snapshots/llama")


@pytest.mark.parametrize("model", ["", "relative", "org/name", "/a\0b", "/" + "a" * 5000])
def test_a_folder_is_an_absolute_path(model: str) -> None:
    with pytest.raises(InvalidRequest, match="absolute path"):
        folder_of(model)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="away"):
        folder_of(str(tmp_path / "away"))


def test_the_same_texts_and_other_weights_are_accepted(copy: Callable[..., Path]) -> None:
    served, wanted = copy("served"), copy("wanted")
    change(wanted / "tokenizer_config.json", model_max_length=7, name_or_path="elsewhere")
    check_weights(spec(served), str(wanted), workers())


def test_what_routers_read_must_be_the_same(copy: Callable[..., Path]) -> None:
    served = copy("served")
    for number, (file, value, name) in enumerate(
        (
            ("tokenizer.json", {"truncation": {"max_length": 5}}, "tokenizer.json"),
            ("tokenizer_config.json", {"eos_token": "<another>"}, "tokenizer_config.json: eos_token"),
            ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "chat_template"),
            ("generation_config.json", {"temperature": 0.125}, "generation_config.json"),
            ("generation_config.json", {"eos_token_id": 5}, "eos_token_id"),
            ("config.json", {"vocab_size": 77}, "vocab_size"),
        )
    ):
        wanted = copy(f"wanted{number}")
        change(wanted / file, **value)
        with pytest.raises(ModelError) as error:
            check_weights(spec(served), str(wanted), workers())
        assert error.value.field == name
        assert "start a second cluster" in error.value.message
    change(served / "generation_config.json", temperature=0.5)
    settings: Any = {"router": {"generation_config": "none"}}
    check_weights(spec(served, settings=settings), str(copy("last")), workers())


def test_what_the_engine_refuses_is_an_error_before(copy: Callable[..., Path]) -> None:
    served, wanted = copy("served"), copy("wanted")
    change(wanted / "config.json", architectures=["NobodyKnowsThis"])
    check_weights(spec(served), str(wanted), workers(engine="vllm"))
    with pytest.raises(ModelError, match="NobodyKnowsThis"):
        check_weights(spec(served), str(wanted), workers())
    other = copy("other")
    for file in other.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        check_weights(spec(served), str(other), workers())
    for settings in ({"load": "dummy"}, {"engine": "toy"}):
        check_weights(spec(served), str(other), workers(**settings))


def test_adapters_belong_to_the_weights(copy: Callable[..., Path]) -> None:
    for settings in ({"lora": ("sql=/loras/sql",)}, {"lora_folders": ("/loras",)}):
        with pytest.raises(ConfigError, match="LoRA"):
            check_weights(spec(copy(f"served{len(settings)}{next(iter(settings))}")), "/x", workers(**settings))


def test_a_toy_stands_for_other_weights_of_a_toy_only(copy: Callable[..., Path]) -> None:
    check_weights(spec("toy"), "toy-other", workers())
    served = copy("served")
    for model, wanted in (("toy", str(served)), (str(served), "toy")):
        with pytest.raises(PdserveError, match="a tokenizer"):
            check_weights(spec(model), wanted, workers())
