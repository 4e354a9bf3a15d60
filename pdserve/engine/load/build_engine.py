"""Opens a model folder: checks the settings and the memory, loads weights, makes pool and kernels, and returns an
engine."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.cpu import ops
from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.ops import Ops
from pdserve.engine.cpu.paged import PagedAttention
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.interface import Engine, EngineSpec
from pdserve.engine.load.checkpoint import open_model
from pdserve.engine.load.device import (
    CudaMeter,
    MeasureGraphs,
    Meter,
    Precision,
    available_bytes,
    check_fits,
    choose_device,
    choose_precision,
    measure_use,
    reads_bfloat16_of,
    use_device,
    weight_bytes,
)
from pdserve.engine.load.safetensors_file import Checkpoint, checkpoint_hash
from pdserve.engine.load.weights import LoadProgress, dummy_hash, dummy_weights, load_weights
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.plan import (
    PoolUnit,
    device_blocks,
    device_plan,
    explicit_blocks,
    host_blocks,
    plain_plan,
    with_device_defaults,
)
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.attention import EagerAttention
from pdserve.engine.model.config import ModelConfig
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.linear import Rounding, weight_levels
from pdserve.engine.model.parameters import WHOLE, Shard, Weights, rank_config
from pdserve.engine.rows import warm_rows
from pdserve.engine.sampling.grammars import open_grammars
from pdserve.engine.torch_engine import TorchEngine
from pdserve.model_source import model_name
from pdserve.progress import PhaseReport

if TYPE_CHECKING:
    from pdserve.engine.model.collectives import Ranks

_STORED: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # kv_dtype, if it is not the compute dtype

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
    eager = warmed(open_rank(config, None, WHOLE, None, graphs=graphs_meter(config)), config.worker_id)
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
    return open_rank(with_device_defaults(config, Role.PREFILL, is_gpu=is_gpu), None, WHOLE, None)


def open_rank(
    config: WorkerConfig,
    progress: LoadProgress | None,
    shard: Shard,
    ranks: Ranks | None,
    memory: HostMemory | None = None,
    *,
    graphs: MeasureGraphs | None = None,
    meter: Meter | None = None,
    device: torch.device | None = None,
) -> TorchEngine:
    """The part of the model that a tensor-parallel rank holds; all of it without ranks.

    `config` has a value for what depends on the device (with_device_defaults). `memory`: memory of the pool that all
    ranks share (`shared_bytes`), in which each stores its heads of whole blocks. Without it the rank has its own
    pool, whose blocks hold only its heads. `graphs` measures the decode graphs, if the pool takes the memory that they
    leave. `meter` measures the device's memory; None: a CUDA device's. `device` None: the GPU of this host with the
    rank's number, if any.
    """
    began_s = time.monotonic()
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    folder = Path(config.model)
    opened = open_model(folder, has_weights=config.load == "auto")
    model_config, checkpoint = opened.config, opened.checkpoint
    if shard.rank == 0:
        for correction in opened.corrections:
            log.warning("config.json contradicts the tensors, which are followed", extra={"contradiction": correction})
    device = device or choose_device(config.device, shard.rank)
    precision = choose_precision(config.dtype, device, model_config.stored)
    if config.dtype == "auto" and device.type == "cpu" and precision.name != "float32":
        log.info(
            "uses the checkpoint's dtype, because this CPU has instructions for it; --dtype float32 is more exact",
            extra={"dtype": precision.name},
        )
    use_device(device)
    if device.type == "cuda":
        meter = meter or CudaMeter(device)
    rank_model = rank_config(model_config, shard)
    heads_first = stores_heads_first(device)
    # The CPU's kernel cannot read fp8, so such a pool is gathered, which is slower.
    is_paged = device.type == "cpu" and jit.is_available() and config.kv_dtype != "fp8" and not heads_first
    if config.deterministic == "on" and not is_paged:
        raise ConfigError("deterministic", "on", "off, or a CPU with numba and kv_dtype not fp8")
    if config.deterministic == "auto" and is_paged and precision.rounding == "bfloat16":
        config = replace(config, deterministic="on")
    choices = (f"integers to {weight_levels()}",) if precision.rounding in ("int8", "int4") else ()
    name = checkpoint_hash(folder, checkpoint, *choices) if checkpoint else dummy_hash(folder, device, *choices)
    shape = block_shape(config, rank_model if memory is None else model_config, precision, heads_first=heads_first)
    unit = PoolUnit(block_bytes=shape.block_bytes, block_size=shape.block_size)
    spec_of = partial(
        make_spec, config, model_config, precision.name, shape, name, shard if memory is None else WHOLE
    )  # bytes of a number of blocks
    is_halved = reads_bfloat16_of(checkpoint, device, precision.compute, precision.rounding)
    num_bytes = weight_bytes(
        model_config, precision.compute, rounding=precision.rounding, shard=shard, halves_float32=is_halved
    )
    num_together = (
        1 if device.type == "cuda" else min(config.ranks_here, shard.size)
    )  # ranks on one host share its memory
    free = available_bytes(device)
    num_blocks = explicit_blocks(config.kv_blocks, config.kv_memory_bytes, unit)
    if num_blocks is None and meter is None:
        num_blocks = host_blocks(free, num_bytes * num_together, unit)
    spec = spec_of(num_blocks or 1)
    check_fits(num_bytes * num_together, spec.num_blocks * spec.block_bytes, free)
    load_began_s = time.monotonic()
    weights = load(config, model_config, checkpoint, device, precision, progress, shard)
    load_s = time.monotonic() - load_began_s
    grammars = open_grammars(folder, spec)
    kv_heads = model_config.num_kv_heads
    heads = None if memory is None else range(*shard.span(kv_heads, kv_heads))
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for tens of milliseconds for every new length
    model = Decoder(model_config, weights, ranks, device_ops(device))
    if is_triton(device):
        from pdserve.engine.gpu.few_rows import open_few_rows, sites_of
        from pdserve.engine.gpu.kernels.switches import gpu_switches

        model.few_rows = open_few_rows(
            gpu_switches().products,
            sites_of(weights, model_config.activation),
            device,
            torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def assemble(num_blocks: int) -> TorchEngine:
        spec = spec_of(num_blocks)
        pool = TorchPool(num_blocks=num_blocks, shape=shape, device=device, memory=memory, heads=heads)
        if is_triton(device) and config.block_size >= 8 and config.block_size & (config.block_size - 1) == 0:
            from pdserve.engine.gpu.kernels.attention_plan import MOST_QUERIES as MAX_SHORT
            from pdserve.engine.gpu.triton_attention import takes_flash, triton_attention, use_fa3

            most_positions = None
            if takes_flash(model.heads, model.dtype):
                use_fa3(device)
                most_positions = spec.max_context_tokens
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            make_attention = triton_attention(
                pool, model.heads, model.dtype, spec.max_context_tokens, processors, most_positions
            )
            return TorchEngine(spec, model, pool, grammars, make_attention, MAX_SHORT)
        kernel = compiled(pool, rank_model, precision.rounding, config.worker_id) if is_paged else None
        hidden = None
        if kernel is not None and ranks is None:
            from pdserve.engine.load.recorded import RecordedSteps  # needs numba

            hidden = RecordedSteps(model).hidden
        most_short = (
            0 if kernel is None else sys.maxsize
        )  # the kernel is as fast as torch's attention or faster, for every row
        return TorchEngine(
            spec,
            model,
            pool,
            grammars,
            lambda batch, on_layer: EagerAttention(batch, pool, model.heads, kernel, on_layer),
            most_short,
            hidden,
        )

    if num_blocks is None:
        assert meter is not None
        agree = int if ranks is None else ranks.minimum
        use = measure_use(
            meter,
            str(device),
            assemble,
            unit,
            share=config.gpu_memory_share,
            context_tokens=config.max_context_tokens or model_config.max_context_tokens,
            max_batch=config.max_batch,
            max_batch_tokens=config.max_batch_tokens,
            is_leader=shard.rank == 0,
            agree=agree,
            measure_graphs=graphs,
        )
        num_blocks = agree(device_blocks(use, config.gpu_memory_share, unit))  # all ranks name the same blocks
        plan = device_plan(use, config.gpu_memory_share, num_blocks, unit)
    else:
        plan = plain_plan(str(device), free, num_bytes, num_blocks, unit)
    engine = assemble(num_blocks)
    engine.memory = plan
    spec = engine.spec
    if checkpoint is not None:
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    log.info(
        "model loaded",
        extra={
            "model": spec.model,
            "dtype": spec.dtype,
            "device": str(device),
            "kv_layout": spec.layout,
            "kv_blocks": spec.num_blocks,
            "load": config.load,
            "load_s": round(time.monotonic() - began_s, 3),
            "gb": round(num_bytes / 1e9, 3),
            "gb_per_s": round(num_bytes / 1e9 / max(load_s, 1e-6), 2),
        },
    )
    return engine


def compiled(pool: TorchPool, model: ModelConfig, rounding: Rounding, worker_id: str) -> PagedAttention:
    report = PhaseReport(worker_id, "kernels", "kernels")
    report(0, 1)
    computed = torch.bfloat16 if rounding == "bfloat16" else torch.float32
    kernel = PagedAttention(pool, model.num_heads, computed, is_normed=model.has_qk_norm, is_rounded=rounding != "none")
    report(1, 1)
    return kernel


def load(
    config: WorkerConfig,
    model: ModelConfig,
    checkpoint: Checkpoint | None,
    device: torch.device,
    precision: Precision,
    progress: LoadProgress | None,
    shard: Shard = WHOLE,
) -> Weights:
    """Loads the checkpoint, or generates weights for `--load dummy`."""
    dtype, rounding, is_deterministic = precision.compute, precision.rounding, config.deterministic == "on"
    if checkpoint is None:
        return dummy_weights(model, device, dtype, rounding=rounding, is_deterministic=is_deterministic, shard=shard)
    progress = progress or PhaseReport(config.worker_id, "weights", "bytes")
    return load_weights(
        model, checkpoint, device, dtype, progress, rounding=rounding, is_deterministic=is_deterministic, shard=shard
    )


def device_ops(device: torch.device) -> Ops:
    """In Triton on CUDA; a device without Triton computes the same in torch."""
    if is_triton(device):
        from pdserve.engine.gpu.kernels import ops as gpu_ops

        return gpu_ops
    return ops


def is_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def stores_heads_first(device: torch.device) -> bool:
    """Whether a head's tokens are contiguous within a block of the device's pool."""
    return is_triton(device) and gpu_switches().layout == "heads"


def block_shape(
    config: WorkerConfig, model: ModelConfig, precision: Precision, *, heads_first: bool = False
) -> BlockShape:
    return BlockShape(
        num_layers=model.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_STORED.get(config.kv_dtype, precision.kv),
        heads_first=heads_first,
    )


def with_host_blocks(config: WorkerConfig) -> WorkerConfig:
    """`config` with the number of blocks of a host's pool, so that ranks do not measure it themselves."""
    if config.kv_blocks:
        return config
    model, precision = _model_and_precision(config)
    shape = block_shape(config, model, precision)
    unit = PoolUnit(block_bytes=shape.block_bytes, block_size=shape.block_size)
    num_blocks = explicit_blocks(0, config.kv_memory_bytes, unit)
    if num_blocks is None:
        num_bytes = weight_bytes(model, precision.compute, rounding=precision.rounding)
        num_blocks = host_blocks(available_bytes(choose_device(config.device)), num_bytes, unit)
    return replace(config, kv_blocks=num_blocks)


def shared_bytes(config: WorkerConfig) -> int:
    """The bytes of a pool of `kv_blocks` whole blocks that tensor-parallel ranks share. Raises ModelError and
    ConfigError."""
    return config.kv_blocks * block_shape(config, *_model_and_precision(config)).block_bytes


def _model_and_precision(config: WorkerConfig) -> tuple[ModelConfig, Precision]:
    model = open_model(Path(config.model), has_weights=config.load == "auto").config
    return model, choose_precision(config.dtype, choose_device(config.device), model.stored)


def make_spec(
    config: WorkerConfig,
    model: ModelConfig,
    dtype: str,
    shape: BlockShape,
    weights_hash: str,
    shard: Shard,
    num_blocks: int,
) -> EngineSpec:
    """The context limit is the least of the model's, the operator's and the capacity of the pool."""
    if config.max_context_tokens > model.max_context_tokens:
        raise ConfigError(
            "max_context_tokens",
            config.max_context_tokens,
            f"at most {model.max_context_tokens}, the model's own limit",
        )
    return EngineSpec(
        model=model_name(config.model),
        weights_hash=weights_hash,
        dtype=dtype,
        layout=shape.layout,
        vocab_size=model.vocab_size,
        max_context_tokens=min(config.max_context_tokens or model.max_context_tokens, num_blocks * config.block_size),
        eos_token_ids=model.eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        block_bytes=shape.block_bytes,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        kv_layers=shape.num_layers,
        kv_heads=model.num_kv_heads,
        kv_head_dim=shape.head_dim,
        tp_degree=shard.size,
        tp_rank=shard.rank,
        num_layers=1 if shape.is_scaled else shape.num_layers,  # the scales of all layers are stored after the values
    )
