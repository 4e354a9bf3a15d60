"""The defaults of generation_config.json apply to requests that give no value, over HTTP and gRPC alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import Served, serve

SDK: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2}
DEFAULTS = {**SDK, "max_new_tokens": 20}
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MESSAGES: Any = [{"role": "user", "content": "add two numbers"}]
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(BUNDLED, tmp_path_factory.mktemp("models") / "tuned"))
    values = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(values | DEFAULTS | {"do_sample": True}))
    return folder


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Iterator[Served]:
    with serve(model=str(folder), worker={"deterministic": "on"}, prefill=0) as served:
        yield served


def texts(served: Served, **given: Any) -> list[str]:
    """The answer's text by every way to ask."""
    extra = {name: given.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in given}
    fields: dict[str, Any] = {"model": served.model, **given, "extra_body": extra}
    chat, text = served.openai.chat.completions, served.openai.completions
    return [
        str(chat.create(messages=MESSAGES, **fields).choices[0].message.content),
        text.create(prompt=PROMPT, **fields).choices[0].text,
        served.sdk.generate(MESSAGES, **given, **extra).text,
        served.sdk.generate(PROMPT, **given, **extra).text,
    ]


def test_a_silent_request_has_the_models_defaults(tuned: Served, bundled: Served) -> None:
    silent = texts(tuned, seed=7, max_tokens=24)
    assert silent == texts(bundled, seed=7, max_tokens=24, **SDK)
    assert silent != texts(bundled, seed=7, max_tokens=24)


def test_a_request_overrides_every_default(tuned: Served, bundled: Served) -> None:
    assert texts(tuned, seed=7, max_tokens=24, **NEUTRAL) == texts(bundled, seed=7, max_tokens=24)
    one = {**SDK, "top_k": 3}
    assert texts(tuned, seed=7, max_tokens=24, top_k=3) == texts(bundled, seed=7, max_tokens=24, **one)


def test_the_default_length_is_the_models(tuned: Served) -> None:
    extra = {"ignore_eos": True}
    chat = tuned.openai.chat.completions.create(model=tuned.model, messages=MESSAGES, extra_body=extra)
    text = tuned.openai.completions.create(model=tuned.model, prompt=PROMPT, extra_body=extra)
    sdk = tuned.sdk.generate(PROMPT, ignore_eos=True)
    assert chat.usage is not None
    assert text.usage is not None
    counts = (chat.usage.completion_tokens, text.usage.completion_tokens, sdk.usage.completion_tokens)
    assert counts == (20, 16, 20)  # OpenAI's default of a text is less.
    assert tuned.sdk.generate(PROMPT, ignore_eos=True, min_tokens=30).usage.completion_tokens == 30


def test_the_model_shows_its_defaults(tuned: Served, bundled: Served) -> None:
    expected = {**SDK, "max_tokens": 20}
    assert tuned.openai.models.retrieve(tuned.model).to_dict()["sampling_defaults"] == expected
    assert [one.to_dict()["sampling_defaults"] for one in tuned.openai.models.list()] == [expected]
    assert tuned.sdk.model().sampling_defaults.given() == expected
    assert bundled.openai.models.retrieve(bundled.model).to_dict()["sampling_defaults"] == {}


def test_none_ignores_the_file(folder: Path, bundled: Served) -> None:
    plain_router = {"generation_config": "none"}
    with serve(model=str(folder), worker={"deterministic": "on"}, router=plain_router, prefill=0) as plain:
        assert texts(plain, seed=7, max_tokens=24) == texts(bundled, seed=7, max_tokens=24)
        assert plain.sdk.model().sampling_defaults.given() == {}
