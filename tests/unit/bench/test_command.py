"""The command `pdserve bench` against a cluster in this process."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.main import main
from simulator.commands import bench_run
from simulator.traces.files import MOONCAKE_BLOCK_TOKENS
from tests.unit.bench.given import ScriptedServer
from tests.unit.bench.test_driver import complete
from tests.unit.gateway.conftest import Served, serve
from tests.unit.simulator.test_report import read

SMALL = ("--requests", "6", "--input-tokens", "8:16", "--output-tokens", "3:5", "--warmup", "2")
PATIENT = ("--ttft", "120", "--tpot", "20")


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = main(["bench", *flags])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_sweep_over_grpc_is_one_json_object(toy: Served, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = bench(capsys, "--target", toy.router, "--rate", "200,400", "--json", *SMALL, *PATIENT)
    found = json.loads(out)
    assert status == 0
    assert [(one["request_rate"], one["completed"], one["slo_attainment"]) for one in found["runs"]] == [
        (200.0, 6, 1.0),
        (400.0, 6, 1.0),
    ]
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["model_id"] == "toy"
    assert found["server_mean_ttft_ms"] <= found["mean_ttft_ms"]


def test_a_comparison_over_http_writes_a_page_and_rows(
    toy: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, rows = tmp_path / "page.html", tmp_path / "rows.jsonl"
    flags = ("--url", toy.url, "--compare", toy.router, "--compare-name", "grpc", "--turns", "2", "--concurrency", "2")
    status, out, _ = bench(capsys, *flags, "--plot", str(page), "--rows", str(rows), *SMALL)
    assert status == 0
    assert "2 at once: pdserve / grpc, median over pairs of turns" in out
    assert "Comparison at 2 at once" in read(page.read_text(encoding="utf-8")).texts
    listed = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert len(listed) == 2 * 2 * 6
    assert {one["outcome"] for one in listed} == {"completed"}
    assert {one["server"] for one in listed} == {"pdserve", "grpc"}
    predicted = {one["server"] for one in listed if one["predicted_ttft_s"]}
    assert predicted == {"grpc"}, "OpenAI's API tells no predictions"


def test_a_trace_is_replayed(toy: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 10 * number,
            "input_length": 2 * MOONCAKE_BLOCK_TOKENS,
            "output_length": 100,
            "hash_ids": [1, number],
        }
        for number in range(2, 6)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--target", toy.router, "--trace", str(trace), "--length-scale", "0.04", "--warmup", "0", "--json")
    status, out, _ = bench(capsys, *flags)
    found = json.loads(out)
    assert status == 0
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 4 * 41, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate", "0"), "rate: got 0.0"),
        (("--concurrency", "0"), "concurrency: got 0"),
        (("--requests", "0"), "requests: got 0"),
        (("--input-tokens", "5:4"), "input-tokens: got 5:4"),
        (("--turns", "0"), "turns: got 0"),
        (("--warmup", "-1"), "warmup: got -1"),
        (("--jitter",), "jitter"),
        (("--trace", "/nowhere"), "trace: got /nowhere"),
        (("--url", "localhost:8000"), "url: got 'localhost:8000'"),
        (("--html", "/nowhere/x.html"), "file: got /nowhere/x.html"),
        (("--plot", "x.png"), "plot: got x.png"),
        (("--compare", "127.0.0.1:9", "--compare-name", "pdserve"), "compare-name: got pdserve"),
        (("--ttft", "-1"), "slo.ttft_s"),
    ],
)
def test_wrong_flags_are_one_line(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = bench(capsys, "--target", "127.0.0.1:9", *flags)
    assert (status, out) == (1, "")
    assert err.startswith("pdserve bench: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_nothing_completed_is_a_failure(toy: Served, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = bench(capsys, "--url", toy.url, "--requests", "6", "--input-tokens", "9000:9000", "--warmup", "0")
    assert status == 1
    assert "6 failed with HTTP 400" in out


def test_ctrl_c_ends_with_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(number: int, reply: Any) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)  # a real server answers through the event loop
        await complete(number, reply)

    monkeypatch.setattr(bench_run, "_servers", lambda *_, **__: [ScriptedServer(script, "pdserve")])
    status, out, _ = bench(capsys, "--concurrency", "1", "--duration", "3600", "--warmup", "0")
    assert status == bench_run.INTERRUPTED
    assert "interrupted" in out


def test_a_recording_of_a_router_is_a_trace(toy: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    with serve(router={"record": str(recording)}) as served:
        assert bench(capsys, "--target", served.router, "--concurrency", "2", *SMALL)[0] == 0
    flags = ("--trace", str(recording), "--warmup", "0", "--concurrency", "4", "--json")
    status, out, _ = bench(capsys, "--target", toy.router, *flags)
    found = json.loads(out)
    assert status == 0
    # The first answer of the cluster, two requests of the warm-up, and six.
    assert (found["completed"], found["failed"]) == (9, 0)
