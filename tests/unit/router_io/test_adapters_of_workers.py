"""What a router tells workers about LoRA adapters, message by message, and what it answers operators."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.core.adapters import MAX_UNLOADED
from pdserve.core.errors import InvalidRequest, Overloaded, Unavailable, UnknownModel
from pdserve.core.protocol import (
    AdapterCommand,
    AdapterLoaded,
    Adapters,
    DropLoad,
    LoadAdapter,
    NamedAdapter,
)
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import ADAPTER_LOADED, ADAPTERS, decode_adapter_command
from router.service import adapters
from router.service.adapters import MAX_CALLS, MAX_ENTRIES, ClusterAdapters, read_report


class Fleet:
    """Workers that follow commands at once, unless `is_silent`."""

    def __init__(self, *workers: str) -> None:
        self.sent: list[tuple[str, AdapterCommand]] = []
        self.named: dict[str, dict[str, NamedAdapter]] = {}
        self.fingerprints: dict[str, str] = {}  # folder -> fingerprint
        self.errors: dict[str, str] = {}  # worker -> why it cannot load
        self.silent: set[str] = set()
        self.now_us = 1000
        self.adapters = ClusterAdapters(self._send, lambda: ("base",), lambda: self.now_us)
        for worker_id in workers:
            self.attach(worker_id)

    def attach(self, worker_id: str, *named: NamedAdapter) -> None:
        self.named[worker_id] = {one.name: one for one in named}
        self.report(worker_id)

    def report(self, worker_id: str) -> None:
        held = tuple(self.named[worker_id].values())
        loaded = tuple(one.fingerprint for one in held if one.fingerprint)
        self.adapters.reported(worker_id, Adapters(named=held, loaded=loaded))

    def lose(self, worker_id: str) -> None:
        del self.named[worker_id]
        self.adapters.lost(worker_id)

    def meanings(self, name: str) -> set[str]:
        return {held[name].fingerprint if name in held else "-" for held in self.named.values()}

    def commands(self, worker_id: str, kind: type) -> list[Any]:
        return [one for to, one in self.sent if to == worker_id and isinstance(one, kind)]

    def _send(self, worker_id: str, request: worker_pb2.AttachRequest) -> bool:
        command = decode_adapter_command(request)
        assert command is not None
        self.sent.append((worker_id, command))
        if worker_id not in self.named:
            return False
        if worker_id not in self.silent:
            asyncio.get_running_loop().call_soon(self._follow, worker_id, command)
        return True

    def _follow(self, worker_id: str, command: AdapterCommand) -> None:
        if worker_id not in self.named:
            return
        if isinstance(command, LoadAdapter):
            error = self.errors.get(worker_id, "")
            fingerprint = "" if error else self.fingerprints.get(command.folder, command.folder)
            answer = AdapterLoaded(name=command.name, version=command.version, fingerprint=fingerprint, error=error)
            self.adapters.loaded(worker_id, ADAPTER_LOADED.encode(answer))
        elif isinstance(command, NamedAdapter):
            held = self.named[worker_id].get(command.name)
            if held is None or command.precedence > held.precedence:
                self.named[worker_id][command.name] = command
            self.report(worker_id)


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_load_has_two_parts() -> None:
    fleet = Fleet("d0", "p0")
    assert await fleet.adapters.load("a", "f1") == "f1"
    named = NamedAdapter(name="a", fingerprint="f1", version=1000, folder="f1")
    load = LoadAdapter(name="a", folder="f1", version=1000)
    assert fleet.sent[:2] == [("d0", load), ("p0", load)]
    assert sorted(to for to, one in fleet.sent[2:] if one == named) == ["d0", "p0"]
    assert len(fleet.sent) == 4
    assert fleet.adapters.names == ("a",)
    assert fleet.adapters.find("a") == named


async def test_a_failed_load_is_dropped_everywhere() -> None:
    fleet = Fleet("d0", "p0")
    await fleet.adapters.load("a", "f1")
    fleet.errors["p0"] = "no room"
    fleet.sent.clear()
    with pytest.raises(InvalidRequest, match=r"nothing has changed\. p0: no room"):
        await fleet.adapters.load("a", "f2")
    for worker_id in ("d0", "p0"):
        [drop] = fleet.commands(worker_id, DropLoad)
        assert drop == DropLoad(name="a", version=1001), "larger than the known one, although the clock stands"
        assert fleet.commands(worker_id, NamedAdapter) == []
    assert fleet.meanings("a") == {"f1"}


async def test_a_worker_that_is_lost_while_it_loads_does_not_fail_the_others() -> None:
    fleet = Fleet("d0", "p0")
    fleet.silent.add("p0")
    load = asyncio.create_task(fleet.adapters.load("a", "f1"))
    await settled()
    assert not load.done()
    fleet.lose("p0")
    assert await load == "f1"
    fleet.silent.clear()
    fleet.attach("p0")
    await settled()
    assert fleet.meanings("a") == {"f1"}, "it gets the adapter when it is back"


async def test_a_caller_that_leaves_drops_the_load() -> None:
    fleet = Fleet("d0", "p0")
    fleet.silent.add("p0")
    load = asyncio.create_task(fleet.adapters.load("a", "f1"))
    await settled()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert fleet.commands("d0", DropLoad) == fleet.commands("p0", DropLoad) == [DropLoad(name="a", version=1000)]
    fleet.silent.clear()
    assert await fleet.adapters.load("a", "f1") == "f1", "the next one has its turn"


async def test_silent_workers_end_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, patient_s, hurried_s = Fleet("d0", "p0"), adapters.LOAD_S, 0.01
    fleet.silent.add("p0")
    monkeypatch.setattr(adapters, "LOAD_S", hurried_s)
    with pytest.raises(Unavailable, match="p0 has not loaded the adapter"):
        await fleet.adapters.load("a", "f1")
    assert fleet.adapters.names == ()
    fleet.silent.clear()
    monkeypatch.setattr(adapters, "LOAD_S", patient_s)
    await fleet.adapters.load("a", "f1")
    fleet.silent.add("p0")
    monkeypatch.setattr(adapters, "NAME_S", hurried_s)
    with pytest.raises(Unavailable, match="p0 has not answered"):
        await fleet.adapters.unload("a")
    assert fleet.adapters.find("a") is None, "new requests are rejected in any case"


async def test_calls_that_wait_are_bounded() -> None:
    fleet = Fleet("d0")
    fleet.silent.add("d0")
    calls = [asyncio.create_task(fleet.adapters.load(f"a{number}", "f")) for number in range(MAX_CALLS)]
    await settled()
    with pytest.raises(Overloaded):
        await fleet.adapters.load("more", "f")
    with pytest.raises(Overloaded):
        await fleet.adapters.unload("more")
    assert len(fleet.commands("d0", LoadAdapter)) == 1, "one after the other"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_an_older_worker_is_named_and_gets_no_message() -> None:
    fleet = Fleet("d0")
    fleet.adapters.reported("old", None)
    with pytest.raises(InvalidRequest, match="worker old computes no LoRA adapters"):
        await fleet.adapters.load("a", "f1")
    fleet.attach("d1", NamedAdapter(name="a", fingerprint="f1", folder="f1"))
    await settled()
    assert {to for to, _ in fleet.sent} == {"d0"}, "only d0 lacks the adapter"
    await fleet.adapters.unload("a")
    assert "old" not in {to for to, _ in fleet.sent}


# -- workers that know less ------------------------------------------------------------------------------------


async def test_a_worker_gets_one_adapter_after_the_other() -> None:
    fleet = Fleet()
    fleet.attach("d0", *(NamedAdapter(name=f"a{one}", fingerprint=f"f{one}", folder=f"f{one}") for one in range(5)))
    fleet.silent.add("d1")
    fleet.attach("d1")
    for number in range(5):
        loads = fleet.commands("d1", LoadAdapter)
        assert len(loads) == number + 1
        fleet._follow("d1", loads[-1])
        fleet._follow("d1", fleet.commands("d1", NamedAdapter)[-1])
    assert len(fleet.named["d1"]) == 5
    fleet.report("d0")
    assert len(fleet.commands("d1", LoadAdapter)) == 5, "nothing is loaded twice"


async def test_a_folder_with_other_weights_is_not_served_under_the_name() -> None:
    fleet = Fleet()
    fleet.attach("d0", NamedAdapter(name="a", fingerprint="f1", version=5, folder="x"))
    fleet.fingerprints["x"] = "f2"
    fleet.attach("d1")
    await settled()
    assert fleet.commands("d1", DropLoad) == [DropLoad(name="a", version=5)]
    for _ in range(3):
        fleet.report("d1")
        await settled()
    assert len(fleet.commands("d1", LoadAdapter)) == 1, "it is not tried again"
    assert fleet.adapters.find("a") == NamedAdapter(name="a", fingerprint="f1", version=5, folder="x")


async def test_unloaded_names_reach_workers_that_were_away() -> None:
    fleet = Fleet("d0", "p0")
    await fleet.adapters.load("a", "f1")
    away = fleet.named["p0"]["a"]
    fleet.lose("p0")
    fleet.now_us = 2000
    await fleet.adapters.unload("a")
    fleet.attach("p0", away)
    assert fleet.adapters.find("a") is None
    await settled()
    assert fleet.meanings("a") == {""}
    for worker_id in ("d0", "p0"):
        fleet.lose(worker_id)
    fleet.attach("d0", NamedAdapter(name="a", fingerprint="f1", folder="f1"))
    await settled()
    assert fleet.meanings("a") == {""}, "this router remembers it too"


async def test_a_worker_that_forgets_old_names_is_not_told_them_again() -> None:
    """Each has other unloaded names, more than a worker remembers."""
    fleet = Fleet()
    for worker_id in ("d0", "d1"):
        named = (NamedAdapter(name=f"{worker_id}-{one}", version=1 + one) for one in range(MAX_UNLOADED))
        fleet.attach(worker_id, *named)
    await settled()
    before = len(fleet.sent)
    for _ in range(3):
        fleet.named["d0"] = dict(list(fleet.named["d0"].items())[-MAX_UNLOADED:])
        fleet.report("d0")
        await settled()
    assert len(fleet.sent) == before


async def test_names_stay_known_while_all_workers_restart() -> None:
    """Requests then wait for workers, as they do without an adapter."""
    fleet = Fleet()
    fleet.attach("d0", NamedAdapter(name="a", fingerprint="f1", folder="f1"))
    fleet.lose("d0")
    assert fleet.adapters.find("a") is not None
    fleet.attach("d0")
    assert fleet.adapters.find("a") is None


async def test_the_models_names_are_taken() -> None:
    fleet = Fleet()
    fleet.attach("d0", NamedAdapter(name="base", fingerprint="f1", folder="f1"))
    assert fleet.adapters.names == ()
    with pytest.raises(InvalidRequest, match="no name of the model"):
        await fleet.adapters.load("base", "f1")
    with pytest.raises(UnknownModel):
        await fleet.adapters.unload("other")


# -- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report",
    [
        Adapters(loaded=("f",) * (MAX_ENTRIES + 1)),
        Adapters(named=(NamedAdapter(name="a"),) * (MAX_ENTRIES + 1)),
        Adapters(named=(NamedAdapter(name="a" * 257),)),
        Adapters(named=(NamedAdapter(name="a", folder="/" * 4097),)),
        Adapters(named=(NamedAdapter(name="a", fingerprint="f" * 65),)),
        Adapters(loaded=("f" * 65,)),
    ],
    ids=range(6),
)
def test_reports_are_bounded(report: Adapters) -> None:
    with pytest.raises(InvalidRequest, match="adapters"):
        read_report(ADAPTERS.encode(report))


@pytest.mark.parametrize(
    "answer", [{"name": "a" * 257}, {"fingerprint": "f" * 257}, {"error": "e" * 4097}], ids=lambda one: next(iter(one))
)
async def test_answers_are_bounded(answer: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="adapter_loaded"):
        Fleet("d0").adapters.loaded("d0", worker_pb2.AdapterLoaded(**answer))


async def test_answers_that_nobody_asked_for_change_nothing() -> None:
    fleet = Fleet("d0")
    for version in (0, 1, 2**63):
        fleet.adapters.loaded("d0", worker_pb2.AdapterLoaded(name="a", version=version, fingerprint="f"))
        fleet.adapters.loaded("d9", worker_pb2.AdapterLoaded(name="a", version=version, fingerprint="f"))
    assert fleet.sent == []
    assert fleet.adapters.names == ()


async def test_a_worker_that_came_back_before_the_name_gets_it_later() -> None:
    fleet = Fleet("d0", "p0")
    fleet.silent.add("p0")
    load = asyncio.create_task(fleet.adapters.load("a", "f1"))
    await settled()
    fleet.lose("d0")  # it has loaded the adapter, and drops it with the stream
    fleet.attach("d0")
    fleet.silent.clear()
    fleet._follow("p0", fleet.commands("p0", LoadAdapter)[0])
    assert await load == "f1"
    await settled()
    assert len(fleet.commands("d0", LoadAdapter)) == 2
    assert fleet.meanings("a") == {"f1"}
