"""From a model folder to an engine, in three steps (`open_rank`).

plan        load_plan.py decides, from the settings, the files' headers and the device, or rejects the model
load        weights.py reads each tensor once, into its final form
assemble    cpu_engine.py or gpu_engine.py makes pool and kernels around the loaded weights
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.cpu import ops
from pdserve.engine.cpu.kernels import jit
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.interface import Engine
from pdserve.engine.load.checkpoint import OpenedModel, open_model
from pdserve.engine.load.checkpoint_files import Checkpoint, checkpoint_hash
from pdserve.engine.load.device import (
    CudaMeter,
    MeasureGraphs,
    Meter,
    available_bytes,
    choose_device,
    choose_precision,
    measure_use,
    reads_bfloat16_of,
    use_device,
)
from pdserve.engine.load.load_plan import Facts, LoadedRank, LoadPlan, block_shape, plan_rank, weight_bytes
from pdserve.engine.load.weights import dummy_hash, dummy_weights, load_weights
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.plan import (
    MemoryPlan,
    PoolUnit,
    device_blocks,
    device_plan,
    explicit_blocks,
    host_blocks,
    plain_plan,
    with_device_defaults,
)
from pdserve.engine.model.attention import EagerAttention
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.parameters import WHOLE, Shard, Weights
from pdserve.engine.model.rounded import weight_levels
from pdserve.engine.rows import warm_rows
from pdserve.engine.sampling.grammars import open_grammars
from pdserve.engine.torch_engine import TorchEngine
from pdserve.progress import PhaseReport

if TYPE_CHECKING:
    from pdserve.engine.model.collectives import Ranks

AnyEngine = TypeVar("AnyEngine", bound=Engine)

log = logging.getLogger(__name__)


def open_engine(config: WorkerConfig, role: Role) -> Engine:
    """The fastest engine for the device. Raises ModelError and ConfigError like `open_torch_engine`."""
    is_gpu = choose_device(config.device).type == "cuda"
    config = with_device_defaults(config, role, is_gpu=is_gpu)
    if not is_gpu:
        return open_torch_engine(config)
    from pdserve.engine.load.gpu_engine import graphs_meter, open_graphs, takes_graphs

    if not takes_graphs(config, role):
        return warmed(open_torch_engine(config), config.worker_id)
    eager = warmed(open_rank(config, graphs=graphs_meter(config)), config.worker_id)
    return open_graphs(eager, config)


def warmed(engine: AnyEngine, worker_id: str = "") -> AnyEngine:
    """Compiles every kernel of the engine's steps before the first request.

    Transfer endpoints do the same for their kernels (kvtransfer.transports.common.on_device).
    """
    began_s = time.monotonic()
    report, steps = PhaseReport(worker_id, "kernels", "steps"), list(warm_rows(engine.spec))
    for done, rows in enumerate(steps):
        report(done, len(steps))
        engine.step(rows)
    report(len(steps), len(steps))
    log.info("kernels are compiled", extra={"compile_s": round(time.monotonic() - began_s, 2)})
    return engine


def open_torch_engine(config: WorkerConfig) -> TorchEngine:
    """Raises ModelError if the folder cannot be served, ConfigError if the settings do not suit the model."""
    is_gpu = choose_device(config.device).type == "cuda"
    return open_rank(with_device_defaults(config, Role.PREFILL, is_gpu=is_gpu))


def open_rank(
    config: WorkerConfig,
    shard: Shard = WHOLE,
    ranks: Ranks | None = None,
    memory: HostMemory | None = None,
    *,
    graphs: MeasureGraphs | None = None,
    meter: Meter | None = None,
    device: torch.device | None = None,
) -> TorchEngine:
    """The part of the model that a tensor-parallel rank holds; all of it without ranks.

    `config` has a value for what depends on the device (with_device_defaults). `memory`: memory of the pool that all
    ranks share (`plan_shared_pool`), in which each stores its heads of whole blocks. Without it the rank has its own
    pool, whose blocks hold only its heads. `graphs` measures the decode graphs, if the pool takes the memory that they
    leave. `meter` measures the device's memory; None: a CUDA device's. `device` None: the GPU of this host with the
    rank's number, if any.
    """
    began_s = time.monotonic()
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    opened = open_model(Path(config.model), has_weights=config.load == "auto")
    if shard.rank == 0:
        for correction in opened.corrections:
            log.warning("config.json contradicts the tensors, which are followed", extra={"contradiction": correction})
    device = device or choose_device(config.device, shard.rank)
    if device.type == "cuda" and meter is None:
        meter = CudaMeter(device)

    facts = find_facts(config, opened, device, is_measured=meter is not None)
    plan = plan_rank(config, opened.config, shard, facts, shares_pool=memory is not None)

    load_began_s = time.monotonic()
    weights = load(plan, opened.checkpoint)
    load_s = time.monotonic() - load_began_s

    rank = LoadedRank(
        plan=plan,
        model=make_decoder(plan, weights, ranks),
        grammars=open_grammars(Path(config.model), plan.spec(plan.num_blocks or 1)),
        memory=memory,
        is_alone=ranks is None,
    )
    if plan.num_blocks is None:
        assert meter is not None
        memory_plan = measure_rank(rank, meter, ranks, graphs)
    else:
        memory_plan = plain_plan(str(device), facts.free_bytes, plan.weight_bytes, plan.num_blocks, plan.unit)
    engine = assemble(rank, memory_plan.kv_pool // plan.shape.block_bytes)
    engine.memory = memory_plan
    _log_loaded(engine, plan, opened.checkpoint, time.monotonic() - began_s, load_s)
    return engine


# --- plan -----------------------------------------------------------------------------------------------------


def find_facts(config: WorkerConfig, opened: OpenedModel, device: torch.device, *, is_measured: bool) -> Facts:
    """Makes the device current. Raises ConfigError if it cannot compute the dtype, and ModelError."""
    precision = choose_precision(config.dtype, device, opened.config.stored)
    if config.dtype == "auto" and device.type == "cpu" and precision.name != "float32":
        log.info(
            "uses the checkpoint's dtype, because this CPU has instructions for it; --dtype float32 is more exact",
            extra={"dtype": precision.name},
        )
    use_device(device)
    folder, checkpoint = Path(config.model), opened.checkpoint
    choices = (f"integers to {weight_levels()}",) if precision.rounding in ("int8", "int4") else ()
    reads_bfloat16 = reads_bfloat16_of(checkpoint, device, precision.compute, precision.rounding)
    weights_hash = checkpoint_hash(folder, checkpoint, *choices) if checkpoint else dummy_hash(folder, device, *choices)
    return Facts(
        device=device,
        precision=precision,
        free_bytes=available_bytes(device),  # last: the steps before it take memory, for kernels and on the device
        has_triton=is_triton(device),
        has_paged=device.type == "cpu" and jit.is_available(),
        heads_first=stores_heads_first(device),
        is_measured=is_measured,
        reads_bfloat16=reads_bfloat16,
        weights_hash=weights_hash,
    )


def is_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def stores_heads_first(device: torch.device) -> bool:
    """Whether a head's tokens are contiguous within a block of the device's pool."""
    return is_triton(device) and gpu_switches().layout == "heads"


# --- load -----------------------------------------------------------------------------------------------------


def load(plan: LoadPlan, checkpoint: Checkpoint | None) -> Weights:
    """Reads the checkpoint, or generates weights for `--load dummy`. The first rank reports its progress."""
    config, device, precision = plan.config, plan.facts.device, plan.facts.precision
    is_deterministic = config.deterministic == "on"
    if checkpoint is None:
        return dummy_weights(
            plan.model,
            device,
            precision.compute,
            rounding=precision.rounding,
            is_deterministic=is_deterministic,
            shard=plan.shard,
        )
    return load_weights(
        plan.model,
        checkpoint,
        device,
        precision.compute,
        PhaseReport(config.worker_id, "weights", "bytes") if plan.shard.rank == 0 else None,
        rounding=precision.rounding,
        is_deterministic=is_deterministic,
        shard=plan.shard,
    )


# --- assemble -------------------------------------------------------------------------------------------------
# With Triton or the paged kernel, the device's file assembles. Else attention gathers the blocks of each row, which
# works everywhere: on a CPU without numba, over fp8 KV, on a GPU without Triton, and with blocks of any size.


def make_decoder(plan: LoadPlan, weights: Weights, ranks: Ranks | None) -> Decoder:
    if plan.facts.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for tens of milliseconds for every new length
    if plan.facts.has_triton:
        from pdserve.engine.load import gpu_engine  # needs Triton

        return gpu_engine.make_decoder(plan, weights, ranks)
    return Decoder(plan.model, weights, ranks, ops)


def assemble(rank: LoadedRank, num_blocks: int) -> TorchEngine:
    """The engine over a new pool."""
    match rank.plan.attention:
        case "triton":
            from pdserve.engine.load import gpu_engine  # needs Triton

            return gpu_engine.assemble(rank, num_blocks)
        case "paged":
            from pdserve.engine.load import cpu_engine  # needs numba

            return cpu_engine.assemble(rank, num_blocks)
        case "gathered":
            model, pool = rank.model, rank.pool(num_blocks)
            return TorchEngine(
                rank.plan.spec(num_blocks),
                model,
                pool,
                rank.grammars,
                lambda batch, on_layer: EagerAttention(batch, pool, model.heads, None, on_layer),
                most_short=0,
            )


def measure_rank(rank: LoadedRank, meter: Meter, ranks: Ranks | None, graphs: MeasureGraphs | None) -> MemoryPlan:
    """The pool takes the memory that the largest steps and the graphs leave. All ranks choose the same blocks."""
    plan, config = rank.plan, rank.plan.config
    device, share = str(plan.facts.device), config.gpu_memory_share
    agree = int if ranks is None else ranks.minimum
    use = measure_use(
        meter,
        device,
        partial(assemble, rank),
        plan.unit,
        share=share,
        context_tokens=config.max_context_tokens or plan.model.max_context_tokens,
        max_batch=config.max_batch,
        max_batch_tokens=config.max_batch_tokens,
        is_leader=plan.shard.rank == 0,
        agree=agree,
        measure_graphs=graphs,
    )
    return device_plan(use, share, agree(device_blocks(use, share, plan.unit)), plan.unit)


def _log_loaded(
    engine: TorchEngine, plan: LoadPlan, checkpoint: Checkpoint | None, total_s: float, load_s: float
) -> None:
    spec, num_bytes = engine.spec, plan.weight_bytes
    if checkpoint is not None:
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    log.info(
        "model loaded",
        extra={
            "model": spec.model,
            "dtype": spec.dtype,
            "device": str(plan.facts.device),
            "kv_layout": spec.layout,
            "kv_blocks": spec.num_blocks,
            "load": plan.config.load,
            "load_s": round(total_s, 3),
            "gb": round(num_bytes / 1e9, 3),
            "gb_per_s": round(num_bytes / 1e9 / max(load_s, 1e-6), 2),
        },
    )


# --- a pool that ranks share ----------------------------------------------------------------------------------


def plan_shared_pool(config: WorkerConfig) -> tuple[WorkerConfig, int]:
    """`config` with the number of blocks of a host's pool, so that ranks do not measure it themselves; and the bytes of
    so many whole blocks. Raises ModelError and ConfigError."""
    model = open_model(Path(config.model), has_weights=config.load == "auto").config
    device = choose_device(config.device)
    precision = choose_precision(config.dtype, device, model.stored)
    shape = block_shape(config, model, precision)
    unit = PoolUnit(block_bytes=shape.block_bytes, block_size=shape.block_size)
    num_blocks = explicit_blocks(config.kv_blocks, config.kv_memory_bytes, unit)
    if num_blocks is None:
        num_bytes = weight_bytes(model, precision.compute, rounding=precision.rounding)
        num_blocks = host_blocks(available_bytes(device), num_bytes, unit)
    return replace(config, kv_blocks=num_blocks), num_blocks * shape.block_bytes
