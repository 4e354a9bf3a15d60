"""The codec of the live view's frames."""

from __future__ import annotations

from typing import Final

from pdserve.core import live
from pdserve.v1 import cluster_pb2
from pdserve.wire.codec import Codec

#: Lenient, because the times of a router's clock have no bound.
FRAME: Final = Codec(
    live.LiveFrame,
    cluster_pb2.LiveFrame,
    nested=(
        Codec(live.LiveTotals, cluster_pb2.LiveTotals),
        Codec(live.LiveWorker, cluster_pb2.LiveWorker, is_lenient=True),
        Codec(
            live.LiveRequest,
            cluster_pb2.LiveRequest,
            nested=(Codec(live.LivePhases, cluster_pb2.LivePhases),),
            is_lenient=True,
        ),
    ),
    is_lenient=True,
)
