"""generation_config.json gives sampling defaults, or is refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ModelError
from pdserve.core.types import Sampling, SamplingDefaults
from pdserve.text.sampling_defaults import read_sampling_defaults
from pdserve.v1 import inference_pb2
from pdserve.wire import convert


def write(folder: Path, values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


SHOWN: dict[str, Any] = {"repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
QWEN: dict[str, Any] = {**SHOWN, "do_sample": True, "eos_token_id": [5, 6]}


def test_the_authors_values_are_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    found = read_sampling_defaults(write(tmp_path, QWEN | {"max_new_tokens": 2048, "min_p": None, "num_beams": 1}))
    assert found.given() == {**SHOWN, "max_tokens": 2048}
    assert read_sampling_defaults(write(tmp_path, {"top_k": -1, "temperature": 0, "min_p": 0.1})).given() == {
        "top_k": 0,
        "temperature": 0.0,
        "min_p": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_k", float("nan")),
        ("max_new_tokens", float("inf")),
        pytest.param("temperature", 10**400, id="temperature-400 digits"),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", [5]),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--generation-config none") as caught:
        read_sampling_defaults(write(tmp_path, {name: value}))
    assert caught.value.field == f"generation_config.json: {name}"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", "[" * 5000):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config.json"):
            read_sampling_defaults(tmp_path)


def test_whole_numbers_beyond_the_wire_mean_the_largest(tmp_path: Path) -> None:
    found = read_sampling_defaults(write(tmp_path, {"top_k": 1e30, "max_new_tokens": 2**63}))
    assert (found.top_k, found.max_tokens) == (2**32 - 1, 2**32 - 1)


def test_a_request_overrides_each_default() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=7, max_tokens=9)
    silent = convert.sampling_from_proto(inference_pb2.SamplingParams(), default_max_tokens=3, defaults=defaults)
    assert silent == Sampling(temperature=0.5, top_k=7, max_tokens=3)
    message = inference_pb2.SamplingParams(temperature=0.0, top_k=0, max_tokens=2)
    assert convert.sampling_from_proto(message, defaults=defaults) == Sampling(temperature=0.0, top_k=0, max_tokens=2)
