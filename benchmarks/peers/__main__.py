"""Compares the routing processes of pdserve with Dynamo's and smg's: CPU time of a request, and TTFT.

    python -m benchmarks.peers --peers FOLDER [--systems pdserve,dynamo,smg] [--loads w1:25,w1:100] [--out FILE]
    python -m benchmarks.peers --report FILE

Each system has one prefill and one decode worker that only wait, and the bundled model's tokenizer and chat template.
One client sends streamed chats of 16 tokens at Poisson times. W1: 210 tokens. W2: 4,000, of which 8 requests share
3,500. W3: 30,000. Systems take turns: all of them once, then all again. CPU is that of the routing processes with their
children (router, gateway and Redis; Dynamo's frontend; smg), over the requests that were sent. TTFT is measured to the
first chunk with content, and contains the worker's: Dynamo's decode worker makes the first token after 5 ms.

FOLDER has an environment for each peer; the program prints the commands that make them. Client, routers and workers
share this machine's cores. Before each system it waits until the machine is idle, and notes what other processes took.
With uvloop installed, the client uses it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from benchmarks.harness import cpu_s
from benchmarks.peers.client import LoadResult, run_load
from benchmarks.peers.report import Load, Row, markdown, row_of
from benchmarks.peers.systems import DYNAMO, LAUNCHER, SMG, SYSTEMS, System, install_commands, running
from pdserve.build import FULL_VERSION
from pdserve.core.json_text import to_json

LOADS: Final = "w1:25,w1:100,w1:200,w1:400,w2:25,w3:2"
WARM_UP_S: Final = 3.0  # of each workload, at its lowest rate
IDLE_SHARE: Final = 0.05  # of all cores, over IDLE_S
IDLE_S: Final = 2.0
SETTLE_S: Final = 0.3  # in which processes end what they do after the last answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environments of the peers")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"({','.join(SYSTEMS)})")
    parser.add_argument("--loads", default=LOADS, help=f"workload:requests per second ({LOADS})")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load (20)")
    parser.add_argument("--repetitions", type=int, default=2, help="turns of each system (2)")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="longest wait for an idle machine (60)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON; logs go beside it")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only print the tables of such a file")
    flags = parser.parse_args()
    if flags.report is not None:
        report(json.loads(flags.report.read_text()))
        return 0
    systems = tuple(filter(None, flags.systems.split(",")))
    if unknown := [one for one in systems if one not in SYSTEMS]:
        parser.error(f"--systems: got {unknown[0]}, expected some of {', '.join(SYSTEMS)}")
    loads = [load_of(one) for one in flags.loads.split(",") if one]
    peers = [one for one in systems if one in (DYNAMO, SMG)]
    if peers and flags.peers is None:
        parser.error(f"--peers: {' and '.join(peers)} need a folder of environments, or leave them out of --systems")
    if commands := install_commands(flags.peers or Path(), systems):
        print("These peers are not installed. Run:", *commands, sep="\n", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    logs = flags.out.parent if flags.out is not None else Path()
    found: dict[str, Any] = {"conditions": conditions(flags), "rows": rows}
    for repetition in range(1, flags.repetitions + 1):
        for name in systems:
            wait_for_idle(flags.wait)
            for row in measure(name, repetition, loads, flags, logs):
                rows.append(asdict(row))
                print(line(row), flush=True)
                if flags.out is not None:
                    flags.out.write_text(to_json(found) + "\n")
    report(json.loads(to_json(found)))
    return 0


def report(found: Mapping[str, Any]) -> None:
    print("", markdown(found["conditions"], [row_of(one) for one in found["rows"]]), sep="\n")


def load_of(text: str) -> Load:
    workload, _, rate = text.partition(":")
    return workload.lower(), float(rate)


def measure(name: str, repetition: int, loads: list[Load], flags: argparse.Namespace, logs: Path) -> Iterator[Row]:
    with running(name, flags.peers or Path(), logs) as system:
        for workload, rate_rps in {load[0]: load for load in sorted(loads, reverse=True)}.values():
            ask(system, workload, rate_rps, min(flags.seconds / 4, WARM_UP_S), f"warm {repetition}")
        for workload, rate_rps in loads:
            before, began, began_s = used(system), busy_s(), time.perf_counter()
            result = ask(system, workload, rate_rps, flags.seconds, f"{repetition} {rate_rps:g}")
            time.sleep(SETTLE_S)
            after, wall_s = used(system), time.perf_counter() - began_s
            spent = {one: after[one] - before[one] for one in before}
            own_s = sum(spent.values()) + result.client_cpu_s * result.sent
            sent = max(result.sent, 1)
            yield Row(
                system=name,
                repetition=repetition,
                workload=workload,
                rate_rps=rate_rps,
                seconds=flags.seconds,
                result=result,
                routing_cpu_s={one: spent[one] / sent for one in system.routing},
                engine_cpu_s={one: spent[one] / sent for one in system.engines},
                foreign_cores=max(0.0, busy_s() - began - own_s) / wall_s,
            )


def ask(system: System, workload: str, rate_rps: float, seconds: float, seed: str) -> LoadResult:
    load = run_load(system.host, system.port, system.model, workload, rate_rps, seconds, seed)
    try:
        import uvloop  # type: ignore[import-not-found]
    except ImportError:
        return asyncio.run(load)
    result: LoadResult = uvloop.run(load)
    return result


def used(system: System) -> Mapping[str, float]:
    """All processes are the launcher's children, so it counts alone."""
    pids = {**system.engines, **system.routing}
    return {name: cpu_s(pid, has_children=name != LAUNCHER) for name, pid in pids.items()}


def busy_s() -> float:
    """CPU time that this machine has spent, on all cores together."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0))


def wait_for_idle(longest_s: float) -> None:
    ends_s = time.monotonic() + longest_s
    if longest_s <= 0:
        return
    while (share := psutil.cpu_percent(IDLE_S) / 100) > IDLE_SHARE:
        if time.monotonic() > ends_s:
            print(f"WARNING: the machine is not idle: {share:.0%} busy after {longest_s:.0f} s", file=sys.stderr)
            return


def line(row: Row) -> str:
    ttft = " ".join(f"{one * 1e3:.1f}" for one in row.result.ttft_s)
    processes = ", ".join(f"{name} {one * 1e3:.2f}" for name, one in row.routing_cpu_s.items())
    return (
        f"{row.repetition} {row.system:20} {row.workload} {row.rate_rps:g}/s: {row.result.outcomes}, TTFT ms {ttft}, "
        f"CPU ms {row.cpu_s * 1e3:.2f} ({processes}), engines {sum(row.engine_cpu_s.values()) * 1e3:.2f}, "
        f"client {row.result.client_cpu_s * 1e3:.2f}, others {row.foreign_cores:.2f} cores"
    )


def conditions(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "version": FULL_VERSION,
        "python": sys.version.split()[0],
        "cores": psutil.cpu_count(),
        "load_average": psutil.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "seconds": flags.seconds,
        "loads": flags.loads,
    }


if __name__ == "__main__":
    sys.exit(main())
