"""For tests of programs that call pdserve: a real cluster in this process, and answers without any cluster.

    from pdserve.testing import Cluster, MockTransport, toy_answer

`Cluster` runs a router and workers with the toy model, and needs the extra `server`. `MockTransport` answers a client's
calls with a function, and needs nothing beside the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.testing.mock_transport import MockTransport as MockTransport

if TYPE_CHECKING:
    from pdserve.testing.cluster import Cluster as Cluster
    from pdserve.testing.cluster import toy_answer as toy_answer

__all__ = ["Cluster", "MockTransport", "toy_answer"]


def __getattr__(name: str) -> Any:
    if name not in ("Cluster", "toy_answer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdserve.testing import cluster  # at first use, because it needs the packages of the extra `server`

    return getattr(cluster, name)
