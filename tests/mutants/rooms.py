"""Which modules are mutated, and which tests must find the change. The tests of a module's own name run first."""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_purity import PURE

ROOMS = ("router", "prefill_worker", "decode_worker", "kvtransfer", "core")
UNIT = Path("tests/unit")

# Tests whose file is not named after the module that they are about; they run first.
OWN = {
    "pdserve.core.attempt": (
        "core/test_attempt.py",
        "decode_worker/test_scheduler.py",
    ),
    "pdserve.core.effects": (
        "worker/test_batches.py",
        "wire/test_convert.py",
    ),
    "pdserve.core.errors": (
        "wire/test_status.py",
        "client/test_retry.py",
    ),
    "pdserve.core.kv.blocks": (
        "core/test_blocks.py",
        "core/test_blocks_stateful.py",
    ),
    "pdserve.core.kv.cache": ("core/test_kv_cache.py",),
    "pdserve.core.cost.latency": ("core/test_latency.py",),
    "router.state.conversations": (
        "router/test_sessions.py",
        "router/test_tasks.py",
    ),
    "router.state.interface": ("router/test_recording.py",),
    "router.state.queue": (
        "router/test_order.py",
        "router/test_queue.py",
    ),
    "router.state.state": (
        "router/test_view.py",
        "router/test_lifecycle.py",
        "router/test_endings.py",
        "router/test_failures.py",
    ),
    "router.state.view": (
        "router/test_load.py",
        "router/test_fleet.py",
    ),
    "router.policy.two_stage": ("router/test_baselines.py",),
    "router.policy.policies.mooncake": ("router/test_baselines.py",),
    "router.policy.interface": (
        "router/test_policy.py",
        "router/test_queue.py",
        "router/test_rejection.py",
    ),
    "router.policy.policies.least_ttft": ("router/test_policy.py",),
    "router.policy.availability": (
        "router/test_availability.py",
        "router/test_bound.py",
    ),
    "router.policy.candidates": (
        "router/test_goodput.py",
        "router/test_candidates.py",
    ),
    "router.policy.ranking": (
        "router/test_goodput.py",
        "router/test_candidates.py",
    ),
    "decode_worker.step": (
        "decode_worker/test_async_scheduling.py",
        "decode_worker/test_scheduler.py",
    ),
    "decode_worker.planning": (
        "decode_worker/test_scheduler_drafts.py",
        "decode_worker/test_drafting.py",
        "decode_worker/test_scheduler.py",
        "decode_worker/test_admission.py",
        "decode_worker/test_runs.py",
    ),
    "decode_worker.scheduler": (
        "decode_worker/test_scheduler.py",
        "decode_worker/test_admission.py",
        "decode_worker/test_sending.py",
    ),
    "decode_worker.step_results": (
        "decode_worker/test_scheduler.py",
        "decode_worker/test_phases.py",
        "decode_worker/test_sending.py",
    ),
    "decode_worker.decode_sequence": ("decode_worker/test_scheduler.py",),
    "decode_worker.sequence_table": (
        "decode_worker/test_scheduler.py",
        "decode_worker/test_admission.py",
        "decode_worker/test_sending.py",
        "decode_worker/test_known_failures.py",
    ),
    "prefill_worker.prefill_sequence": ("prefill_worker/test_scheduler.py",),
    "kvtransfer.protocol.transfers": (
        "kvtransfer/test_send_transfers.py",
        "kvtransfer/test_receive_transfers.py",
        "kvtransfer/test_schedules.py",
        "kvtransfer/test_plan.py",
        "kvtransfer/test_overlap.py",
    ),
    "kvtransfer.protocol.send_transfers": (
        "kvtransfer/test_send_transfers.py",
        "kvtransfer/test_schedules.py",
        "kvtransfer/test_plan.py",
    ),
    "kvtransfer.faults.plan": ("kvtransfer/test_fault_plan.py",),
    "kvtransfer.protocol.receive_transfers": (
        "kvtransfer/test_receive_transfers.py",
        "kvtransfer/test_schedules.py",
        "kvtransfer/test_pair_slots.py",
    ),
    "kvtransfer.protocol.lease": ("kvtransfer/test_heartbeat.py",),
}

# Which tests of the room run after those. In kvtransfer they are the tests of decisions; those of transports start
# processes, and are left out.
_REST = {
    "router": ["router/test_*.py"],
    "prefill_worker": ["prefill_worker/test_*.py"],
    "decode_worker": ["decode_worker/test_*.py"],
    "core": ["core/test_*.py", "prefill_worker/test_*.py", "decode_worker/test_scheduler.py"],
    "kvtransfer": [
        f"kvtransfer/test_{name}.py"
        for name in (
            *(
                "heartbeat",
                "fault_plan",
                "shape",
                "overlap",
                "reshape",
                "fences",
                "frames",
                "stamping",
                "states_page",
            ),
            *(
                "session",
                "plan",
                "receive_transfers",
                "schedules",
                "send_transfers",
                "known_crashes",
                "known_wrong_data",
                "known_stuck",
                "parts",
                "pair_slots",
                "leases",
            ),
        )
    ],
}
_LAST = ("test_replay.py", "test_random_runs.py", "test_scheduler_stateful.py", "test_leases.py")

# These take more than five seconds of CPU each, and faster tests of the same files find the same mutants.
TOO_SLOW = (
    "tests/unit/router/test_random_runs.py::test_random_runs_cover_every_outcome_and_loss",
    "tests/unit/router/test_replay.py::test_thousands_of_recorded_events_replay_to_equal_commands",
)


def modules(root: Path) -> dict[str, Path]:
    """The pure modules of the rooms, and their files."""
    found = {}
    for name in PURE:
        path = Path(*name.split("."))
        if not name.startswith("pdserve.core.") and name.split(".")[0] not in ROOMS:
            continue
        if (root / path).is_dir():
            for file in sorted((root / path).glob("*.py")):
                found[name if file.stem == "__init__" else f"{name}.{file.stem}"] = file.relative_to(root)
        else:
            found[name] = path.with_suffix(".py")
    return found


def own_tests(module: str, room: str, root: Path) -> list[str]:
    """Test files of the module's own name, and others that are about it."""
    stem = module.split(".")[-1]
    found = [path.relative_to(root) for path in sorted((root / UNIT / room).glob(f"test_{stem}*.py"))]
    return [str(path) for path in dict.fromkeys([*(UNIT / one for one in OWN.get(module, ())), *found])]


def other_tests(module: str, room: str, root: Path) -> list[str]:
    """The rest of the room's tests."""
    found = [path.relative_to(root) for one in _REST[room] for path in sorted((root / UNIT).glob(one))]
    found.sort(key=lambda path: path.name in _LAST)
    own = own_tests(module, room, root)
    return [str(path) for path in dict.fromkeys(found) if str(path) not in own]
