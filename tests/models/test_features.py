"""What lies above the engine, once, with workers that run vLLM: options of requests, HTTP, drain, explanations, the
live view, and a recording that is replayed and simulated.

The tests of sampling options are those of our own engine. Transports, preemption and killed workers are in
test_architectures.py and test_cluster.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from pdserve import Client
from pdserve.cli.main import main
from pdserve.client.retries import Retries
from pdserve.core.errors import NoWorkers
from pdserve.core.progress import PhaseProgress
from pdserve.progress import PhaseReport
from tests.cluster.cluster import Cluster, free_ports
from tests.cluster.families import BUNDLED
from tests.cluster.suite import generate_all
from tests.cluster.test_options import (
    ITEM,
    LONG,
    PROMPT,
    SHORT,
    test_bans_bias_and_penalties_match_transformers,
    test_beams_match_transformers,
    test_each_kind_of_structured_output_works,
    test_prompt_logprobs_match_transformers,
    test_several_answers_follow_from_their_seeds,
)
from tests.models.conftest import open_vllm
from tests.models.fork_server import forking_python
from tests.oracle import Oracle

__all__ = [  # collected here with the cluster of this file
    "test_bans_bias_and_penalties_match_transformers",
    "test_beams_match_transformers",
    "test_each_kind_of_structured_output_works",
    "test_prompt_logprobs_match_transformers",
    "test_several_answers_follow_from_their_seeds",
]
pytestmark = pytest.mark.timeout(900)

REPEATED = "a = 1\nb = 2\n" * 12


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "vllm.rec"


@pytest.fixture(scope="module")
def metrics() -> int:
    """The first of the workers' metrics ports."""
    return free_ports(2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, record: Path, metrics: int) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("cluster") / "vllm.toml"
    with forking_python(tmp_path_factory.mktemp("forks")) as python:
        config.write_text(
            f'[worker]\nengine = "vllm"\nengine_python = "{python}"\ndtype = "float32"\ncuda_graphs = false\n'
            'kv_blocks = 300\nthreads = 1\nmax_batch_tokens = 96\nspeculation = "ngram"\n'
            f"metrics_port = {metrics}\n"
        )
        flags = ("--model", str(BUNDLED), "--config", str(config), "--http", "0", "--record", str(record))
        with Cluster(*flags, start_s=600.0) as opened:
            yield opened


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(BUNDLED)


# --- the cluster ----------------------------------------------------------------------------------------------


def test_drafts_are_accepted_and_do_not_change_an_answer(cluster: Cluster, oracle: Oracle, metrics: int) -> None:
    ids = cluster.client.tokenize(REPEATED)
    done = cluster.client.generate(ids, max_tokens=60, temperature=0, ignore_eos=True)
    oracle.assert_exact([ids], [done.token_ids])
    page = httpx.get(f"http://127.0.0.1:{metrics + 1}/metrics").text  # of d0
    [accepted] = re.findall(r'^pdserve_draft_tokens_total{.*outcome="accepted".*} (.+)$', page, re.MULTILINE)
    assert float(accepted) > 0


def test_a_long_prompt_is_computed_in_chunks_and_transferred(cluster: Cluster, oracle: Oracle) -> None:
    ids = cluster.client.tokenize(LONG * 3)  # several times max_batch_tokens
    done = cluster.client.generate(ids, max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
    oracle.assert_exact([ids], [done.token_ids])
    assert done.timings.path == "remote"
    shown = cluster.client.explain(done.request_id)
    assert shown.decision == "remote"
    assert shown.chosen is not None
    assert (shown.chosen.prefill_worker, shown.chosen.decode_worker) == ("p0", "d0")
    again = cluster.client.generate(ids, max_tokens=16, temperature=0, ignore_eos=True)
    assert again.usage.cached_prompt_tokens > 0
    assert again.token_ids == done.token_ids


def test_http_serves_chats_tools_and_streams(cluster: Cluster) -> None:
    url = cluster.running.http_url
    with httpx.Client(timeout=120) as http:

        def post(path: str, **body: Any) -> dict[str, Any]:
            answer = http.post(f"{url}/{path}", json={"temperature": 0} | body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        messages = [{"role": "user", "content": "x"}]
        tool = {"type": "function", "function": {"name": "show", "parameters": ITEM}}
        called = post("chat/completions", messages=messages, tools=[tool], tool_choice="required", max_tokens=200)
        [call, *_] = called["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "show"
        two = post("completions", prompt=SHORT, max_tokens=8, n=2, logprobs=2, echo=True, temperature=0.9, seed=3)
        assert [one["index"] for one in two["choices"]] == [0, 1]
        assert all(one["text"].startswith(SHORT) for one in two["choices"])
        assert len(two["choices"][0]["logprobs"]["tokens"]) > 8
        plain = post("completions", prompt=SHORT, max_tokens=8)["choices"][0]["text"]
        body = {"prompt": SHORT, "max_tokens": 8, "temperature": 0, "stream": True}
        with http.stream("POST", f"{url}/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == plain
        assert post("responses", input="x", max_output_tokens=4)["usage"]["output_tokens"] == 4
        assert "<!doctype html>" in http.get(url.removesuffix("/v1") + "/ui").text


def test_a_drained_worker_gets_no_request_until_it_is_undrained(cluster: Cluster) -> None:
    with Client(cluster.target, retries=Retries(limit=0)) as client:
        client.drain("d0")
        with pytest.raises(NoWorkers, match="1 drained"):
            client.generate(SHORT, max_tokens=2)
        client.undrain("d0")
        assert client.generate(SHORT, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_the_live_view_shows_workers_and_requests(cluster: Cluster) -> None:
    done = generate_all(cluster, [PROMPT] * 3, max_tokens=8, temperature=0)
    frames = cluster.client.watch(0.1)
    first = next(frames)
    frames.close()
    assert sorted(one.worker_id for one in first.workers) == ["d0", "p0"]
    assert {one.request_id for one in done} <= {one.request_id for one in first.requests}


def test_the_recording_replays_and_is_simulated_with_measured_costs(
    cluster: Cluster, record: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The last test with the cluster."""
    cluster.wait_until_idle(60)
    costs = [json.loads(line)["event"].get("cost") for line in record.read_text().splitlines()[1:]]
    measured = [one for one in costs if one]
    assert len(measured) >= 2
    for cost in measured:
        assert 0 < cost["prefill_base_s"] + cost["prefill_per_token_s"] < 1
    assert any(0 < cost["decode_base_s"] + cost["decode_per_row_s"] < 1 for cost in measured)
    copy = tmp_path / "copy.rec"
    copy.write_text("".join(f"{line}\n" for line in record.read_text().splitlines()))
    assert main(["replay", str(copy)]) == 0
    assert "the router decided the same in all" in capsys.readouterr().out
    assert main(["simulate", "--trace", str(copy), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated


# --- one engine -----------------------------------------------------------------------------------------------


def test_the_phases_of_a_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PhaseProgress] = []
    monkeypatch.setattr(PhaseReport, "listener", told.append)
    open_vllm(BUNDLED).close()
    assert list(dict.fromkeys(one.phase for one in told)) == ["vllm", "weights", "kernels"]
    weights = [one for one in told if one.phase == "weights"]
    size = os.path.getsize(BUNDLED / "model.safetensors")
    assert 0.9 * size < weights[-1].total <= size
    assert [one.done for one in weights] == sorted(one.done for one in weights)
    assert (weights[0].done, weights[-1].done) == (0, weights[-1].total)
    assert len(weights) > 10
