"""One decode step over static buffers, from input tokens to sampled tokens. It is captured once for every bucket of
rows, then replayed: one launch instead of some hundred."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from pdserve.engine.gpu.inputs import Inputs
from pdserve.engine.gpu.kernels.attention_plan import AttentionScratch, Rows, prepare
from pdserve.engine.gpu.kernels.sampling import Sampler
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.gpu.plain_rows import no_rows
from pdserve.engine.gpu.triton_attention import LayerKernels
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.parameters import LayerWeights

# --- the step -------------------------------------------------------------------------------------------------
# The host decides nothing in it, and nothing waits: a row's token may be the one that the previous step sampled, block
# tables are on the device, and padding rows attend to nothing and store nothing.

# Shapes: B rows of a bucket, S sequence slots, P pages of a table, N query, key and value heads, D head dim.


@final
class GraphAttention:
    """The attention of one bucket."""

    read_U: Tensor | None = None

    def __init__(
        self,
        kernels: LayerKernels,
        rows: Rows,
        scratch: AttentionScratch,
        token_B: Tensor,
        slot_B: Tensor,
        position_B: Tensor,
    ) -> None:
        self.token_T = token_B
        self._kernels, self._rows, self._scratch = kernels, rows, scratch
        self._slot_B, self._position_B = slot_B, position_B

    def forward(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        q_THD = self._kernels.place(index, layer, qkv_TND, self._slot_B, self._position_B)
        return self._kernels.attend(index, layer, q_THD, self._rows, self._scratch)


@final
class StaticDecode:
    """All buffers of the decode steps of one engine. `num_processors`: multiprocessors of the device."""

    def __init__(
        self,
        model: Decoder,
        pool: TorchPool,
        *,
        most_rows: int,
        max_context_tokens: int,
        vocab_size: int,
        num_processors: int,
        most_tokens: int = 0,
        most_queries: int = 1,
    ) -> None:
        """`most_tokens`: maximum of a step with drafts, with up to `most_queries` tokens per row; 0 without drafts."""
        device = pool.tensor.device
        most_tokens = max(most_tokens, most_rows)
        self.most_queries = most_queries
        self._model = model
        self.num_seq_slots = 2 * most_rows  # the results of the running step must persist while the next one writes
        self.num_pages = -(-max_context_tokens // pool.block_size)
        self.inputs = Inputs(most_tokens, pool.block_size, device, self.num_seq_slots)
        self.table_SP = torch.zeros((self.num_seq_slots, self.num_pages), dtype=torch.int32, device=device)
        self._token_B = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self.sampled_B = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self.logprob_B = torch.zeros(most_tokens, dtype=torch.float32, device=device)
        # They persist after the step, for the rows that are sampled again. The sampler reads any float dtype.
        self.logits_BV = torch.zeros((most_tokens, vocab_size), dtype=model.logits_dtype, device=device)
        self._kernels = LayerKernels(pool, model.heads, model.dtype, max_context_tokens)
        self._num_processors = num_processors
        self._scratches: dict[int, AttentionScratch] = {}  # by queries per row; captured graphs contain their addresses
        self.sampler = Sampler(most_tokens, vocab_size, device, num_processors)

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples."""
        return self._model.is_leader

    def _scratch(self, num_queries: int) -> AttentionScratch:
        if num_queries not in self._scratches:
            self._scratches[num_queries] = self._kernels.make_scratch(num_queries, self._num_processors)
        return self._scratches[num_queries]

    @torch.inference_mode()
    def run(self, bucket: int, num_queries: int = 1) -> None:
        """Computes the step in `inputs`, of rows with up to `num_queries` tokens, `bucket` tokens in all.

        Fills rows 0 .. bucket - 1 of `logits_BV`, and `sampled_B` and `logprob_B` with their plain samples. With
        tensor-parallel ranks the first one samples, and sends the tokens to the others with the next step, because
        every rank needs the token of a row that is continued, even if it was sampled again after the step.
        """
        field = self.inputs.field
        self._model.broadcast(self.sampled_B)
        token_B = self._token_B[:bucket]
        start_B, length_B, scratch = field("start", bucket), field("length", bucket), self._scratch(num_queries)
        division = self._kernels.division(self._model.first_window, num_queries, scratch)
        table_BP, work = prepare(
            field("follows", bucket),
            self.sampled_B,
            field("token", bucket),
            field("seq_slot", bucket),
            self.table_SP,
            token_B,
            start_B,
            length_B,
            division,
        )
        rows = Rows(
            num_queries=num_queries,
            table_BP=table_BP,
            start_B=start_B,
            length_B=length_B,
            first_B1=field("first", bucket + 1) if num_queries > 1 else None,
        )
        rows.work[division] = work
        attention = GraphAttention(
            self._kernels,
            rows,
            scratch,
            token_B,
            field("slot", bucket),
            field("position", bucket),
        )
        logits_BV = self._model.logits(self._model.hidden(attention), self.logits_BV[:bucket])
        if not self._model.is_leader:
            return
        out = self.sampled_B[:bucket], self.logprob_B[:bucket]
        self.sampler.draw(logits_BV, self.inputs.draws(bucket), out)


# --- capture and replay ---------------------------------------------------------------------------------------

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
