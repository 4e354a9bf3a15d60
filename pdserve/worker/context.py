"""What the programs of both roles start from: the context that the host provides, and the parts (engine, KV cache,
adapters, tiers), which outlive a change of role.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from pdserve.clock import steady
from pdserve.config import WorkerConfig
from pdserve.core.cost.latency import CostPrior
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.stamps import BlockStamps
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.memory.plan import with_device_defaults
from pdserve.engine.memory.staging import OpenStaging
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.worker import calibrate
from pdserve.worker.adapters import WorkerAdapters
from pdserve.worker.tiers import OpenDeviceTier, Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramParts:
    """What stays when a worker changes its role. No request uses it during the change."""

    engine: Engine
    kv: KvCache
    adapters: WorkerAdapters
    cost: CostPrior
    tiers: Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramContext:
    """What the host provides."""

    config: WorkerConfig
    role: Role
    incarnation: str  # new for each start of the process, and for each role that it takes
    endpoint: str  # HOST:PORT at which other processes reach this worker's gRPC server
    post: Callable[[Callable[[], None]], None]  # runs the call on the engine thread; from any thread, never blocks
    tls: ReloadingCertificates | None = None  # None: plain text
    now: Callable[[], float] = time.monotonic
    metrics: Metrics = field(default_factory=Metrics.off)
    kept: ProgramParts | None = None  # of the worker's program in the other role; None: the process has just started
    #: Takes the memory of a host tier for a pool on a GPU: so many bytes or AUTO, with progress. None: there is none.
    device_tier: OpenDeviceTier = lambda *_: None
    device_staging: OpenStaging | None = None  # how a disk tier and a store reach such a pool

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", steady(self.now))  # the durations that workers report are measured by it


# --- the start ------------------------------------------------------------------------------------------------
# In this order: engine, settings, the role's endpoints, parts, program. `opened` closes what was opened, the newest
# first, unless the start succeeds. What the worker's other program has left is not closed: that program still has it.


def engine_of(context: ProgramContext, load: Callable[[WorkerConfig, Role], Engine], opened: ExitStack) -> Engine:
    """Raises ModelError and ConfigError."""
    if context.kept is not None:
        return context.kept.engine
    engine = load(context.config, context.role)
    opened.callback(engine.close)
    return engine


def with_defaults(context: ProgramContext, engine: Engine) -> ProgramContext:
    """Settings that were left to the device get their values."""
    config = with_device_defaults(context.config, context.role, is_gpu=not engine.pool.is_on_host)
    return replace(context, config=config)


def stamps_of(context: ProgramContext, engine: Engine) -> BlockStamps:
    return BlockStamps(engine.spec.num_blocks) if context.kept is None else context.kept.kv.blocks.stamps


def parts_of(context: ProgramContext, engine: Engine, stamps: BlockStamps | None, opened: ExitStack) -> ProgramParts:
    """Measures the engine, and opens the tiers. Raises ConfigError, and InternalError if the engine does not work."""
    config, kept = context.config, context.kept
    if kept is not None:
        return replace(kept, cost=calibrate.calibrate_again(engine, context.role, config, kept.cost, kept.kv))
    tiers = Tiers(engine, config, context.device_tier, context.device_staging)
    opened.callback(tiers.close)
    cost = calibrate.calibrate(engine, context.role, config)
    kv = tiers.open(cost, stamps)
    adapters = WorkerAdapters(engine, config, context.now)
    adapters.load_configured()
    return ProgramParts(engine=engine, kv=kv, adapters=adapters, cost=cost, tiers=tiers)
