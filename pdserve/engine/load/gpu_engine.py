"""An engine on a GPU: attention and the operations around products in Triton, and decode steps that replay graphs, or
the reason why they cannot. Needs Triton."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.gpu.engine import GraphEngine
from pdserve.engine.gpu.few_rows import open_few_rows, sites_of
from pdserve.engine.gpu.graphs import GraphReplays, StaticDecode, make_replays
from pdserve.engine.gpu.kernels import ops
from pdserve.engine.gpu.kernels.attention_plan import MOST_QUERIES
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for, verified_tokens
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.gpu.resample import penalty_bytes
from pdserve.engine.gpu.triton_attention import takes_flash, triton_attention, use_fa3
from pdserve.engine.load.device import MeasureGraphs, Meter, use_device
from pdserve.engine.load.load_plan import LoadedRank, LoadPlan, takes_blocks
from pdserve.engine.memory.plan import graph_bytes
from pdserve.engine.model.config import ModelConfig, read_config
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.parameters import Weights
from pdserve.engine.torch_engine import TorchEngine
from pdserve.progress import PhaseReport

if TYPE_CHECKING:
    from pdserve.engine.model.collectives import Ranks

_MEASURED: Final = 2  # captures from which the memory of all is estimated

log = logging.getLogger(__name__)


def make_decoder(plan: LoadPlan, weights: Weights, ranks: Ranks | None) -> Decoder:
    device, config = plan.facts.device, plan.model
    model = Decoder(config, weights, ranks, ops)
    sites, processors = sites_of(weights), _num_processors(device)
    model.products = open_few_rows(gpu_switches().products, model.products, sites, device, processors)
    return model


def assemble(rank: LoadedRank, num_blocks: int) -> TorchEngine:
    plan, model, device = rank.plan, rank.model, rank.plan.facts.device
    spec, pool = plan.spec(num_blocks), rank.pool(num_blocks)
    most_positions = None
    if takes_flash(model.heads, model.dtype):
        use_fa3(device)
        most_positions = spec.max_context_tokens
    make_attention = triton_attention(
        pool, model.heads, model.dtype, spec.max_context_tokens, _num_processors(device), most_positions
    )
    return TorchEngine(spec, model, pool, rank.grammars, make_attention, MOST_QUERIES)


def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# --- graphs ---------------------------------------------------------------------------------------------------


def takes_graphs(config: WorkerConfig, role: Role) -> bool:
    """Whether a worker on a GPU runs its decode steps as graphs; a logged warning gives the reason if it cannot."""
    if role is not Role.DECODE or not config.cuda_graphs:
        return False
    reason = why_no_graphs(read_config(Path(config.model)), config.block_size)
    if reason:
        log.warning("decode steps run without CUDA graphs", extra={"reason": reason})
    return not reason


def graphs_meter(config: WorkerConfig) -> MeasureGraphs:
    """Measures the memory that `open_graphs` will use."""
    return partial(measure_graphs, most_rows=config.max_batch, most_drafts=_most_drafts(config))


def open_graphs(eager: TorchEngine, config: WorkerConfig) -> GraphEngine:
    """Tensor-parallel ranks call it together, because their graphs contain all-reduces."""
    return with_graphs(eager, config.max_batch, config.worker_id, _most_drafts(config))


def _most_drafts(config: WorkerConfig) -> int:
    return config.max_drafts if config.speculation == "ngram" else 0


def why_no_graphs(config: ModelConfig, block_size: int) -> str:
    """Empty if decode steps of the model can be captured."""
    if config.experts is not None:
        return "experts: how many tokens each one gets is decided on the host"
    if not takes_blocks(block_size):
        return f"block_size {block_size}: the kernels take powers of two from 8 on"
    return ""


def with_graphs(eager: TorchEngine, most_rows: int, worker_id: str, most_drafts: int = 0) -> GraphEngine:
    """Captures the decode step for every bucket up to `most_rows`, with a progress line; and for every bucket of
    tokens, if rows may have up to `most_drafts` drafts."""
    decode, most_tokens = _static(eager, most_rows, most_drafts)
    replays = make_replays(decode, buckets_for(most_rows), PhaseReport(worker_id, "decode graphs", "graphs"))
    verify = None
    if decode.most_queries > 1:
        line = PhaseReport(worker_id, "draft graphs", "graphs")
        verify = make_replays(decode, buckets_for(most_tokens), line, decode.most_queries)
    return GraphEngine(eager, decode, replays, verify)


def measure_graphs(eager: TorchEngine, meter: Meter, *, most_rows: int, most_drafts: int = 0) -> int:
    """Bytes that `with_graphs` will take, from the two largest captures of each set over the engine's own pool.

    Includes the token counts for rows with penalties, which are allocated when such rows come.
    """
    meter.settle()
    before = meter.reserved()
    decode, most_tokens = _static(eager, most_rows, most_drafts)
    if gpu_switches().steps == "eager":
        return penalty_bytes(most_tokens, eager.spec.vocab_size)
    after: list[int] = []

    def note(_done: int, _count: int) -> None:
        meter.settle()
        after.append(meter.reserved())

    buckets = buckets_for(most_rows)
    replays = GraphReplays(decode, buckets[-_MEASURED:], note)
    taken = graph_bytes(before, after, len(buckets))
    if decode.most_queries > 1:
        before, after = after[-1], []
        drafted = buckets_for(most_tokens)
        verify = GraphReplays(decode, drafted[-_MEASURED:], note, decode.most_queries)
        taken += graph_bytes(before, after, len(drafted))
        del verify
    del replays
    return taken + penalty_bytes(most_tokens, eager.spec.vocab_size)


def _static(eager: TorchEngine, most_rows: int, most_drafts: int) -> tuple[StaticDecode, int]:
    """The static buffers, and the most tokens of a step with drafts."""
    most_queries = 1 << most_drafts.bit_length()  # each number of queries needs its own kernel
    most_tokens = verified_tokens(most_rows, most_queries)
    device = eager.pool.tensor.device
    use_device(device)
    decode = StaticDecode(
        eager.model,
        eager.pool,
        most_rows=most_rows,
        max_context_tokens=eager.spec.max_context_tokens,
        vocab_size=eager.spec.vocab_size,
        num_processors=_num_processors(device),
        most_tokens=most_tokens,
        most_queries=most_queries,
    )
    return decode, most_tokens
