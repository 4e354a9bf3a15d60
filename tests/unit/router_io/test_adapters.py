"""LoRA adapters in a live cluster of the toy model: requests by name, loading, unloading, and workers that come back.
The toy's tokens and KV depend on the adapter."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve import Client
from pdserve.cli.main import main
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.adapters import AdapterLimits
from pdserve.core.errors import (
    InvalidRequest,
    NoWorkers,
    PdserveError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from pdserve.engine.adapters import read_adapter
from pdserve.engine.toy import answer
from pdserve.testing import Cluster
from pdserve.worker.adapters import WorkerAdapters
from router.service.program import RouterHost
from tests.support.adapters import write_adapter

DEADLINE_S = 60.0
PROMPT = [33 + (7 * i) % 90 for i in range(16 * 3 + 5)]
LIMITS = AdapterLimits(rank=512, num_bytes=2**30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test changes them."""
    above = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "c", "d", "e")):
        write_adapter(above / "lora" / name, seed=seed)
    write_adapter(above / "outside", seed=99)
    (above / "lora" / "link").symlink_to(above / "outside")
    return above / "lora"


def make(folders: Path, *names: str, router: dict[str, Any] | None = None, num: int = 2, **worker: Any) -> Cluster:
    settings = {
        "lora": tuple(f"{name}={folders / name}" for name in names),
        "lora_folders": (str(folders),),
        "max_context_tokens": 2048,
        "heartbeat_s": 0.05,
    }
    limits = {"slo_ttft_s": 120.0, "slo_tpot_s": 20.0}
    return Cluster(prefill=num, decode=num, router={**limits, **(router or {})}, worker={**settings, **worker})


@pytest.fixture
def cluster(folders: Path) -> Iterator[Cluster]:
    with make(folders, "a", "b") as one:
        yield one


@pytest.fixture(scope="module")
def unchanged(folders: Path) -> Iterator[Client]:
    """Of a cluster whose adapters no test changes."""
    with make(folders, "a", "b", num=1) as cluster, Client(cluster.address) as client:
        yield client


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address) as one:
        yield one


def fingerprint(folder: Path) -> str:
    return read_adapter("x", folder, LIMITS).fingerprint


def expected(folder: Path | None, max_tokens: int = 8, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    return tuple(answer(prompt, max_tokens, adapter="" if folder is None else fingerprint(folder)))


def generate(client: Client, model: str | None = None, max_tokens: int = 8) -> tuple[int, ...]:
    return client.generate(PROMPT, max_tokens=max_tokens, temperature=0, model=model).token_ids


def adapters_of(cluster: Cluster) -> dict[str, WorkerAdapters]:
    hosts: dict[str, Any] = cluster._hosts
    return {name: hosts[name]._engine._program.adapters for name in cluster.worker_ids}


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def restart(cluster: Cluster, name: str) -> None:
    cluster._workers[name][1]["port"] = int(cluster._hosts[name].address.rpartition(":")[2])
    cluster.stop_worker(name)
    cluster._start_worker(name)


def held_by(cluster: Cluster, *names: str, folders: Path) -> Callable[[], bool]:
    wanted = {fingerprint(folders / name) for name in names}
    return lambda: all(set(one.report.loaded) == wanted for one in adapters_of(cluster).values() if one.report)


def test_a_request_chooses_its_adapter_by_name(cluster: Cluster, client: Client, folders: Path) -> None:
    model = client.model()
    assert model.adapters == ("a", "b")
    assert model.names == ("toy", "a", "b")
    for _ in range(2):
        for name, folder in ((None, None), ("toy", None), ("", None), ("a", folders / "a"), ("b", folders / "b")):
            assert generate(client, name) == expected(folder)
    again = client.generate(PROMPT, max_tokens=8, temperature=0, model="a", request_id="r")
    assert again.usage.cached_prompt_tokens == 48
    assert client.explain("r").adapter == "a"
    with pytest.raises(UnknownModel, match="'zzz' does not exist; this server serves 'toy', 'a', 'b'"):
        generate(client, "zzz")


def test_a_first_request_of_an_adapter_finds_no_kv_of_another(cluster: Cluster, client: Client) -> None:
    for name in ("toy", "a", "b"):
        first = client.generate(PROMPT, max_tokens=2, temperature=0, model=name)
        assert first.usage.cached_prompt_tokens == 0
        second = client.generate(PROMPT, max_tokens=2, temperature=0, model=name)
        assert second.usage.cached_prompt_tokens == 48


def test_several_answers_and_samples_keep_the_adapter(cluster: Cluster, client: Client, folders: Path) -> None:
    many = client.generate(PROMPT, max_tokens=6, temperature=1.0, seed=5, n=3, model="a")
    first = answer(PROMPT, 6, seed=5, adapter=fingerprint(folders / "a"))
    assert many.choices[0].token_ids == tuple(first)
    assert client.generate(PROMPT, max_tokens=6, temperature=1.0, seed=5, model="a").token_ids == tuple(first)


def test_an_adapter_is_loaded_replaced_and_unloaded_while_serving(
    cluster: Cluster, client: Client, folders: Path
) -> None:
    assert client.load_adapter("hot", str(folders / "c")) == fingerprint(folders / "c")
    assert client.model().adapters == ("a", "b", "hot")
    assert generate(client, "hot") == expected(folders / "c")
    assert client.load_adapter("hot", str(folders / "d")) == fingerprint(folders / "d")
    assert generate(client, "hot") == expected(folders / "d")
    client.unload_adapter("hot")
    with pytest.raises(UnknownModel):
        generate(client, "hot")
    with pytest.raises(UnknownModel):
        client.unload_adapter("hot")
    client.unload_adapter("a")
    assert client.model().adapters == ("b",)
    assert generate(client, "b") == expected(folders / "b")


def test_running_requests_keep_their_weights(folders: Path) -> None:
    with make(folders, "a", num=1, toy_step_s=0.005) as cluster, Client(cluster.address) as client:
        begun, go_on = threading.Event(), threading.Event()

        def stream() -> tuple[int, ...]:
            tokens: list[int] = []
            for piece in client.stream(PROMPT, max_tokens=150, temperature=0, model="a"):
                tokens += piece.token_ids
                begun.set()
                go_on.wait(DEADLINE_S)
            return tuple(tokens)

        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(stream) for _ in range(2)]
            assert begun.wait(DEADLINE_S)
            former = expected(folders / "a", 150)
            client.load_adapter("a", str(folders / "b"))
            assert generate(client, "a") == expected(folders / "b")
            client.unload_adapter("a")
            with pytest.raises(UnknownModel):
                generate(client, "a")
            go_on.set()
            assert {one.result(DEADLINE_S) for one in streams} == {former}
        until(lambda: fingerprint(folders / "b") not in adapters_of(cluster)["decode-0"]._uses_of)


def test_a_load_that_one_worker_cannot_do_changes_none(cluster: Cluster, client: Client, folders: Path) -> None:
    [broken] = [one for name, one in adapters_of(cluster).items() if name == "prefill-1"]
    read = broken._read

    def fails(name: str, folder: Path) -> Any:
        raise InvalidRequest("lora_path", folder, "a disk that works")

    broken._read = fails
    for name in ("a", "new"):
        with pytest.raises(InvalidRequest, match=r"prefill-1: lora_path: .*a disk that works"):
            client.load_adapter(name, str(folders / "c"))
    until(held_by(cluster, "a", "b", folders=folders))
    assert client.model().adapters == ("a", "b")
    assert generate(client, "a") == expected(folders / "a")
    broken._read = lambda name, folder: read(name, folders / "d")  # other weights than on other workers
    with pytest.raises(InvalidRequest, match="one adapter that all workers can load"):
        client.load_adapter("a", str(folders / "c"))
    until(held_by(cluster, "a", "b", folders=folders))
    broken._read = read
    client.load_adapter("a", str(folders / "c"))
    assert generate(client, "a") == expected(folders / "c")


def test_a_killed_worker_costs_no_token_of_an_adapter(folders: Path) -> None:
    with make(folders, "a", "b", toy_step_s=0.004) as cluster, Client(cluster.address) as client:
        begun = threading.Semaphore(0)

        def stream(name: str) -> tuple[int, ...]:
            tokens: list[int] = []
            for piece in client.stream(PROMPT, max_tokens=120, temperature=0, model=name):
                if not tokens:
                    begun.release()
                tokens += piece.token_ids
            return tuple(tokens)

        names = ["a", "b", "toy"] * 2
        with ThreadPoolExecutor(len(names)) as pool:
            streams = [pool.submit(stream, name) for name in names]
            assert all(begun.acquire(timeout=DEADLINE_S) for _ in names)
            cluster.stop_worker("decode-0")
            for name, one in zip(names, streams, strict=True):
                assert one.result(DEADLINE_S) == expected(None if name == "toy" else folders / name, 120)


def test_a_restarted_worker_gets_what_the_others_have(cluster: Cluster, client: Client, folders: Path) -> None:
    client.load_adapter("hot", str(folders / "c"))
    client.load_adapter("a", str(folders / "d"))
    client.unload_adapter("b")
    for name in ("decode-0", "prefill-1"):
        restart(cluster, name)
    until(lambda: len(cluster.worker_ids) == 4 and held_by(cluster, "c", "d", folders=folders)())
    for name in ("decode-1", "prefill-0"):
        cluster.stop_worker(name)
    assert generate(client, "hot") == expected(folders / "c")
    assert generate(client, "a") == expected(folders / "d")
    with pytest.raises(UnknownModel):
        generate(client, "b")


def test_a_worker_alone_does_not_bring_an_unloaded_name_back(folders: Path) -> None:
    with make(folders, "a", num=1) as cluster, Client(cluster.address) as client:
        client.unload_adapter("a")
        restart(cluster, "prefill-0")
        restart(cluster, "decode-0")
        until(held_by(cluster, folders=folders))
        with pytest.raises(UnknownModel):
            generate(client, "a")
        assert generate(client) == expected(None)
        client.load_adapter("a", str(folders / "b"))
        assert generate(client, "a") == expected(folders / "b")


@pytest.mark.parametrize("num_changes", [16, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_are_exact_while_names_change(folders: Path, num_changes: int) -> None:
    """Names are loaded, replaced and unloaded at random, and a worker is restarted, while requests choose them. Each
    answer is that of weights that its name had meanwhile."""
    chance, names = random.Random(num_changes), ("n0", "n1", "n2")
    prints = {one: fingerprint(folders / one) for one in "abcde"}
    with make(folders, toy_step_s=0.001) as cluster, Client(cluster.address) as client:
        # What each name may mean: one fingerprint, or two during a change; an empty one: unloaded.
        history: dict[str, list[set[str]]] = {name: [{""}] for name in names}
        is_over, outcomes = threading.Event(), list[str]()

        def ask(seed: int) -> None:
            own = random.Random(seed)
            while not is_over.is_set():
                name, prompt = own.choice(names), [*PROMPT[: own.choice((3, 16, 40))], own.randrange(33, 127)]
                since = len(history[name]) - 1
                try:
                    tokens = client.generate(prompt, max_tokens=12, temperature=0, model=name).token_ids
                except (UnknownModel, Unavailable) as error:
                    said = error.message
                    assert f"'{name}' does not exist" in said or f"no worker has the LoRA adapter {name}" in said
                    assert "" in set().union(*history[name][since:]), f"{name} was served all the time"
                    outcomes.append("unknown")
                    continue
                meant = set().union(*history[name][since:]) - {""}
                assert tokens in [tuple(answer(prompt, 12, adapter=one)) for one in meant], name
                outcomes.append("exact")

        def change(number: int) -> None:
            name, folder = chance.choice(names), chance.choice("abcde")
            [former] = history[name][-1]
            new = "" if former and chance.random() < 0.3 else prints[folder]
            history[name].append({former, new})
            if new:
                client.load_adapter(name, str(folders / folder))
            else:
                client.unload_adapter(name)
            history[name].append({new})
            if number % 30 == 20:
                restart(cluster, chance.choice(cluster.worker_ids))

        with ThreadPoolExecutor(6) as pool:
            asking = [pool.submit(ask, seed) for seed in range(6)]
            try:
                for number in range(num_changes):
                    change(number)
            finally:
                is_over.set()
            for one in asking:
                one.result(DEADLINE_S)
        assert outcomes.count("exact") > num_changes
        for one in adapters_of(cluster).values():
            one.check()


def test_routers_agree_without_another_store(cluster: Cluster, client: Client, folders: Path) -> None:
    """A second router, and one that comes later, which is the same as one that was restarted."""
    hosts: dict[str, Any] = cluster._hosts
    first = hosts["router"]._server._config
    settings = replace(first, port=0, workers=tuple(hosts[one].address for one in cluster.worker_ids))
    others = []
    try:
        for number in range(2):
            others.append(RouterHost(replace(settings, router_id=f"r{number}"), on_fatal=lambda: None))
            with Client(others[-1].start()) as other:
                until(lambda other=other: _names(other) == client.model().adapters)
                name, folder = f"hot{number}", folders / "cd"[number]
                other.load_adapter(name, str(folder))
                until(lambda name=name: name in client.model().adapters)
                assert generate(client, name) == expected(folder)
                client.unload_adapter("ab"[number])
                until(lambda other=other, number=number: "ab"[number] not in _names(other))
                with pytest.raises(UnknownModel):
                    generate(other, "ab"[number])
                assert generate(other, name) == expected(folder)
    finally:
        for one in others:
            one.stop()
    assert client.model().adapters == ("hot0", "hot1")


def _names(client: Client) -> tuple[str, ...]:
    try:
        return client.model().adapters
    except NoWorkers:
        return ()


def test_the_command_line_lists_loads_and_unloads(
    cluster: Cluster, client: Client, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", cluster.address)
    assert main(["lora", "load", "hot", str(folders / "c"), *target]) == 0
    assert capsys.readouterr().out == f"all workers serve hot, fingerprint {fingerprint(folders / 'c')}\n"
    assert main(["lora", "list", *target]) == 0
    assert capsys.readouterr().out == "a\nb\nhot\n"
    assert client.generate(PROMPT, max_tokens=2, temperature=0, model="hot", request_id="r").token_ids
    assert main(["generate", "ab", "--model", "hot", "--max-tokens", "4", "--temperature", "0", *target]) == 0
    text = bytes(answer(list(b"ab"), 4, adapter=fingerprint(folders / "c"))).decode()
    assert capsys.readouterr().out.splitlines()[-1] == text
    assert main(["generate", "ab", "--model", "zzz", *target]) == 1
    assert "the model 'zzz' does not exist; this server serves 'toy'" in capsys.readouterr().err
    assert main(["explain", "r", *target]) == 0
    assert "adapter hot" in capsys.readouterr().out
    assert main(["lora", "unload", "hot", *target]) == 0
    assert main(["lora", "unload", "hot", *target]) == 1
    assert "pdserve lora: error: the model 'hot' does not exist" in capsys.readouterr().err


# -- who may load what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "toy", "a b", "a,b", "a=b", "x" * 257, "a\n", "a\0b"])
def test_names_are_bounded_and_none_of_the_model(unchanged: Client, folders: Path, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unchanged.load_adapter(name, str(folders / "c"))
    assert caught.value.field == "name"


@pytest.mark.parametrize("place", ["../outside", "a/../../outside", "link", "absent", "", "x" * 5000, "\0"])
def test_folders_outside_are_rejected(unchanged: Client, folders: Path, place: str) -> None:
    for folder in (f"{folders}/{place}" if place else "", place):
        with pytest.raises(InvalidRequest):
            unchanged.load_adapter("new", folder)
    assert unchanged.model().adapters == ("a", "b")


def test_nothing_is_loaded_without_permitted_folders(folders: Path) -> None:
    with make(folders, "a", num=1, lora_folders=()) as cluster, Client(cluster.address) as client:
        with pytest.raises(InvalidRequest, match="lora_folders is empty"):
            client.load_adapter("new", str(folders / "c"))
        with pytest.raises(InvalidRequest, match="lora_folders is empty"):
            client.load_adapter("a", str(folders / "c"))
        assert generate(client, "a") == expected(folders / "a")


def test_only_operators_load_and_unload(folders: Path, tmp_path: Path) -> None:
    key = make_key(bytes(32))
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"tenants": {"acme": {"keys": [{"sha256": key_hash(key)}]}}}))
    router = {"key_file": str(file), "token": "operator"}
    with make(folders, "a", num=1, router=router) as cluster:
        for token, error in ((key, PermissionDenied), ("wrong", Unauthenticated), (None, Unauthenticated)):
            with Client(cluster.address, token=token) as client:
                calls: list[Callable[[], object]] = [
                    lambda client=client: client.load_adapter("new", str(folders / "b")),
                    lambda client=client: client.unload_adapter("a"),
                ]
                for call in calls:
                    with pytest.raises(error):
                        call()
        with Client(cluster.address, token=key) as client:
            assert generate(client, "a") == expected(folders / "a"), "a tenant chooses an adapter"
        with Client(cluster.address, token="operator") as client:
            client.unload_adapter("a")


def test_loads_beside_each_other_end_in_one_state(cluster: Cluster, client: Client, folders: Path) -> None:
    def change(number: int) -> str:
        try:
            if number % 4 == 3:
                client.unload_adapter("hot")
            else:
                client.load_adapter("hot", str(folders / "cde"[number % 3]))
        except PdserveError as error:
            return error.reason
        return ""

    with ThreadPoolExecutor(16) as pool:
        reasons = set(pool.map(change, range(24)))
    assert reasons <= {"", "OVERLOADED", "UNKNOWN_MODEL"}
    client.load_adapter("hot", str(folders / "e"))
    assert generate(client, "hot") == expected(folders / "e")
    for one in adapters_of(cluster).values():
        assert {named.name: named.fingerprint for named in one._named.values()}["hot"] == fingerprint(folders / "e")
