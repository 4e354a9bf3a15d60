"""Combines the senders, or the receivers, of a worker's ranks into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvtransfer.grants import fingerprint_of
from kvtransfer.joined import JoinedReceiver, JoinedSender
from kvtransfer.rank_link import RankLink, RemoteReceiver, RemoteSender
from kvtransfer.transport import RankReceiver, RankSender, Receiver, Sender
from pdserve.core.proof import ClusterSecret, Identity
from pdserve.core.stamps import BlockStamps
from pdserve.engine.interface import Engine
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import rank_pb2

OPEN_S: Final = 120.0  # the kernels for device copies are compiled in this time


def joined_receiver(
    local: RankReceiver,
    engine: Engine,
    stamps: BlockStamps,
    secret: ClusterSecret,
    worker_id: str,
    incarnation: str,
    tls: ReloadingCertificates | None = None,
) -> Receiver:
    """`local` is this process's receiver. Raises ConfigError, and closes `local`, if a rank cannot be reached."""
    leader = Identity.of(secret, "leader", worker_id, incarnation)
    links = _links(local, engine, leader, incarnation, tls, is_sender=False)
    if not links:
        return local
    _send_epochs(engine, stamps)
    ranks: list[RankReceiver] = [local, *(RemoteReceiver(link, stamps) for link in links)]
    return JoinedReceiver(ranks, [link.endpoint for link in links], engine.spec.tp_degree)


def joined_sender(
    local: RankSender,
    engine: Engine,
    stamps: BlockStamps,
    secret: ClusterSecret,
    worker_id: str,
    incarnation: str,
    tls: ReloadingCertificates | None = None,
) -> Sender:
    """`local` is this process's sender. Raises ConfigError, and closes `local`, if a rank cannot be reached.

    Also used for a worker of one rank, because a decode worker may have several.
    """
    leader = Identity.of(secret, "leader", worker_id, incarnation)
    links = _links(local, engine, leader, incarnation, tls, is_sender=True)
    if links:
        _send_epochs(engine, stamps)
    ranks: list[RankSender] = [local, *(RemoteSender(link, stamps) for link in links)]
    return JoinedSender(ranks, fingerprint_of(engine.spec).shape, is_on_host=engine.pool.is_on_host)


def _links(
    local: RankReceiver | RankSender,
    engine: Engine,
    leader: Identity,
    incarnation: str,
    tls: ReloadingCertificates | None,
    *,
    is_sender: bool,
) -> list[RankLink]:
    links: list[RankLink] = []
    opening = rank_pb2.OpenEndpoint(incarnation=incarnation, is_sender=is_sender)
    try:
        for rank, address in enumerate(getattr(engine, "rank_addresses", ()), 1):
            links.append(RankLink(rank, address, leader, opening, OPEN_S, tls))
    except BaseException:
        for link in links:
            link.close()
        local.close()
        raise
    return links


def _send_epochs(engine: Any, stamps: BlockStamps) -> None:
    send_epochs: Callable[[BlockStamps], None] = engine.send_epochs
    send_epochs(stamps)
