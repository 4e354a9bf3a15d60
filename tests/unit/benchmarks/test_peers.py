"""The comparison with other routers: its client, its tables, and a short run of our own part."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.client import Connections, LoadResult, Outcome, chat_request, prompts, summary
from benchmarks.peers.report import Row, bars, held, markdown, overload, quietness, ratios, row_of
from benchmarks.peers.systems import PACKAGES, install_commands
from pdserve.core.json_text import to_json
from pdserve.launch.settings import bundled_model
from pdserve.text.tokenizer import load_tokenizer


def row(system: str, repetition: int = 1, rate_rps: float = 100.0, *, cpu_ms: float = 4.0, **more: object) -> Row:
    result = {
        "sent": 100,
        "outcomes": {"served": 100},
        "ttft_s": (0.01, 0.02, 0.03),
        "whole_s": (0.1, 0.2),
        "rejected_s": 0.0,
        "late_s": 0.0,
        "wall_s": 1.0,
        "client_cpu_s": 0.0,
    }
    return Row(
        system=system,
        repetition=repetition,
        workload="w1",
        rate_rps=rate_rps,
        seconds=1.0,
        result=LoadResult(**{**result, **more}),  # type: ignore[arg-type]
        routing_cpu_s={"router": cpu_ms / 2e3, "redis": cpu_ms / 2e3},
        engine_cpu_s={"p0": 0.001},
        foreign_cores=0.05,
    )


@pytest.mark.parametrize(("workload", "low", "high"), [("w1", 190, 230), ("w2", 3900, 4100), ("w3", 29_000, 31_000)])
def test_prompts_have_the_tokens_that_the_page_says(workload: str, low: int, high: int) -> None:
    tokenizer = load_tokenizer(str(bundled_model()))
    made = prompts(workload, 18, "1 25")
    assert all(low <= len(tokenizer.encode(one)) <= high for one in made[:2])
    assert len(set(made)) == 18
    assert made == prompts(workload, 18, "1 25")
    assert not set(made) & set(prompts(workload, 18, "2 25"))


def test_eight_prompts_of_w2_share_a_start_and_alternate() -> None:
    starts = [one[:10_000] for one in prompts("w2", 32, "1")]
    assert starts[0:16:2] == [starts[0]] * 8
    assert starts[1:16:2] == [starts[1]] * 8
    assert len(set(starts)) == 4


def test_a_load_is_summed_up_by_kind() -> None:
    outcomes = [Outcome("served", at / 100, at / 10) for at in range(1, 101)]
    outcomes += [Outcome("429", 0.0, 0.01), Outcome("503", 0.0, 0.03), Outcome("503", 0.0, 0.02)]
    found = summary([*outcomes, Outcome("timeout", 0.0, 30.0)], late_s=0.0, wall_s=1.0, cpu_s=0.52)
    assert found.outcomes == {"served": 100, "429": 1, "503": 2, "timeout": 1}
    assert (found.sent, found.ttft_s, found.whole_s) == (104, (0.5, 0.95, 0.99), (5.0, 9.5))
    assert (found.rejected_s, found.client_cpu_s) == (0.02, 0.005)
    assert math.isnan(summary([], late_s=0.0, wall_s=1.0, cpu_s=0.0).ttft_s[0])


def test_ratios_are_within_a_repetition() -> None:
    rows = [row("pdserve", 1, cpu_ms=6.0), row("dynamo", 1, cpu_ms=4.0), row("pdserve", 2, cpu_ms=3.0), row("smg", 2)]
    assert ratios(rows, "pdserve", "dynamo", ("w1", 100.0), lambda one: one.cpu_s) == [1.5]
    assert "| pdserve | W1 100/s | CPU over Dynamo's | 1 | 1.50 | **missed** |" in bars(rows)
    assert "| pdserve | W1 100/s | TTFT p95 over smg's | 4 | 1.00 | met |" in bars(rows)


def test_a_figure_over_fewer_requests_meets_no_bar() -> None:
    rows = [row("pdserve", cpu_ms=1.0, outcomes={"served": 60, "429": 40}), row("dynamo")]
    assert "| pdserve | W1 100/s | CPU over Dynamo's | 1 | 0.25 | **not all served** |" in bars(rows)


@pytest.mark.parametrize(
    ("outcomes", "rejected_s", "verdict"),
    [
        ({"served": 96, "429": 200}, 0.01, "met"),
        ({"served": 94, "429": 202}, 0.01, "**missed**"),
        ({"served": 96, "429": 200}, 0.03, "**missed**"),
        ({"served": 96, "429": 199, "timeout": 1}, 0.01, "**missed**"),
    ],
)
def test_overload_is_judged_by_what_was_held_before(outcomes: dict[str, int], rejected_s: float, verdict: str) -> None:
    top = row("pdserve", rate_rps=400.0, sent=296, outcomes=outcomes, rejected_s=rejected_s)
    rows = [row("pdserve"), row("pdserve", rate_rps=50.0, sent=50, outcomes={"served": 50}), top]
    assert held(rows, "pdserve", 1) == 100.0
    assert overload(rows).splitlines()[-1].endswith(f"| 100 | {verdict} |")


def test_a_report_is_the_same_from_its_file() -> None:
    rows = [row("pdserve"), row("dynamo"), row("smg", ttft_s=(math.nan,) * 3)]
    conditions = {"date": "today", "version": "1.2", "cores": 2, "python": "3.11", "seconds": 20.0}
    text = markdown(conditions, rows)
    assert markdown(conditions, [row_of(json.loads(to_json(one))) for one in rows]) == text
    assert "| pdserve | redis 2.0, router 2.0 |" in text
    assert quietness(rows).startswith("The machine was quiet")


def test_missing_peers_get_commands_that_install_them(tmp_path: Path) -> None:
    found = install_commands(tmp_path, ("pdserve", *PACKAGES, "direct"))
    assert [one.split()[-1] for one in found if " -m venv " in one] == [str(tmp_path / one) for one in PACKAGES]
    assert f"{tmp_path}/smg/bin/pip install smg==1.13.0 smg-grpc-proto==0.4.28 uvloop" in found
    (tmp_path / "smg" / "bin").mkdir(parents=True)
    (tmp_path / "smg" / "bin" / "python").touch()
    assert install_commands(tmp_path, ("smg",)) == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'200 OK\r\ncontent-length: 41\r\n\r\ndata: {"content":"a"}\n\ndata: [DONE]\n\n    ', "served"),
        (b"429 Too Many\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}", "429"),
        (b"200 OK\r\ncontent-length: 14\r\n\r\ndata: [DONE]\n\n", "cut"),
        (b"200 OK\r\ntransfer-encoding: chunked\r\n\r\n15\r\n" + b'data: {"content":"a"}\r\n0\r\n\r\n', "cut"),
        (b"503 Busy\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}", "503"),  # before the request
        (b"", "closed"),
    ],
)
async def test_the_client_names_how_a_request_ended(answer: bytes, kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not answer.startswith(b"503"):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(answer and b"HTTP/1.1 " + answer)
        await writer.drain()
        if not answer:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connections = Connections("127.0.0.1", server.sockets[0].getsockname()[1])
        outcome = await connections.ask(chat_request("m", "hi"))
        connections.close()
    assert outcome.kind == kind
    nobody = Connections("127.0.0.1", server.sockets[0].getsockname()[1] if server.sockets else 1)
    assert (await nobody.ask(b"")).kind == "no connection"


def test_our_own_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    words = ["--systems", "pdserve", "--loads", "w1:5", "--seconds", "2", "--repetitions", "1", "--wait", "0"]
    monkeypatch.setattr("sys.argv", ["peers", *words, "--out", str(out)])
    assert peers.main() == 0
    rows = [row_of(one) for one in json.loads(out.read_text())["rows"]]
    assert [one.system for one in rows] == ["pdserve"]
    assert all(one.served == one.result.sent > 0 for one in rows)
    assert rows[0].cpu_s > 0
    printed = capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["peers", "--report", str(out)])
    assert peers.main() == 0
    assert capsys.readouterr().out.strip() in printed
