"""Pure modules decide; they import nothing that acts.

Where a process that imports all of them holds nothing that acts, each alone holds nothing; where it does hold
something, and by test-slow, each is imported in a process that has imported nothing else.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACTING = ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "threading", "socket", "numpy")

PURE = [
    *(f"pdserve.core.{path.stem}" for path in sorted((ROOT / "pdserve/core").glob("[!_]*.py"))),
    "pdserve.prefix.index",
    "pdserve.engine.gpu.extent",
    "pdserve.engine.gpu.count_slots",
    "pdserve.engine.gpu.splits",
    "pdserve.engine.interface",
    "pdserve.structured.endless",
    "pdserve.text.stops",
    "pdserve.tokenizer_json",
    "pdserve.gateway.errors",
    "pdserve.gateway.headers",
    "pdserve.gateway.json_body",
    "pdserve.gateway.response_fields",
    "pdserve.gateway.sse",
    "pdserve.launch.keys",
    "pdserve.launch.spec",
    "pdserve.telemetry.request_attributes",
    "pdserve.telemetry.tail_sampling",
    *(f"pdserve.plot.{path.stem}" for path in sorted((ROOT / "pdserve/plot").glob("[!_]*.py"))),
    "benchmarks.prediction_parts",
    "router.policy_input",
    "router.booking",
    "router.transitions",
    "router.forecast",
    "router.lifecycle",
    "router.events",
    "router.commands",
    "router.explaining",
    "router.replay",
    "router.worker_queue",
    "router.message_latency",
    "router.lengths",
    "router.load",
    "router.step_clock",
    "router.queue",
    "router.late_requests",
    "router.newcomers",
    "router.overload",
    "router.fairness",
    "router.quotas",
    "router.releases",
    "router.tenant_labels",
    "router.cache_salt",
    "router.view",
    "router.state",
    "router.policy",
    "pdserve.worker.timed",
    "prefill_worker.batching",
    "prefill_worker.lifecycle",
    "prefill_worker.prefill_sequence",
    "prefill_worker.pushing",
    "decode_worker.async_step",
    "decode_worker.batching",
    "decode_worker.checking",
    "decode_worker.chunking",
    "decode_worker.drafter",
    "decode_worker.planning",
    "decode_worker.decode_sequence",
    "decode_worker.sequence_table",
    *(
        f"simulator.bench.{name}"
        for name in (
            "answer",
            "charts",
            "fields",
            "load",
            "page",
            "prompts",
            "ratios",
            "result",
            "sse",
            "statistics",
            "text",
        )
    ),
    "simulator.bound",
    "simulator.bound_capacity",
    "simulator.bound_deadlines",
    "simulator.bound_decode",
    "simulator.bound_periods",
    "simulator.bound_work",
    "decode_worker.lifecycle",
    "decode_worker.slack",
    "simulator.cluster",
    "simulator.comparison",
    "simulator.curves",
    "simulator.goodput",
    "simulator.gpu_plan",
    "simulator.layouts",
    "simulator.metrics",
    "simulator.misses",
    "decode_worker.step",
    "decode_worker.step_results",
    "simulator.model",
    "simulator.plan",
    "simulator.recorded",
    "simulator.recorded_cluster",
    "simulator.report",
    "simulator.network",
    "simulator.runs",
    "simulator.world",
    "simulator.reshape",
    "simulator.synthetic",
    "simulator.workloads",
    "simulator.tables",
    "simulator.trace_rows",
    *(
        f"kvtransfer.{name}"
        for name in (
            "commands",
            "send_transfer",
            "send_transfers",
            "faults",
            "frames",
            "joint",
            "receive_transfer",
            "receive_transfers",
            "lease",
            "memory",
            "parts",
            "plan",
            "rank_grants",
            "reshape.mapping",
            "reshape.wire_rule",
            "session",
            "stamping",
            "stats",
            "transport",
        )
    ),
]

# One process that has imported nothing forks a child for each module; `before`: an interpreter may load some of the
# acting modules by itself (site hooks, coverage), and only what the import adds counts.
PROBE = """
import os, sys, traceback
before = set(sys.modules)
import importlib
for line in sys.stdin:
    modules, *acting = line.split()
    if os.fork() == 0:
        try:
            for module in modules.split(","):
                importlib.import_module(module)
            found = [name for name in acting if name in sys.modules and name not in before]
            print(modules, "imports", *found)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.wait()
"""
LIGHT = {
    "pdserve": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "pdserve.client": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "router.server": ("torch", "ray"),
    # Pure as well; pydantic itself imports threading and socket.
    "pdserve.gateway.sdk_call": ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "numpy"),
    "pdserve.gateway.replies": ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "numpy"),
    "pdserve.gateway.server": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "pdserve.engine.toy": ("torch", "numpy"),
    "pdserve.engine.build_engine": ("triton", "cupy"),
}
ACTIVE = "kvtransfer.channel"


def imported(asked: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Which of what is looked for each module brings, imported alone; several are named with commas between them.

    A module that cannot be imported is not there.
    """
    lines = "".join(f"{modules} {' '.join(names)}\n" for modules, names in asked.items())
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=lines, capture_output=True, text=True, cwd=ROOT, check=True, timeout=240
    )
    print(done.stderr, file=sys.stderr)
    said = (line.partition(" imports") for line in done.stdout.splitlines())
    return {modules: found.split() for modules, _, found in said}


@pytest.fixture(scope="module")
def pure() -> dict[str, list[str]]:
    together = ",".join(PURE)
    if imported({together: ACTING}) == {together: []}:
        return {module: [] for module in PURE}
    return imported(dict.fromkeys(PURE, ACTING))


@pytest.fixture(scope="module")
def light() -> dict[str, list[str]]:
    return imported(LIGHT | {ACTIVE: ("socket", "torch")})


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_only_pure_modules(module: str, pure: dict[str, list[str]]) -> None:
    assert pure.get(module) == []


@pytest.mark.slow
def test_importing_a_pure_module_loads_only_pure_modules() -> None:
    assert imported(dict.fromkeys(PURE, ACTING)) == {module: [] for module in PURE}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_does_not_import_the_heavy_libraries(module: str, light: dict[str, list[str]]) -> None:
    assert light.get(module) == []


def test_the_import_check_detects_imports(light: dict[str, list[str]]) -> None:
    assert light[ACTIVE] == ["socket"]
