"""Unmodified clients of OpenAI's API against `pdserve up --http`, offline. `make clients` makes their environments.

Answers are compared with those of our SDK, token for token where the client's own words allow it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.clients.programs import PROGRAMS, ClientLoad, run_client
from pdserve import Client
from pdserve.launch.running import Running
from tests.clients.conftest import PROGRAMS as PROGRAMS_FOLDER
from tests.clients.conftest import SETS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MESSAGES = [{"role": "user", "content": "add two numbers"}]
SEEDED: dict[str, Any] = {"max_tokens": 16, "temperature": 0.7, "seed": 5}
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}


@pytest.mark.parametrize("environment", ["openai2", "openai3"])
def test_openai_gets_the_sdks_answers(
    environment: str, run_program: Callable[..., Any], cluster: Running, model: Path
) -> None:
    found = run_program(environment, "openai_sdk.py")
    with Client(cluster.target) as sdk:
        chat = sdk.generate(MESSAGES, **SEEDED).text
        text = sdk.generate("def", **SEEDED).text
        greedy = sdk.generate(MESSAGES, **GREEDY).text
    assert found["version"].startswith(environment.removeprefix("openai") + ".")
    sync = found["sync"]
    assert sync["models"] == [model.name]
    assert (sync["chat"], sync["streamed"]) == (chat, chat)
    assert sync["usage"] == [16, 16]
    assert (sync["text"], sync["text_streamed"]) == (text, text)
    name, arguments = sync["tool"]
    assert name == "add"
    assert 0 <= arguments["a"] <= 9
    assert sync["response"] == ["response", "incomplete", greedy]  # ended by max_output_tokens
    assert sync["response_streamed"] == [greedy, "response.created", "response.incomplete"]
    assert sync["error"] == ["model_not_found", 404]
    assert sync["too_long"] == ["context_length_exceeded", 400, "messages"]
    assert found["async"] == {"chat": chat, "streamed": chat}


def test_langchain_gets_the_sdks_answers(run_program: Callable[..., Any], cluster: Running) -> None:
    found = run_program("langchain", "langchain_chat.py")
    with Client(cluster.target) as sdk:
        greedy, text = sdk.generate(MESSAGES, **GREEDY).text, sdk.generate("def", **GREEDY).text
    assert (found["chat"], found["streamed"], found["response"], found["text"]) == (greedy, greedy, greedy, text)
    assert found["tool"][0] == "add"
    assert 0 <= found["tool"][1]["a"] <= 9
    assert 0 <= found["structured"]["a"] <= 9
    assert found["too_long"] is True


def test_litellm_gets_the_sdks_answers(run_program: Callable[..., Any], cluster: Running) -> None:
    found = run_program("litellm", "litellm_chat.py")
    with Client(cluster.target) as sdk:
        greedy, text = sdk.generate(MESSAGES, **GREEDY).text, sdk.generate("def", **GREEDY).text
        long = sdk.generate(MESSAGES, **GREEDY, ignore_eos=True).text
    assert found == {
        "chat": greedy,
        "tokens": 16,
        "streamed": greedy,
        "text": text,
        "response": long,
        "too_long": True,
    }


def test_lm_eval_gets_the_loglikelihoods_of_transformers(
    need: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    """lm-evaluation-harness through `echo`, against its own HF backend in float32."""
    program = Path(__file__).parent / "programs/lm_eval_scores.py"
    sets = [word for one in (*SETS, "worker.dtype=float32") for word in ("--set", one)]
    with Running.start("--model", str(model), "--http", "0", *sets) as cluster:
        words = [str(need("lm_eval")), str(program), cluster.http_url, model.name, str(model)]
        found = json.loads(run_client(words, tmp_path).strip().splitlines()[-1])
    expected = found["hf"]
    assert {is_greedy for _, is_greedy in expected["pairs"]} == {False, True}
    for name in ("token_ids", "batched", "texts"):
        sums = [one for one, _ in found[name]["pairs"]]
        assert sums == pytest.approx([one for one, _ in expected["pairs"]], rel=0.0, abs=2e-4), name
        assert [one for _, one in found[name]["pairs"]] == [one for _, one in expected["pairs"]], name
        # transformers' sums are float32, whose step near -13,000 is 1e-3.
        assert found[name]["rolling"] == pytest.approx(expected["rolling"], rel=2.0**-23, abs=2e-4), name


SWEEPS: list[tuple[str, Literal["chat", "responses"]]] = [
    *((name, "chat") for name in PROGRAMS),
    ("aiperf", "responses"),
    ("guidellm", "responses"),
]


@pytest.mark.parametrize(("name", "api"), SWEEPS)
def test_a_benchmark_completes_every_request(
    name: str,
    api: Literal["chat", "responses"],
    need: Callable[[str], Path],
    cluster: Running,
    model: Path,
    tmp_path: Path,
) -> None:
    need(name)
    for concurrency in (1, 2):
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        load = ClientLoad(
            url=cluster.http_url.removesuffix("/v1"),
            model=model.name,
            tokenizer=model,
            concurrency=concurrency,
            requests=6,
            input_tokens=32,
            output_tokens=8,
            api=api,
        )
        found = PROGRAMS[name](load, folder)
        assert found.requests == 6
        assert found.ttft_s > 0.0
        assert found.tpot_s > 0.0


def test_schemathesis_finds_no_broken_answer(need: Callable[[str], Path], model: Path, tmp_path: Path) -> None:
    """Random requests of the OpenAPI document, also broken ones: no 5xx, and every answer is as documented."""
    python = need("schemathesis")
    sets = [word for one in (*SETS, "router.max_new_tokens=24") for word in ("--set", one)]
    with Running.start("--model", str(model), "--http", "0", *sets) as cluster:
        words = [str(python), str(PROGRAMS_FOLDER / "schemathesis_run.py"), cluster.http_url, model.name]
        found = json.loads(run_client(words, tmp_path).strip().splitlines()[-1])
    for one in found.values():
        assert one["status"] == 0, one["output"]
        assert not [name for name in one["answers"] if name.endswith("none")]
    answers = found["narrowed"]["answers"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert answers[f"POST {path} 200"] >= 5, answers
