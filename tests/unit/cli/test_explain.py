"""`pdserve explain` against a real cluster, and its output for hand-made values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pdserve import Client
from pdserve.cli.explain import render
from pdserve.cli.main import main
from pdserve.client.results import ExplainedCandidate, ExplainedPull, ExplainedReads, Explanation
from router.policy.candidates import WORTH_WAITING
from router.state.interface import RouterSettings

PROMPT = "a prompt that is longer than what a decode worker reads itself, and of its own kind"

EXPLANATION = Explanation(
    request_id="r1",
    router_id="router-0",
    decision="remote",
    reason="least predicted TTFT",
    candidates=(
        ExplainedCandidate(
            prefill_worker="p0",
            decode_worker="d0",
            predicted_ttft_s=0.3,
            predicted_tpot_s=0.02,
            slack=0.75,
            is_feasible=True,
            is_chosen=True,
            cost=0.0264,
            preference=0.0,
        ),
        ExplainedCandidate(
            prefill_worker="",
            decode_worker="d0",
            predicted_ttft_s=0.9,
            predicted_tpot_s=0.02,
            slack=-0.25,
            is_feasible=False,
            is_chosen=False,
            cost=0.051,
            preference=0.03,
        ),
    ),
    waited_s=0.1,
    slo_ttft_s=2.0,
    slo_tpot_s=0.2,
    tenant="",
    priority=0,
    prompt_tokens=83,
    attempt=1,
    is_resumed=False,
    stage="",
    outcome="served",
    ended_because="",
    actual_ttft_s=0.5,
    actual_tpot_s=0.025,
    retry_after_s=None,
)


def served(target: str, request_id: str) -> str:
    with Client(target) as client:
        return client.generate(PROMPT, max_tokens=6, temperature=0, request_id=request_id).request_id


def test_explain_shows_predicted_and_actual_times(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = served(target, "explained-1")
    assert main(["explain", name, "--target", target]) == 0
    out = capsys.readouterr().out
    assert out.startswith("explained-1: ")
    assert "served" in out.splitlines()[0] or "late" in out.splitlines()[0]
    assert "->" in out
    assert "ACTUAL" in out


def test_json_is_one_object_with_predictions_beside_actual_times(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = served(target, "explained-2")
    assert main(["explain", name, "--target", target, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["request_id"] == name
    assert seen["decision"] in ("remote", "local")
    assert [one["decode_worker"] for one in seen["candidates"] if one["is_chosen"]] == ["decode-0"]
    for field in ("predicted_ttft_s", "actual_ttft_s", "predicted_tpot_s", "actual_tpot_s"):
        assert 0.0 < seen[field] < 60.0, field


def test_an_unknown_id_is_a_typed_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "never-heard-of", "--target", target]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve explain: error: no recent request named 'never-heard-of'; a router knows its last ")
    assert "`pdserve generate --stats`" in line
    assert "x-request-id" in line
    assert f"{RouterSettings().explain_capacity:,}" in line


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-", "resp_"])
def test_the_id_of_an_answer_over_http_is_known(target: str, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = served(target, f"{prefix}explained")  # a caller's own id may begin like that
    for asked in (prefix + name, name):
        assert main(["explain", asked, "--target", target]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ")


def test_the_router_that_knows_the_request_answers(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = served(target, "explained-3")
    nobody = "127.0.0.1:9"
    assert main(["explain", name, "--target", f"{nobody},{target}", "--json", "--timeout", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["router_id"] == "router-0"


def test_an_id_is_unknown_only_if_every_router_answered(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "never", "--target", f"{target},127.0.0.1:9", "--timeout", "2"]) == 1
    assert "no recent request" not in capsys.readouterr().err


def test_an_empty_list_of_routers_is_an_error_that_names_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a", "--target", ","]) == 1
    assert "target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "request: got nothing"),
        (["r1", "--last", "3"], "request: got a request with --last"),
        (["r1", "--scaling"], "scaling: got r1"),
        (["--scaling", "--plot", "a.svg"], "scaling: got --plot"),
        (["--scaling", "--last", "0"], "last: got 0"),
        (["--scaling", "--last", "201"], "last: got 201"),
    ],
)
def test_a_request_or_the_number_of_workers_is_explained(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words, "--target", "127.0.0.1:9"]) == 1
    assert f"error: {field}" in capsys.readouterr().err


def test_a_router_without_a_launcher_explains_no_number_of_workers(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--scaling", "--target", target, "--timeout", "2"]) == 1
    assert "error: this router has no launcher" in capsys.readouterr().err


def test_predicted_and_actual_times_count_from_arrival() -> None:
    assert EXPLANATION.predicted_ttft_s == pytest.approx(0.4)
    lines = render(EXPLANATION).splitlines()
    assert lines[0] == "r1: remote, served"
    table = {line.split()[0]: line.split() for line in lines if line[:4] in ("TTFT", "TPOT") and " ms " in line}
    assert table["TTFT"][1:] == ["2,000.0", "ms", "400.0", "ms", "500.0", "ms", "-20%"]
    assert table["TPOT"][1:] == ["200.0", "ms", "20.0", "ms", "25.0", "ms", "-20%"]
    assert [line.split()[:3] for line in lines if "d0" in line] == [["->", "p0", "d0"], ["(itself)", "d0", "900.0"]]
    assert [line.split()[-3:] for line in lines if "d0" in line] == [
        ["2.6%", "+0.0%", "2.6%"],
        ["2.1%", "+3.0%", "5.1%"],
    ]
    notes = lines[lines.index("", lines.index(next(line for line in lines if "KEEPS TPOT" in line))) + 1 :]
    names = [line[:12].rstrip() for line in notes if not line.startswith(" ")]
    assert names == ["TTFT", "SLACK", "KEEPS TPOT", "LOST", "PREFERENCE", "COST"]
    assert "wait before" in notes[0], "the reason why the two predictions differ"
    assert lines[-1].endswith(f"costs over {100 * WORTH_WAITING:g} points less"), "the policy's own number"


def test_costs_of_other_routers_and_policies_are_shown_as_far_as_known() -> None:
    chosen, other = EXPLANATION.candidates
    older = dataclasses.replace(chosen, preference=None)
    plain = dataclasses.replace(other, cost=None, preference=None)
    lines = render(dataclasses.replace(EXPLANATION, candidates=(older, plain))).splitlines()
    assert [line.split()[-3:] for line in lines if "d0" in line] == [["-", "-", "2.6%"], ["-", "-", "-"]]
    lines = render(dataclasses.replace(EXPLANATION, candidates=(plain,))).splitlines()
    assert lines[-1].startswith("KEEPS TPOT"), "no words about costs"


def test_a_resumed_request_has_no_predicted_ttft() -> None:
    resumed = dataclasses.replace(EXPLANATION, is_resumed=True, attempt=2)
    assert resumed.predicted_ttft_s is None
    assert "attempt 2, resumed" in render(resumed)


def test_a_rejection_shows_reason_and_retry_time() -> None:
    rejected = dataclasses.replace(
        EXPLANATION, decision="reject", outcome="rejected", ended_because="full", retry_after_s=1.5, attempt=0
    )
    text = render(rejected)
    assert text.startswith("r1: reject, rejected (full)")
    assert "retry after 1.50 s" in text


def test_pulling_and_computing_are_compared() -> None:
    pull = ExplainedPull(source="d0", num_tokens=4096, pull_s=0.24, recompute_s=1.9, is_pulled=True)
    remote, local = EXPLANATION.candidates
    slow = dataclasses.replace(pull, source="p0", pull_s=2.5, is_pulled=False)
    candidates = (dataclasses.replace(remote, pull=pull), dataclasses.replace(local, pull=slow))
    lines = render(dataclasses.replace(EXPLANATION, candidates=candidates)).splitlines()
    assert "p0 lacks 4,096 cached tokens: recompute 1,900.0 ms, pull from d0 240.0 ms -> pull" in lines
    assert "d0 lacks 4,096 cached tokens: recompute 1,900.0 ms, pull from p0 2,500.0 ms -> recompute" in lines


def test_reads_of_tiers_are_shown() -> None:
    remote, local = EXPLANATION.candidates
    reads = ExplainedReads(num_tokens=4096, read_s=0.24, recompute_s=1.9)
    pull = ExplainedPull(
        source="d0", num_tokens=4096, pull_s=0.25, recompute_s=1.9, is_pulled=True, source_read_s=0.125
    )
    candidates = (dataclasses.replace(remote, pull=pull), dataclasses.replace(local, reads=reads))
    lines = render(dataclasses.replace(EXPLANATION, candidates=candidates)).splitlines()
    assert "d0 has 4,096 tokens below its pool: recompute 1,900.0 ms, read 240.0 ms" in lines
    pulled = "recompute 1,900.0 ms, pull from d0 250.0 ms (of it 125.0 ms to read its tiers) -> pull"
    assert f"p0 lacks 4,096 cached tokens: {pulled}" in lines
