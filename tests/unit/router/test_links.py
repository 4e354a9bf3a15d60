"""The KV connections between workers, as the router stores them for operators and traces."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.v1 import worker_pb2
from router.service.worker_reports import MAX_ID_CHARS, MAX_LINKS, KvLinks


def link(decode_worker: str, transport: str = "shm", reason: str = "first choice") -> worker_pb2.KvLink:
    return worker_pb2.KvLink(decode_worker=decode_worker, transport=transport, reason=reason)


def test_a_link_is_kept_until_either_worker_is_lost() -> None:
    links = KvLinks()
    links.reported("p0", [link("d0"), link("d1", "tcp")])
    links.reported("p1", [link("d0", "tcp")])
    assert [one.transport for one in links.of("p0")] == ["shm", "tcp"]
    assert links.between("p1", "d1") is None
    links.reported("p0", [link("d1", "nixl")])
    assert links.between("p0", "d0") is None
    assert links.between("p0", "d1") == link("d1", "nixl")
    links.forget("d1")
    assert list(links.of("p0")) == []
    links.forget("p1")
    assert links.between("p1", "d0") is None


@pytest.mark.parametrize(
    "told", [[link(f"d{i}") for i in range(MAX_LINKS + 1)], [link("d0", reason="x" * (MAX_ID_CHARS + 1))]]
)
def test_an_oversized_link_report_is_rejected(told: list[worker_pb2.KvLink]) -> None:
    links = KvLinks()
    with pytest.raises(InvalidRequest, match="kv_links"):
        links.reported("p0", told)
    assert list(links.of("p0")) == []
