"""A transport is added by its file alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvtransfer
from kvtransfer.transports.common.registry import NAMES, TRANSPORTS, choose
from pdserve.config import TRANSPORT_FILES
from pdserve.config import TRANSPORTS as CHOICES

ROOT = Path(kvtransfer.__file__).parents[1]
ADDED = """
from kvtransfer.transports.common.interface import OnHost
from kvtransfer.transports.tcp import TcpListener, TcpReceive, TcpSend


class Added(OnHost, TcpListener):
    kind, name, order, has_slots = 2**31 - 1, "added", 0, False

    def sender(self, sock, pool):
        return sock, TcpSend()

    def receiver(self, link):
        return TcpReceive(link)


TRANSPORT = Added()
"""
#: A receiver with all transports, and a sender with the new one and tcp.
MOVE = """
from kvtransfer.link.endpoint import make_receiver, make_sender
from pdserve.cli.main import make_parsers
from tests.support.transfer_ends import GrpcHost, HostPool, endpoint_config, fingerprint
from tests.unit.kvtransfer.harness import Heard, Pair
from pdserve.core.kv.stamps import BlockStamps

[flag] = [one for one in make_parsers(["up"])[1]["up"]._actions if "--transport" in one.option_strings]
assert "added" in flag.choices
pools, stamps = (HostPool(4, seed=1), HostPool(4)), (BlockStamps(4), BlockStamps(4))
sending = endpoint_config(pools[0], fingerprint(), worker_id="p0", incarnation="p0-1", transport="auto")
receiving = endpoint_config(pools[1], fingerprint(), worker_id="d0", incarnation="d0-1", transport="auto")
receiver, sender = make_receiver(receiving, "127.0.0.1"), make_sender(sending)
host = GrpcHost(receiver.servicer)
pair = Pair("auto", *pools, receiver, sender, host, *stamps)
grant = pair.grant((2, 0))
received, _ = pair.move(grant, (1, 3))
pair.assert_equal(grant, (1, 3))
print(received.outcome.value, *(link.transport for link in sender.links))
sender.close()
receiver.close()
host.stop()
"""


def test_each_file_is_one_transport() -> None:
    assert sorted(one.name for one in TRANSPORTS.values()) == list(TRANSPORT_FILES)
    assert sorted(CHOICES) == sorted(NAMES)


@pytest.mark.parametrize("name", TRANSPORT_FILES)
def test_a_name_is_one_transport(name: str) -> None:
    [found] = [one for one in TRANSPORTS.values() if one.name == name]
    if not found.why_not(is_on_host=found.is_for_hosts):
        assert name in [one.name for one in choose(name, is_on_host=found.is_for_hosts)]


def test_a_new_file_is_a_transport(tmp_path: Path) -> None:
    """It moves KV, `auto` prefers it, and the command offers it."""
    for name in ("pdserve", "tests", "router", "prefill_worker", "decode_worker", "simulator", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    transports = tmp_path / "kvtransfer" / "transports"
    shutil.copytree(ROOT / "kvtransfer" / "transports", transports)
    for one in (ROOT / "kvtransfer").iterdir():
        if one.name != "transports":
            (tmp_path / "kvtransfer" / one.name).symlink_to(one)
    (transports / "added.py").write_text(ADDED)
    done = subprocess.run(
        [sys.executable, "-c", MOVE], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == "verified added\n", done.stderr
