"""Captures a decode step for every bucket once, and replays it: one launch instead of some hundred."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from pdserve.engine.gpu.plain_rows import no_rows
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.gpu.switches import gpu_switches

log = logging.getLogger(__name__)

CaptureProgress = Callable[[int, int], None]  # graphs captured, graphs in all


class Replays(Protocol):
    buckets: tuple[int, ...]

    def replay(self, bucket: int) -> None:
        """Queues the step in the buffers, for that many rows."""
        ...


@final
class EagerReplays:
    """Without graphs: launches the same step kernel by kernel. For machines without CUDA, and for comparison with
    graphs or instead of them."""

    def __init__(self, decode: StaticDecode, buckets: Sequence[int], num_queries: int = 1) -> None:
        self.buckets = tuple(buckets)
        self._decode, self._num_queries = decode, num_queries

    def replay(self, bucket: int) -> None:
        self._decode.run(bucket, self._num_queries)


@final
class GraphReplays:
    """All graphs share one memory pool; the largest is captured first, so that the others fit into its memory."""

    def __init__(
        self,
        decode: StaticDecode,
        buckets: Sequence[int],
        progress: CaptureProgress = lambda done, count: None,
        num_queries: int = 1,
    ) -> None:
        """`num_queries`: maximum tokens per row; if above 1, buckets count tokens."""
        self.buckets = tuple(sorted(buckets))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        began_s = time.monotonic()
        # A graph's kernels keep the priority of the capture stream, which is above that of transfers.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())  # earlier work may still clear the buffers
        with torch.cuda.stream(stream):
            for bucket in reversed(self.buckets):
                if num_queries == 1:
                    decode.inputs.send(no_rows(), bucket)
                else:
                    decode.inputs.send_drafted([], [], bucket)
                decode.run(
                    bucket, num_queries
                )  # compiles kernels and lets cuBLAS choose algorithms; neither may happen during a capture
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Transfer threads also call CUDA; their calls must not invalidate the capture.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    decode.run(bucket, num_queries)
                self._graphs[bucket] = graph
                progress(len(self._graphs), len(self.buckets))
        log.info(
            "decode graphs captured",
            extra={"graphs": len(self._graphs), "capture_s": round(time.monotonic() - began_s, 2)},
        )

    def replay(self, bucket: int) -> None:
        self._graphs[bucket].replay()


def make_replays(
    decode: StaticDecode,
    buckets: Sequence[int],
    progress: CaptureProgress = lambda done, count: None,
    num_queries: int = 1,
) -> Replays:
    """Graphs, or the same steps without them if the switch says so."""
    if gpu_switches().steps == "eager":
        log.warning("decode steps run kernel by kernel, as a switch of the GPU engine says")
        return EagerReplays(decode, buckets, num_queries)
    return GraphReplays(decode, buckets, progress, num_queries)
