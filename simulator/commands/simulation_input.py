"""Converts the flags of `pdserve simulate` to its input: the trace, the cluster and its settings.

A recording contains its cluster, policy and targets. A flag about the cluster replaces all recorded workers.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.policies import POLICIES
from pdserve.core.types import Role, Slo
from pdserve.profiles import load_profile
from router.policy.rules import check_rules
from router.settings import RouterSettings
from simulator.cluster import make_workers
from simulator.commands import defaults
from simulator.commands.fault_flags import faults
from simulator.model import SimConfig, Trace
from simulator.recorded_cluster import RecordedCluster
from simulator.reshape import Reshaped, Step, first, jittered
from simulator.traces import FileTrace
from simulator.workloads import make_workload

_COMPARED: Final = "goodput,round-robin,colocated"
_COMPARED_AT: Final = (1.0, 1.5, 2.0, 2.5)  # multiples of the built-in workload's rate, from low load to overload
_BLOCK_TOKENS: Final = 64  # for traces without block ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInput:
    trace: Trace
    cluster: str  # name for display
    policies: tuple[str, ...]
    rate_scales: tuple[float, ...]
    base: SimConfig
    rules_off: tuple[str, ...] = ()  # of the goodput policy; other policies have no rules

    def config(self, policy: str) -> SimConfig:
        """With the policy `colocated`, each of the same machines prefills and decodes."""
        workers = self.base.workers
        if policy == "colocated":
            # A recording does not contain the decode speed of a prefill worker.
            both = next(one for one in workers if one.role is Role.DECODE)
            workers = tuple(dataclasses.replace(both, worker_id=one.worker_id) for one in workers)
        router = dataclasses.replace(
            self.base.router, policy=policy, rules_off=self.rules_off if policy == "goodput" else ()
        )
        return dataclasses.replace(self.base, workers=workers, router=router)


def make_input(args: argparse.Namespace, on_read: Callable[[int, int], None]) -> SimulationInput:
    """`on_read` is FileTrace's. Raises ConfigError or InvalidRequest with the name of the flag."""
    rules_off = _names(args.rules_off)
    check_rules(rules_off)
    file = FileTrace(args.trace, on_read) if args.trace else None
    recorded = file.cluster() if file is not None else None
    slo = recorded.slo if recorded is not None else Slo(ttft_s=defaults.SLO_TTFT_S, tpot_s=defaults.SLO_TPOT_S)
    slo = Slo(
        ttft_s=slo.ttft_s if args.slo_ttft is None else args.slo_ttft,
        tpot_s=slo.tpot_s if args.slo_tpot is None else args.slo_tpot,
    )
    policies, rate_scales = _compared(args, file, recorded)
    common = {"slo": slo, "num_routers": args.routers, "seed": args.seed, "noise": args.noise}
    if file is not None:
        for flag, value in (("workload", args.workload), ("duration", args.duration)):
            if value is not None:
                raise ConfigError(flag, value, "no --trace beside it: a trace replaces the workload")
    built_in = make_workload(args.workload or "chat", duration_s=args.duration, seed=args.seed)
    trace = Reshaped(file or built_in, *_steps(args, file))
    cluster_flags = (args.profile, args.prefill, args.decode, args.link)
    if recorded is not None and all(flag is None for flag in cluster_flags):
        broken = recorded.faults + faults(args, [one.worker_id for one in recorded.workers])
        rules_off = rules_off or recorded.router.rules_off
        base, cluster = recorded.config(**common, faults=broken), "the recorded cluster"
    else:
        profile = load_profile(args.profile or defaults.PROFILE)
        counts = (defaults.WORKERS if count is None else count for count in (args.prefill, args.decode))
        workers = make_workers(profile, *counts, link=args.link or "")
        base = SimConfig(
            workers=workers,
            router=RouterSettings(),
            block_size=trace.block_tokens or _BLOCK_TOKENS,
            faults=faults(args, [one.worker_id for one in workers]),
            **common,
        )
        cluster = profile.name
    return SimulationInput(
        trace=trace, cluster=cluster, policies=policies, rate_scales=rate_scales, base=base, rules_off=rules_off
    )


def _compared(
    args: argparse.Namespace, file: FileTrace | None, recorded: RecordedCluster | None
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The policies and the rates to simulate: several of each if no flag chooses a trace, a policy or a rate."""
    choices = (file, args.workload, args.policy, args.rates, args.rate_scale)
    is_default = all(one is None for one in choices)
    policy = args.policy or (_COMPARED if is_default else recorded.router.policy if recorded else "goodput")
    policies = _names(policy)
    for name in policies or (policy,):
        if name not in POLICIES:
            raise ConfigError("policy", name, "one of " + ", ".join(sorted(POLICIES)))
    one_rate = (1.0 if args.rate_scale is None else args.rate_scale,)
    return policies, tuple(args.rates) if args.rates else _COMPARED_AT if is_default else one_rate


def _steps(args: argparse.Namespace, file: FileTrace | None) -> Sequence[Step]:
    steps: list[Step] = []
    if args.limit is not None:
        steps.append(first(args.limit))
    if args.jitter is not None:
        if file is None or not file.quantum_s:
            of = f"{file.format.name}'s" if file is not None else "the built-in one's"
            raise ConfigError("jitter", args.jitter, f"a trace whose timestamps are rounded; {of} are not")
        steps.append(jittered(args.jitter, file.quantum_s))
    return steps


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
