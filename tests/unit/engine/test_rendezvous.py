"""Ranks that join from another host (127.0.0.2 here): authentication, settings, and detection of lost ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.engine.model.collectives import Ranks, make_store
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks import leader as parallel
from pdserve.engine.ranks import rendezvous
from pdserve.engine.ranks.leader import check_weights
from pdserve.engine.ranks.rejected_joins import rejected_joins
from pdserve.engine.ranks.rendezvous import Membership, Rendezvous, own_address
from pdserve.launch.local import with_ports
from pdserve.launch.ports import HeldPorts
from pdserve.launch.spec import ClusterSpec, processes
from pdserve.listening import HELD_ENV
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import rank_pb2_grpc
from tests.cluster.cluster import free_ports
from tests.support.tls_files import TestAuthority

TEXT = "a secret of the tests, 32 letters"
SECRET = ClusterSecret(TEXT)
OTHER = ClusterSecret("another secret, of another cluster")
FLAGS = ("--model=m", "--worker-id=d0")


def free_address(host: str = "127.0.0.1") -> str:
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


class Leader:
    """A store and its rendezvous, for ranks 1 to `size` - 1."""

    def __init__(self, size: int = 2, address: str = "", tls: ReloadingCertificates | None = None) -> None:
        self.store = make_store(0, size, is_leader=True, timeout_s=60.0)
        self._before = Counter(rejected_joins())
        address = address or free_address()
        self.rendezvous = Rendezvous(address, SECRET, self.store.port, range(1, size), FLAGS, tls)
        self.address = self.rendezvous.address
        self.ranks = self.rendezvous.ranks

    @property
    def rejected(self) -> dict[str, int]:
        return dict(Counter(rejected_joins()) - self._before)


@pytest.fixture
def lead() -> Iterator[Callable[..., Leader]]:
    made: list[Leader] = []

    def make(*args: Any) -> Leader:
        made.append(Leader(*args))
        return made[-1]

    yield make
    for one in made:
        one.rendezvous.close()


class Joined:
    """A membership, and why its leader was lost."""

    def __init__(self, address: str, secret: ClusterSecret = SECRET, wait_s: float = 60.0) -> None:
        self.lost: list[str] = []
        self.is_lost = threading.Event()
        self.membership = Membership(address, secret, wait_s, self._on_lost)

    def _on_lost(self, why: str) -> None:
        self.lost.append(why)
        self.is_lost.set()


def wait_for(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_joined_ranks_get_places_settings_and_the_store(lead: Callable[..., Leader]) -> None:
    leader = lead(3)
    one, two = Joined(leader.address).membership, Joined(leader.address).membership
    assert (one.rank, two.rank) == (1, 2)
    assert tuple(one.flags) == FLAGS
    store = make_store(one.store_port, 3, is_leader=False, timeout_s=60.0)
    store.set("big", "x" * 300_000)
    assert leader.store.get("big") == b"x" * 300_000
    with pytest.raises(ConfigError, match="all 2 ranks from other hosts have joined already"):
        Joined(leader.address)
    assert leader.rejected == {"ALL_JOINED": 1}
    one.leave("the model is not here")
    wait_for(lambda: not leader.ranks[1].is_alive)
    with pytest.raises(ConfigError, match=r"rank 1 of .* left: the model is not here"):
        leader.ranks[1].check()
    leader.ranks[2].check()
    with pytest.raises(ConfigError, match=r"no server answers in 0 s .*a rank has left, so this worker ends"):
        Joined(leader.address, wait_s=0.0)  # And it retries if it has time.
    assert leader.rejected == {"ALL_JOINED": 1, "RANK_LOST": 1}
    two.leave()


def test_leader_and_ranks_detect_each_others_end(lead: Callable[..., Leader]) -> None:
    leader = lead(3)
    one, two = Joined(leader.address), Joined(leader.address)
    one.membership._channel.close()  # Like the end of its process.
    wait_for(lambda: not leader.ranks[1].is_alive)
    leader.rendezvous.close()
    assert two.is_lost.wait(60.0)
    assert len(two.lost) == 1
    two.membership.leave()
    assert len(two.lost) == 1


def test_a_connection_to_the_store_during_the_leave_is_closed(lead: Callable[..., Leader]) -> None:
    membership = Joined(lead().address).membership
    membership.leave()
    ours, theirs = socket.socketpair()
    with ours:
        membership._carry(theirs)
        assert ours.recv(1) == b""


def test_the_store_requires_the_secret(lead: Callable[..., Leader]) -> None:
    leader = lead()
    with pytest.raises(Unauthenticated, match="did not prove"):
        Joined(leader.address, OTHER)
    with grpc.insecure_channel(leader.address) as channel:
        stub = rank_pb2_grpc.RendezvousServiceStub(channel)
        for call in (stub.Join, stub.ReachStore):
            with pytest.raises(grpc.RpcError) as caught:
                next(call(iter(())))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert leader.rejected == {"UNAUTHENTICATED": 2}
    assert not leader.ranks[1].peer


def test_a_failed_join_is_reported_in_time(lead: Callable[..., Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = free_address()
    with pytest.raises(ConfigError, match=f"{nobody}: no server answers in 0 s"):
        Joined(nobody, wait_s=0.0)
    leader = lead()
    with pytest.raises(ConfigError, match=r"rendezvous: .*\(port in use\)"):
        Rendezvous(leader.address, SECRET, leader.store.port, [1], FLAGS)
    with pytest.raises(ConfigError, match="an address of this machine"):
        Rendezvous("192.0.2.1:7000", SECRET, leader.store.port, [1], FLAGS)
    monkeypatch.setattr(rendezvous, "FULL_VERSION", "0.0.1+a")
    monkeypatch.setattr(rendezvous, "VERSION", "0.0.2")
    with pytest.raises(ConfigError, match=r"version: got .0\.0\.1\+a., expected .0\.0\.2."):
        Joined(leader.address)
    assert leader.rejected == {"VERSION": 1}


def test_a_leader_that_starts_later_is_joined(lead: Callable[..., Leader]) -> None:
    address = free_address()
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(Joined, address)
        time.sleep(0.2)  # It joins, whether the first call comes before or after the start.
        leader = lead(2, address)
        assert joined.result(60.0).membership.rank == 1
    assert leader.ranks[1].peer


def test_a_leader_listens_beside_its_launcher(lead: Callable[..., Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher keeps the port of a rendezvous, so that no other user can bind it while the worker restarts."""
    address = f"127.0.0.1:{free_ports(2)}"  # a worker adds its number, and connections take ports like free_address
    spec = ClusterSpec(
        model="toy",
        port=0,
        cluster_secret=TEXT,
        settings={"decode_worker": {"rendezvous": address, "tensor_parallel": 2, "local_ranks": 1}},
    )
    held = HeldPorts()
    [address] = [one.config.rendezvous for one in processes(with_ports(spec, held)) if one.name == "d0"]
    port = int(address.rpartition(":")[2])
    try:
        assert port in held.ports
        with pytest.raises(ConfigError, match=rf"rendezvous: got {port} \(port in use\)"):
            lead(2, address)
        monkeypatch.setenv(HELD_ENV, str(port))
        leader = lead(2, address)
        assert Joined(address).membership.rank == 1
        leader.rendezvous.close()
    finally:
        held.release()


def test_a_host_knows_its_address_towards_another() -> None:
    assert own_address("127.0.0.1:7000") == "127.0.0.1"
    with pytest.raises(ConfigError, match="HOST:PORT that this host reaches"):
        own_address("nowhere.invalid:1")
    with pytest.raises(ConfigError, match="rendezvous: got 'nowhere', expected HOST:PORT with"):
        own_address("nowhere")


@pytest.mark.parametrize("secrets", [(SECRET, SECRET), (SECRET, OTHER)])
def test_rank_groups_require_the_secret(secrets: Sequence[ClusterSecret]) -> None:
    """gloo accepts any connection: a rank that found a false store, or a foreign process in place of a rank."""
    leader = make_store(0, 2, is_leader=True, timeout_s=60.0)

    def meet(rank: int) -> int:
        store = make_store(leader.port, 2, is_leader=False, timeout_s=60.0) if rank else leader
        host = f"127.0.0.{1 + rank}"
        ranks = Ranks(Shard(rank, 2), store, torch.device("cpu"), 20.0, host, secrets[rank])
        return ranks.minimum(7 - rank)

    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(meet, rank) for rank in (0, 1)]
        if secrets[0] is secrets[1]:
            assert [one.result(60.0) for one in found] == [6, 6]
        else:
            for one in found:
                with pytest.raises(Unauthenticated, match="does not know the secret of the ranks"):
                    one.result(60.0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"local_ranks": 1}, "local_ranks: got 1, expected 2 ranks, or a rendezvous"),
        ({"rendezvous": "h", "local_ranks": 1}, "rendezvous: got 'h', expected HOST:PORT"),
        ({"rendezvous": "h:0", "local_ranks": 1}, "a port from 1 to 65535"),
        ({"rendezvous": "127.0.0.1:7"}, "local_ranks: got 0, expected 1 to 1 of 2"),
        ({"rendezvous": "127.0.0.1:7", "local_ranks": 2}, "local_ranks: got 2, expected 1 to 1 of 2"),
        ({"rendezvous": "10.0.0.1:7", "local_ranks": 1}, "host: got 127.0.0.1, expected an address that other hosts"),
    ],
)
def test_unusable_rendezvous_settings_are_rejected(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        WorkerConfig(model="toy", worker_id="w", tensor_parallel=2, **settings)


BUNDLED = Path(__file__).parents[3] / "pdserve/models/stdlib-5m"


def test_a_rank_that_never_comes_ends_the_start(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "MEET_S", 0.2)
    address = free_address()
    remote = {"tensor_parallel": 2, "local_ranks": 1, "rendezvous": address}
    with pytest.raises(ConfigError, match=f"rank 1 has not joined at {address} in 0 s, expected `pdserve rank"):
        open_engine(BUNDLED, cluster_secret=TEXT, **remote)
    with pytest.raises(ConfigError, match="cluster_secret"):
        open_engine(BUNDLED, **remote)
    assert isinstance(Leader(2, address).rendezvous, Rendezvous), "the address is free again"


def test_another_checkpoint_on_another_host_is_rejected(lead: Callable[..., Leader]) -> None:
    """Parts of two models would compute together and give wrong results."""
    leader = lead(3)
    for rank, name in ((1, "a" * 64), (2, "b" * 64)):
        leader.store.set(f"loaded/{rank}", name)
    ranks = list(leader.ranks.values())
    check_weights(leader.store, ranks[:1], "a" * 64)
    with pytest.raises(ConfigError, match=r"rank 2 \(bbbbbbbbbbbbbbbb\) .*, expected the same files on every host"):
        check_weights(leader.store, ranks, "a" * 64)


def test_ranks_join_over_tls_with_a_certificate_of_the_cluster(lead: Callable[..., Leader], tmp_path: Path) -> None:
    ours, other = TestAuthority(tmp_path / "ours"), TestAuthority(tmp_path / "other", "another CA")
    leader = lead(2, "", ours.tls("leader"))
    for tls, why in (
        (None, "may require TLS"),
        (other.tls("stranger"), "not from a CA that this side trusts"),
    ):
        with pytest.raises(ConfigError, match=why):
            Membership(leader.address, SECRET, 0.0, lambda reason: None, tls)
    assert not leader.ranks[1].peer
    membership = Membership(leader.address, SECRET, 20.0, lambda reason: None, ours.tls("rank"))
    assert (membership.rank, membership.flags) == (1, list(FLAGS))
    with socket.create_connection(("127.0.0.1", membership.store_port)):
        membership.leave()
