"""Pure modules decide; they import nothing that acts. Each is imported in a fresh interpreter."""

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
    "pdserve.engine.gpu.slots",
    "pdserve.engine.gpu.splits",
    "pdserve.engine.interface",
    "pdserve.structured.endless",
    "pdserve.text.stops",
    "pdserve.launch.keys",
    "pdserve.launch.spec",
    "benchmarks.prediction_parts",
    "router.asking",
    "router.forecast",
    "router.lifecycle",
    "router.events",
    "router.commands",
    "router.explaining",
    "router.replay",
    "router.line",
    "router.legs",
    "router.lengths",
    "router.load",
    "router.phase",
    "router.queue",
    "router.refusal",
    "router.shares",
    "router.view",
    "router.state",
    "router.policy",
    "pdserve.worker.timed",
    "prefill_worker.batching",
    "prefill_worker.prompt",
    "prefill_worker.pushing",
    "decode_worker.ahead",
    "decode_worker.batching",
    "decode_worker.checking",
    "decode_worker.chunking",
    "decode_worker.drafter",
    "decode_worker.planning",
    "decode_worker.resident",
    "decode_worker.roster",
    "simulator.charts",
    "simulator.cluster",
    "simulator.comparison",
    "simulator.curves",
    "simulator.goodput",
    "simulator.metrics",
    "simulator.misses",
    "decode_worker.step",
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
    "kvtransfer.busy",
    *(
        f"kvtransfer.{name}"
        for name in (
            "commands",
            "departure",
            "departures",
            "faults",
            "frames",
            "landing",
            "landings",
            "lease",
            "memory",
            "parts",
            "plan",
            "reshape",
            "session",
            "shape",
            "stamping",
            "stats",
            "transport",
            "wire_rule",
        )
    ),
]

# An interpreter may load some of these by itself (site hooks, coverage); only what the import adds counts.
PROBE = """
import sys
before = set(sys.modules)
import importlib
importlib.import_module(sys.argv[1])
print(" ".join(name for name in sys.argv[2:] if name in sys.modules and name not in before))
"""


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_nothing_that_acts(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *ACTING], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


LIGHT = {
    "pdserve": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "pdserve.client": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "router.server": ("torch", "ray"),
    "pdserve.engine.toy": ("torch", "numpy"),
    "pdserve.engine.opening": ("triton", "cupy"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_does_not_import_the_heavy_libraries(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *LIGHT[module]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
