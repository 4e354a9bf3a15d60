"""Attacks a live cluster in every way that benchmarks/attacks/ has rows for, and prints what each attack achieved.

    python -m benchmarks.attack
    python -m benchmarks.attack --only 2,5 --seconds 20
    python -m benchmarks.attack --tls

One cluster of the bundled model serves all rows, with a token for callers. Beside each attack an honest caller sends
requests; each of its answers must equal the one given in peace. A row is met if the attack was rejected as the row
requires, every honest answer was exact, no process was restarted, and the cluster became idle. Otherwise the exit
status is 1. `--tls` attacks a cluster with TLS, in the rows that can.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.attacks import calls, host, http_bodies, http_port, models, open_ports
from benchmarks.attacks.harness import (
    AttackResult,
    AttackRow,
    AttackTarget,
    Beside,
    answers_in_peace,
    legitimate_traffic,
)
from benchmarks.harness import table_head, table_row, unrest
from pdserve import Client
from pdserve.core.errors import ConfigError
from pdserve.launch.ports import free_ports
from pdserve.launch.running import Running

PROCESSES: Final = ("router", "p0", "d0")
ALL: Final = (*PROCESSES, "gateway")
REST_S: Final = 30.0
# Answers must have the same bits whatever shares a step with them, to be compared at all; and none may be rejected
# for its SLO targets on a busy machine.
FLAGS: Final = (
    *("--set", "worker.deterministic=on"),
    *("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"),
    *("--set", "router.connection_idle_s=5"),  # so that a row sees idle connections end
)


def rows() -> list[AttackRow]:
    """All rows, by their number."""
    found = [row for one in (calls, host, http_bodies, http_port, models, open_ports) for row in one.ROWS]
    return sorted(found, key=lambda row: row.number)


def run_row(row: AttackRow, target: AttackTarget, expected: list[tuple[int, ...]]) -> tuple[AttackResult, Beside]:
    """Attacks, and adds to the finding's complaints what the attack did to the cluster."""
    before = {name: target.pid(name) for name in ALL}
    complaints: list[str] = []
    with legitimate_traffic(target.router, target.token, target.ca, expected) as honest:
        try:
            finding = row.attack(target)
        except Exception as error:  # the other rows still run
            finding = AttackResult(attempts=0, rejected=0)
            complaints.append(f"the row itself failed: {type(error).__name__}: {error}")
    complaints += finding.complaints
    if honest.failures:
        complaints.append(f"{len(honest.failures)} honest requests failed, the first with {honest.failures[0]}")
    if not honest.took_s:
        complaints.append("no honest request was answered")
    complaints += [f"{name} was restarted" for name in ALL if target.pid(name) != before[name]]
    with Client(target.router, token=target.token, tls=target.ca) as client:
        complaints += filter(None, [unrest(client, 2, REST_S)])
    return replace(finding, complaints=complaints), honest


def show(results: Sequence[tuple[AttackRow, AttackResult, Beside]], peace_ms: float) -> None:
    columns = "row|attack|attempts|rejected|counted|errors|honest exact|honest p50, ms|met"
    print(table_head(columns.split("|")))
    for row, finding, honest in results:
        counted = "" if finding.counted is None else f"{finding.counted:.0f}"
        errors = ", ".join(f"{name} {count}" for name, count in finding.errors.most_common(3))
        exact = len(honest.took_s)
        cells = (row.number, row.name, finding.attempts, finding.rejected, counted, errors)
        of_them = f"{exact} of {exact + len(honest.failures)}"
        print(table_row((*cells, of_them, f"{honest.median_ms:.0f}", "no" if finding.complaints else "yes")))
    print(f"\nAn honest request took {peace_ms:.0f} ms (median) before the attacks.")
    for row, finding, _ in results:
        if finding.note:
            print(f"{row.number}: {finding.note}")
        for complaint in finding.complaints:
            print(f"{row.number}: MISSED: {complaint}")


def _chosen(only: str, *, has_tls: bool) -> list[AttackRow]:
    known = [row for row in rows() if row.has_tls or not has_tls]
    if not only:
        return [row for row in known if not row.is_slow]
    numbers = {int(word) for word in only.split(",") if word.isdigit()}
    chosen = [row for row in known if row.number in numbers]
    if not chosen:
        raise ConfigError("only", only, "numbers of rows: " + ", ".join(str(row.number) for row in known))
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.attack", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="N,N", help="these rows, slow ones too")
    parser.add_argument("--seconds", type=float, default=15.0, help="that a row may take")
    parser.add_argument("--tls", action="store_true")
    args = parser.parse_args()
    if not 1 <= args.seconds <= 600:
        raise ConfigError("seconds", args.seconds, "between 1 and 600")
    chosen = _chosen(args.only, has_tls=args.tls)
    token = secrets.token_urlsafe(24)
    ports = dict(zip(PROCESSES, free_ports(len(PROCESSES)), strict=True))
    metrics = (
        *("--set", f"router.metrics_port={ports['router']}"),
        *("--set", f"prefill_worker.metrics_port={ports['p0']}"),
        # The launcher adds a worker's index to the port that its table names.
        *("--set", f"decode_worker.metrics_port={ports['d0'] - 1}"),
    )
    results: list[tuple[AttackRow, AttackResult, Beside]] = []
    with Running.start(
        *FLAGS,
        *metrics,
        *(("--tls", "auto") if args.tls else ()),
        "--http",
        "0",
        env={"PDSERVE_TOKEN": token, "OMP_NUM_THREADS": "1"},
    ) as cluster:
        ca = cluster.ready_line.rpartition(", ca ")[2].rstrip(")") if args.tls else None
        target = AttackTarget(cluster=cluster, token=token, seconds=args.seconds, metrics_ports=ports, ca=ca)
        expected = answers_in_peace(cluster.target, token, ca)
        with legitimate_traffic(cluster.target, token, ca, expected) as peace:
            time.sleep(3.0)
        for row in chosen:
            print(f"row {row.number}: {row.name}", file=sys.stderr, flush=True)
            results.append((row, *run_row(row, target, expected)))
    show(results, peace.median_ms)
    return int(any(finding.complaints for _, finding, _ in results))


if __name__ == "__main__":
    sys.exit(main())
