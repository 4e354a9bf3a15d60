"""What the launcher passes to the driver of Ray, and how workers start under Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.config import REDIS_ENV, SECRET_ENV
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.progress import PhaseProgress
from pdserve.launch.ports import free_ports
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec, ClusterTls, worker_config
from pdserve.launch.supervisor import MAX_LINE_BYTES, StartFailed
from pdserve.launch.with_ray import (
    IMPORTING,
    LOADING,
    MAX_ERROR_CHARS,
    STATE,
    WARMING,
    ActorHealth,
    ActorStart,
    Phase,
    WantedCluster,
    WantedFile,
    WantedWorker,
    WorkerState,
    check_redis,
    states_from_json,
    states_to_json,
)
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.progress import PhaseReport


def wanted(**settings: Any) -> WantedCluster:
    spec = ClusterSpec(
        model="toy",
        prefill=2,
        cluster_secret="hidden as well",
        redis="redis://:hidden@127.0.0.1:1/0",
        tls=ClusterTls(folder="/certs", peer_name="a.example"),
        settings={"worker": {"kv_blocks": 3, **settings}, "router": {"token": "hidden"}},
    )
    configs = [worker_config(spec, index) for index in range(3)]
    workers = tuple(
        WantedWorker(worker_id=config.worker_id, role=role, revision=at, config=config, is_ended=at == 2)
        for at, (role, config) in enumerate(configs)
    )
    return WantedCluster(cluster="c", strategy="pack", wait_s=5.0, workers=workers, has_started=True)


def test_no_secret_is_in_the_file_for_the_driver() -> None:
    assert "hidden" not in wanted().to_json()


def test_the_driver_reads_what_the_launcher_wrote(tmp_path: Path) -> None:
    path = tmp_path / "wanted"
    file = WantedFile(str(path), {SECRET_ENV: "hidden as well", REDIS_ENV: "redis://:hidden@127.0.0.1:1/0"})
    path.write_text(wanted().to_json())
    assert file.read() == wanted()
    assert file.read() is file.read(), "nothing has changed"
    path.write_text(wanted(max_batch=4).to_json())
    assert file.read() == wanted(max_batch=4)


def test_the_states_of_any_number_of_workers_fit_into_a_line() -> None:
    states = {
        f"d{number}": WorkerState(revision=10**6, phase=Phase.FAILED, error="\u20ac\n" * 1000) for number in range(512)
    }
    line = f"@ray {STATE}{states_to_json(states)}"
    assert len(line) < MAX_LINE_BYTES
    assert "\n" not in line
    found = states_from_json(states_to_json(states))
    assert {name: (one.revision, one.phase) for name, one in found.items()} == dict.fromkeys(
        states, (10**6, Phase.FAILED)
    )
    assert found["d0"].error == states["d0"].error[:MAX_ERROR_CHARS]


async def test_a_redis_that_does_not_answer_ends_the_start_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    spec = ClusterSpec(model="toy", redis=f"redis://:hidden@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.* does not answer .*failed.*--ray"):
        await check_redis(spec, LauncherReport(), 0.3)
    err = capsys.readouterr().err
    assert "does not answer" in err
    assert "hidden" not in err


async def test_a_database_that_redis_lacks_is_named(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "socket") as redis, pytest.raises(ConfigError, match="DB index"):
        await check_redis(ClusterSpec(model="toy", redis=f"{redis.url}?db=99"), LauncherReport(), 0.3)


def health(pid: int = 7, **facts: Any) -> ActorHealth:
    return ActorHealth(**{"pid": pid, "address": "", "error": "", **facts})


def test_each_stage_of_a_worker_is_told_once() -> None:
    start, other = (ActorStart(name, 100.0, 600.0) for name in ("p0", "d0"))
    begun, over = "progress {begun}", "progress {over}"
    told = [
        start.observe(one, 101.0)
        for one in (
            None,
            None,
            health(stage=IMPORTING),
            None,
            health(stage=LOADING, phases=(begun,)),
            health(stage=LOADING, phases=(over,)),
            health(stage=WARMING, phases=(over, begun)),
            health(stage=WARMING, phases=(over, over), address="h:1"),
        )
    ]
    assert told == [
        ["now waits for its process"],
        [],
        ["now imports its modules"],
        [],
        ["now loads the model", begun],
        [over],
        ["now warms up"],
        ["took 1.00 s"],
    ]
    assert other.observe(None, 101.0) == ["now waits for its process"]


def test_a_worker_that_cannot_start_ends_the_start_with_its_cause() -> None:
    def after(*before: ActorHealth) -> ActorStart:
        start = ActorStart("p0", 100.0, 600.0)
        for one in before:
            start.observe(one, 100.0)
        return start

    loading = health(stage=LOADING)
    with pytest.raises(StartFailed, match=r"^p0: kv_memory_bytes: got 1"):
        after(loading).observe(health(error="kv_memory_bytes: got 1"), 101.0)
    with pytest.raises(StartFailed, match=r"^p0: its process ended while it loads the model; the logs of Ray"):
        after(loading).observe(health(pid=8, stage=IMPORTING), 101.0)
    with pytest.raises(StartFailed, match=r"^p0: its process ended while it loads the model: out of memory; "):
        after(loading).lost("out of memory")
    with pytest.raises(StartFailed, match="600 s: p0 loads the model; "):
        after(loading).observe(None, 700.1)
    with pytest.raises(StartFailed, match="600 s: p0 waits for its process; "):
        after().observe(None, 700.1)
    start = after()
    start.lost("not there yet")
    assert start.observe(None, 700.0) == ["now waits for its process"]


def test_phases_reach_a_listener(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[PhaseProgress] = []
    monkeypatch.setattr(PhaseReport, "listener", heard.append)
    PhaseReport("d0", "weights", "bytes", clock=lambda: 5.0)(1, 4)
    assert heard == [PhaseProgress(phase="weights", done=1, total=4, unit="bytes", seconds=0.0)]
    assert capsys.readouterr().err == ""
