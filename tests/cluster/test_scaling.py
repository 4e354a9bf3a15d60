"""The workers of a running cluster change while requests run: `pdserve scale`, `restart`, `roll` and `role`."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve import Client
from pdserve.cli.main import main
from pdserve.client.base import Retries
from pdserve.client.results import Worker
from pdserve.config_flags import FLAGS_FILE
from pdserve.core.errors import (
    ChangeFailed,
    ConfigError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from pdserve.core.types import Role
from pdserve.profiles import FOLDER
from pdserve.testing import toy_answer
from router.service.cluster import MAX_VIEWERS
from tests.cluster.cluster import Cluster
from tests.cluster.test_routers import TOKEN, connected, until

pytestmark = pytest.mark.timeout(300)

PROMPT = "a prompt that prefill workers compute, because it is longer than decode workers take"
TOKENS = 24
#: An answer takes a second, so that each change meets unfinished ones. With faster steps, clients, routers and workers
#: would only serve more requests meanwhile.
STEP_S = 0.05
FLAGS = ("--model", "toy", "--routers", "2", "--set", f"worker.toy_step_s={STEP_S}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file for --config, and one that workers of either role need at their start."""
    folder = tmp_path_factory.mktemp("settings")
    both = [f"{role}_worker.profile = '{folder / 'profile.json'}'" for role in ("prefill", "decode")]
    (folder / "up.toml").write_text("\n".join([*both, ""]))
    (folder / "profile.json").write_bytes((FOLDER / "h100-sxm.llama-3.1-8b.bf16.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(*FLAGS, "--config", str(folder / "up.toml"), env={"PDSERVE_TOKEN": TOKEN}) as cluster:
        cluster.client.close()
        cluster.client = Client(cluster.target, token=TOKEN)
        yield cluster


@pytest.fixture
def token(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of each command."""
    monkeypatch.setenv("PDSERVE_TOKEN", TOKEN)
    return ["--target", cluster.target]


def answer_of(prompt: str, model: str) -> str:
    return toy_answer(prompt, TOKENS, model)


@contextmanager
def load(
    cluster: Cluster, streams: int = 4, token: str | None = TOKEN, models: Sequence[str] = ("toy",), **options: Any
) -> Iterator[list[str]]:
    """Requests until the end of the block. All of them must be answered exactly, on the first attempt of the client,
    each by one of `models`."""
    answers: list[str] = []
    wrong: list[str] = []
    has_ended = threading.Event()
    expected = {number: [answer_of(f"{number} {PROMPT}", one) for one in models] for number in range(streams)}

    def send(number: int) -> None:
        with Client(cluster.target, token=token, retries=Retries(limit=0)) as client:
            while not has_ended.is_set():
                try:
                    text = client.generate(f"{number} {PROMPT}", max_tokens=TOKENS, temperature=0, **options).text
                except Exception as error:  # of any kind: the test reports it
                    wrong.append(repr(error))
                    return
                (answers if text in expected[number] else wrong).append(text)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(streams)]
    for one in threads:
        one.start()
    try:
        until(lambda: answers or wrong)
        yield answers
        before = len(answers)
        until(lambda: wrong or len(answers) > before + streams)
    finally:
        has_ended.set()
        for one in threads:
            one.join()
    assert not wrong


def workers(client: Client) -> dict[str, Worker]:
    return {one.worker_id: one for one in client.topology().workers}


def roles(client: Client) -> dict[str, Role | None]:
    assert all(one.is_connected and not one.is_draining for one in workers(client).values())
    return {name: one.role for name, one in workers(client).items()}


def each_router_has(cluster: Cluster, names: set[str]) -> bool:
    clients = connected(cluster).values()
    try:
        return all(workers(one).keys() == names for one in clients)
    finally:
        for one in clients:
            one.close()


def flags_of(cluster: Cluster, name: str) -> list[str]:
    return Path(f"/proc/{cluster.running.pid(name)}/cmdline").read_text().split("\0")


def live_flags_of(cluster: Cluster, name: str) -> set[str]:
    """As SIGHUP changes them."""
    [file] = [one for one in flags_of(cluster, name) if one.startswith(FLAGS_FILE)]
    return set(Path(f"/proc/{cluster.running.pid(name)}/fd", Path(file).name).read_text().split())


def run(capsys: pytest.CaptureFixture[str], line: str, token: list[str]) -> str:
    assert main([*shlex.split(line), *token]) == 0
    return capsys.readouterr().out


def test_scaling_under_load_fails_no_request(
    cluster: Cluster, token: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with load(cluster) as answers:
        said = run(capsys, "scale --prefill 2 --decode 2", token)
        assert said.splitlines()[-1] == "the cluster has 2 prefill and 2 decode workers"
        assert each_router_has(cluster, {"p0", "p1", "d0", "d1"}), "when the command returns"
        served = len(answers)
        until(lambda: len(answers) > served + 8)
        said = run(capsys, "scale --prefill 0 --decode 1", token)
        assert said.splitlines()[-1] == "the cluster has 0 prefill and 1 decode workers"
        left = workers(cluster.client).keys()
        assert len(left) == 1
        assert each_router_has(cluster, set(left))
    run(capsys, "scale --prefill 1 --decode 2", token)
    assert sorted(str(role) for role in roles(cluster.client).values()) == ["decode", "decode", "prefill"]


def test_a_roll_out_under_load_fails_no_request(
    cluster: Cluster, token: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path
) -> None:
    names = workers(cluster.client).keys()
    pids = {name: cluster.running.pid(name) for name in names}
    settings = tmp_path / "new.toml"
    settings.write_text("[worker]\nmax_batch = 48\ndrain_s = 9.0\n[prefill_worker]\nmax_batch_tokens = 96\n")

    def models() -> set[str]:
        """That answer now."""
        with closing(Client(cluster.target, token=TOKEN)) as client:
            text = client.generate(PROMPT, max_tokens=TOKENS, temperature=0).text
        assert {one.revision or "toy" for one in workers(cluster.client).values()} == {
            model for model in ("toy", "toy-other") if text == answer_of(PROMPT, model)
        }
        return {one.revision for one in workers(cluster.client).values()}

    with load(cluster, models=("toy", "toy-other")):
        said = run(capsys, f"roll --settings {settings} --model toy-other", token)
        assert said.splitlines()[0] == "the new workers load toy-other"
        assert said.splitlines()[-1].endswith("with the new weights")
        assert workers(cluster.client).keys() == names, "names and numbers stay"
        assert models() == {"toy-other"}
        assert "toy-other" in run(capsys, "topology", token)
        assert all("--max-batch=48" in flags_of(cluster, name) for name in names)
        assert ["--max-batch-tokens=96" in flags_of(cluster, name) for name in sorted(names)] == [False, False, True]
        file = folder / "up.toml"
        file.write_text(file.read_text() + "[worker]\ndrain_s = 8.0\nstall_s = 50.0\n")
        cluster.process.send_signal(signal.SIGHUP)
        cluster.running.wait_line("changed: worker.drain_s, worker.stall_s")
        cluster.running.wait_line("workers keep what a roll-out has set: worker.drain_s")
        assert all({"--drain-s=9.0", "--stall-s=50.0"} <= live_flags_of(cluster, name) for name in names)
        run(capsys, "roll --undo --surge 0", token)
        for flags in (flags_of(cluster, name) for name in names):
            assert {"--drain-s=8.0", "--stall-s=50.0"} <= set(flags), "what SIGHUP has changed stays"
            assert "--max-batch=48" not in flags
        assert models() == {""}
    assert all(cluster.running.pid(name) != pids[name] for name in names)
    with pytest.raises(ConfigError, match="undo: got no roll-out"):
        cluster.client.roll(undo=True)


def test_a_roll_out_stops_if_a_new_worker_does_not_start(cluster: Cluster) -> None:
    names = workers(cluster.client).keys()
    pids = {name: cluster.running.pid(name) for name in names}
    with load(cluster), pytest.raises(ChangeFailed, match=r"replaced: none.*keep their settings"):
        cluster.client.roll(
            settings="[worker]\nload = 'dummy'\nkv_dtype = 'fp8'\ntransport = 'nccl'\ndevice = 'cuda'\n"
        )
    assert {name: cluster.running.pid(name) for name in names} == pids
    assert workers(cluster.client).keys() == names
    with pytest.raises(ConfigError, match="undo: got no roll-out"):
        cluster.client.roll(undo=True)
    with load(cluster), pytest.raises(ChangeFailed, match="the roll-out stopped"):
        cluster.client.roll(surge=0, settings="[decode_worker]\ntransport = 'nccl'\n")
    assert roles(cluster.client).keys() == names, "the worker that was drained serves again, as before"


def test_a_worker_changes_its_role(cluster: Cluster, token: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In the same process. A crash later starts a new one in the new role."""
    cluster.client.scale(prefill=1, decode=2)
    decodes = [name for name, role in roles(cluster.client).items() if role is Role.DECODE]
    before = cluster.running.pid(decodes[0])
    with load(cluster):
        said = run(capsys, f"role {decodes[0]} prefill", token)
        assert "in the same process" in said
        for client in connected(cluster).values():
            assert roles(client)[decodes[0]] is Role.PREFILL
            client.close()
        assert cluster.running.pid(decodes[0]) == before
        os.kill(before, signal.SIGKILL)
        cluster.running.wait_restarted(decodes[0], before)
        until(
            lambda: any(one.worker_id == decodes[0] and one.is_connected for one in cluster.client.topology().workers)
        )
        assert workers(cluster.client)[decodes[0]].role is Role.PREFILL, "the supervisor knows the role"
    with pytest.raises(ConfigError, match=f"{decodes[1]}|decode: got 0"):
        cluster.client.set_role(decodes[1], Role.PREFILL)
    with pytest.raises(InvalidRequest, match="has this one"):
        cluster.client.set_role(decodes[0], Role.PREFILL)
    again = cluster.running.pid(decodes[0])
    assert "in the same process" in run(capsys, f"role {decodes[0]} decode", token)
    assert roles(cluster.client)[decodes[0]] is Role.DECODE
    assert cluster.running.pid(decodes[0]) == again


@pytest.mark.slow  # the tests above start as many processes, and CI has 20 minutes
def test_new_workers_have_the_weights_of_the_last_roll_out(cluster: Cluster) -> None:
    cluster.client.scale(prefill=1, decode=2)
    with load(cluster, models=("toy", "toy-other")):
        cluster.client.roll(surge=0, model="toy-other")
    with load(cluster, models=("toy-other",)):
        [name, *_] = (one.worker_id for one in workers(cluster.client).values() if one.role is Role.DECODE)
        pid = cluster.running.pid(name)
        os.kill(pid, signal.SIGKILL)
        cluster.running.wait_restarted(name, pid)
        cluster.client.scale(decode=3)
    assert {one.revision for one in workers(cluster.client).values()} == {"toy-other"}
    with pytest.raises(ConfigError, match="all workers serve this one"):
        cluster.client.roll(model="toy-other")
    with load(cluster, models=("toy", "toy-other")):
        cluster.client.roll(undo=True)
    with load(cluster, models=("toy",)):
        cluster.client.scale(decode=2)
    assert {one.revision for one in workers(cluster.client).values()} == {""}


@pytest.mark.slow  # the tests above start as many processes, and CI has 20 minutes
def test_a_worker_is_restarted(cluster: Cluster, token: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cluster.client.scale(decode=2)
    [name, *others] = sorted(workers(cluster.client))
    before = {one: cluster.running.pid(one) for one in (name, *others)}
    said: list[Any] = []
    with load(cluster):
        cluster.client.roll([name], surge=0, on_step=said.append)
    assert cluster.running.pid(name) != before[name]
    assert all(cluster.running.pid(one) == before[one] for one in others)
    assert [one.worker_id for one in said] == [name] * (len(said) - 1) + [""]
    with pytest.raises(NotFound):
        cluster.client.roll(["nobody"])


@pytest.mark.slow  # it starts a worker three times
def test_a_worker_that_does_not_start_as_before_either_is_started_until_it_runs(cluster: Cluster, folder: Path) -> None:
    names = roles(cluster.client)
    [name] = [one for one, role in names.items() if role is Role.PREFILL]
    pid, profile = cluster.running.pid(name), folder / "profile.json"
    profile.rename(folder / "away")
    with load(cluster):
        with pytest.raises(ChangeFailed, match=f"profile: got .*not replaced: {name}"):
            cluster.client.roll([name], surge=0)
        (folder / "away").rename(profile)
        cluster.running.wait_restarted(name, pid)
        until(lambda: (one := workers(cluster.client).get(name)) and one.is_connected)
    assert roles(cluster.client) == names


@pytest.mark.slow  # the tests above start as many processes, and CI has 20 minutes
def test_a_killed_added_worker_comes_back(cluster: Cluster) -> None:
    cluster.client.scale(decode=2)
    before = workers(cluster.client).keys()
    cluster.client.scale(decode=3)
    [added] = workers(cluster.client).keys() - before
    pid = cluster.running.pid(added)
    os.kill(pid, signal.SIGKILL)
    cluster.running.wait_restarted(added, pid)
    until(lambda: any(one.worker_id == added and one.is_connected for one in cluster.client.topology().workers))


@contextmanager
def viewers(cluster: Cluster) -> Iterator[None]:
    """As many live views as the routers allow."""
    with ExitStack() as stack:
        for client in connected(cluster).values():
            stack.callback(client.close)
            for _ in range(MAX_VIEWERS):
                next(stack.enter_context(closing(client.watch())))
        with pytest.raises(Overloaded):
            next(cluster.client.watch())
        yield


def test_one_change_is_made_at_a_time(cluster: Cluster) -> None:
    with viewers(cluster):
        cluster.client.scale(decode=2)
    began, went_on = threading.Event(), threading.Event()

    def wait(step: Any) -> None:
        began.set()

    def change() -> None:
        with Client(cluster.target, token=TOKEN) as client:
            client.scale(decode=3, on_step=wait)
        went_on.set()

    thread = threading.Thread(target=change)
    thread.start()
    assert began.wait(60.0)
    with pytest.raises(Unavailable, match="makes another change"):
        cluster.client.scale(decode=1)
    thread.join()
    assert went_on.is_set()


def test_a_change_needs_the_operators_token(cluster: Cluster) -> None:
    for token in (None, "another-token-than-the-operators"):
        with Client(cluster.target, token=token) as client, pytest.raises(Unauthenticated):
            client.scale(decode=1)
        with Client(cluster.target, token=token) as client, pytest.raises(Unauthenticated):
            client.scaling()
    with pytest.raises(Unavailable, match="`up --autoscale` or `--roles auto`"):
        cluster.client.scaling()
    with pytest.raises(InvalidRequest, match="decode: got 0"):
        cluster.client.scale(decode=0)


def test_settings_that_choose_programs_are_rejected(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"worker\.engine_python"):
        cluster.client.roll(settings="[worker]\nengine_python = '/bin/sh'\n")


# --- a cluster that scales itself -----------------------------------------------------------------------------

ITSELF = (
    *("--model", "toy", "--prefill", "0", "--autoscale", "1:3", "--routers", "2"),
    *("--set", "worker.toy_step_s=0.05", "--set", "worker.max_batch=4", "--set", "worker.heartbeat_s=0.1"),
)
SCALES_S = 240.0  # it sees arrivals for half a minute before it decides
#: At this pace an answer of TOKENS takes seconds, so a few clients need more rows than one worker has.
PACE = {"slo": {"tpot_s": 1.0}}


@pytest.mark.slow
def test_a_cluster_scales_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", TOKEN)
    record = tmp_path / "run.jsonl"
    with Cluster(*ITSELF, "--record", str(record), env={"PDSERVE_TOKEN": TOKEN}) as cluster:
        cluster.client.close()
        cluster.client = Client(cluster.target, token=TOKEN)
        with load(cluster, streams=6, **PACE):
            until(lambda: len(cluster.workers()) == 3, SCALES_S)
        until(lambda: len(cluster.workers()) == 1, SCALES_S)
        until(lambda: any(one.change.startswith("stop") and one.outcome for one in cluster.client.scaling().decisions))
        decisions = cluster.client.scaling().decisions
        changes = [one.change for one in decisions if one.change]
        assert changes[0].startswith("start")
        assert changes[-1].startswith("stop")
        assert not any(one.failure for one in decisions)
        assert main(["explain", "--scaling", "--target", cluster.target]) == 0
        assert f"ago: {changes[-1]}, at" in capsys.readouterr().out
        lines = [line for line in cluster.running.lines if " autoscale " in line]
        assert all(any(f"{change}, from" in line for line in lines) for change in changes)
    assert main(["replay", str(tmp_path / "run-scaling.jsonl")]) == 0
    assert "the controller decided the same in all" in capsys.readouterr().out


@pytest.mark.slow  # the tests above start as many processes, and CI has 20 minutes
def test_the_launcher_ends_during_a_change(cluster: Cluster) -> None:
    began, failed = threading.Event(), []

    def change() -> None:
        with Client(cluster.target, token=TOKEN) as client:
            try:
                client.roll(on_step=lambda step: began.set())
            except Unavailable as error:
                failed.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    assert began.wait(60.0)
    pids = cluster.running.pids()
    cluster.client.close()
    assert cluster.running.stop() == 0
    thread.join()
    assert len(failed) == 1
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
