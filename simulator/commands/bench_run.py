"""Runs `pdserve bench`: makes its plan from the flags, runs it, and prints and writes the results."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from pdserve.client.target_flags import ssl_context, tls_of
from pdserve.config import TOKEN_ENV, from_env
from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.core.types import Slo
from pdserve.listening import ignore_poller_races
from pdserve.plot.drawing import figure_svg
from pdserve.plot_flag import check_plot, origin, write_plot
from pdserve.progress import ProgressLine
from simulator.bench.benchmark import Benchmark, BenchObserver, BenchPlan
from simulator.bench.load import DEFAULT_IDS, AgentLoad, LoadLevel, LoadPlan, SyntheticLoad
from simulator.bench.report import (
    NO_TARGET_S,
    bench_figure,
    bench_page,
    own_fields,
    ratio_fields,
    render_bench,
    vllm_fields,
)
from simulator.bench.server import BenchAnswer, BenchOutcome, BenchServer, RequestOptions
from simulator.bench.statistics import BenchResult
from simulator.commands.flags import COMPARE_TOKEN_ENV
from simulator.commands.simulation import check_writable
from simulator.model import Trace
from simulator.traces.files import FileTrace
from simulator.traces.reshaped import Reshaped, jittered
from simulator.traces.rows import MAX_TOKENS

# --- progress on stderr ---------------------------------------------------------------------------------------


@final
class BenchProgress(BenchObserver):
    """`total`: requests of a turn; None if only `duration_s` bounds it."""

    def __init__(self, line: ProgressLine, *, total: int | None, duration_s: float | None) -> None:
        self._line, self._total, self._duration_s = line, total, duration_s
        self._begin_s = 0.0
        self._ended = self._failed = self._rejected = 0

    def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None:
        label = f"{server} {level.label}" + (f", turn {turn + 1} of {turns}" if turns > 1 else "")
        self._line.begin(label, 1.0 if self._total or self._duration_s else None)
        self._begin_s = time.monotonic()
        self._ended = self._failed = self._rejected = 0

    def answered(self, answer: BenchAnswer) -> None:
        self._ended += 1
        self._failed += answer.outcome is BenchOutcome.FAILED
        self._rejected += answer.outcome is BenchOutcome.REJECTED
        by_count = self._ended / self._total if self._total else 0.0
        by_time = (time.monotonic() - self._begin_s) / self._duration_s if self._duration_s else 0.0
        self._line.update(min(max(by_count, by_time), 1.0), self._detail())

    def turn_ends(self) -> None:
        self._line.close()

    def _detail(self) -> str:
        of = f" of {self._total}" if self._total else ""
        counts = ((self._rejected, "rejected"), (self._failed, "failed"))
        return ", ".join([f"{self._ended}{of} ended", *(f"{number} {name}" for number, name in counts if number)])


# --- plan and results -----------------------------------------------------------------------------------------

_CONCURRENCY: Final = 4
_REQUESTS: Final = 100
_SESSIONS: Final = 8
_TURNS: Final = 4  # with a second server
_MAX_TURNS: Final = 1000
_SYNTHETIC: Final = (("input_tokens", (128, 512)), ("output_tokens", (32, 128)))
INTERRUPTED: Final = 130


def run(args: argparse.Namespace) -> int:
    slo = _slo(args)
    plan = make_plan(args)
    check_writable(args.rows)
    check_plot(args)
    servers = _servers(args, has_sessions=plan.load.has_sessions)
    with ProgressLine("connecting") as line:
        progress = BenchProgress(line, total=plan.load.num_planned, duration_s=plan.load.duration_s)
        result = asyncio.run(_run(Benchmark(servers, plan, slo, progress)))
    if args.rows:
        Path(args.rows).write_text("".join(to_json(row) + "\n" for row in rows_of(result)), encoding="utf-8")
    if args.plot:
        lines = [f"{time.strftime('%Y-%m-%d %H:%M')}, seed {args.seed}; {origin()}"]
        write_plot(
            args,
            svg=lambda: figure_svg(bench_figure(result, caption=[_command(), *lines])),
            page=lambda: bench_page(result, command=_command(), caption=lines),
        )
    print(to_json(as_object(result, args)) if args.json else render_bench(result))
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if any(one.summary.completed for one in result.levels) else 1


def make_plan(args: argparse.Namespace) -> BenchPlan:
    """Raises ConfigError with the name of the flag."""
    if not 0 <= args.warmup <= 100_000:
        raise ConfigError("warmup", args.warmup, "0 to 100000 requests")
    turns = args.turns if args.turns is not None else _TURNS if args.compare else 1
    if not 1 <= turns <= _MAX_TURNS:
        raise ConfigError("turns", turns, f"1 to {_MAX_TURNS}")
    source = _source(args)
    is_synthetic = isinstance(source, SyntheticLoad)
    is_agents = isinstance(source, AgentLoad)
    has_sessions = is_agents or (isinstance(source, FileTrace) and source.format.has_sessions)
    _check_sessions(args, has_sessions=has_sessions, is_agents=is_agents)
    requests = args.requests
    if requests is None and args.duration is None and is_synthetic:
        requests = _REQUESTS
    if args.rate:
        levels = [LoadLevel(rate_rps=rate) for rate in args.rate]
    elif args.concurrency or is_synthetic or is_agents:
        levels = [LoadLevel(concurrency=one) for one in args.concurrency or [_CONCURRENCY]]
    else:
        levels = [LoadLevel()]
    load = LoadPlan(
        source=source,
        num_requests=requests,
        duration_s=args.duration,
        length_scale=args.length_scale,
        speed=args.speed,
        has_sessions=has_sessions,
    )
    next(load.requests(levels[0]), None)  # reports an invalid length or trace before anything is sent
    return BenchPlan(
        load=load,
        levels=list(dict.fromkeys(levels)),
        turns=turns,
        warm_requests=args.warmup,
        seed=args.seed,
        token_ids=args.token_ids or DEFAULT_IDS,
        slo_task_s=args.slo_task,
        reads_predictions=bool(args.plot or args.rows),
    )


def _check_sessions(args: argparse.Namespace, *, has_sessions: bool, is_agents: bool) -> None:
    """Raises ConfigError about a flag that this load does not have."""
    if args.sessions is not None and not is_agents:
        raise ConfigError("sessions", args.sessions, "--workload agents beside it")
    if args.ended_sessions is not None and not is_agents:
        raise ConfigError("ended-sessions", args.ended_sessions, "--workload agents beside it")
    if args.slo_task is not None:
        if not has_sessions:
            raise ConfigError("slo-task", args.slo_task, "--workload agents or a trace of sessions beside it")
        if not 0.0 < args.slo_task <= DAY_S:
            raise ConfigError("slo-task", args.slo_task, f"seconds above 0, at most {DAY_S:g}")
    if has_sessions and not is_agents and args.rate:
        raise ConfigError("rate", "a trace of sessions", "--speed, which also shortens pauses, or --concurrency")


def _source(args: argparse.Namespace) -> SyntheticLoad | AgentLoad | Trace:
    if args.workload:
        others = (*(name for name, _ in _SYNTHETIC), "prefix_tokens", "trace", "jitter")
        if given := next((name for name in others if getattr(args, name)), None):
            raise ConfigError(given.replace("_", "-"), "a value", f"no --workload {args.workload} beside it")
        is_bounded = args.requests or (args.duration and args.rate)
        sessions = args.sessions if args.sessions is not None or is_bounded else _SESSIONS
        return AgentLoad(num_sessions=sessions, ended_share=args.ended_sessions or 0.0, seed=args.seed)
    if args.trace:
        for flag, value in (
            *((name, getattr(args, name)) for name, _ in _SYNTHETIC),
            ("prefix_tokens", args.prefix_tokens),
        ):
            if value:
                raise ConfigError(flag.replace("_", "-"), value, "no --trace beside it: a trace has its own lengths")
        file = FileTrace(args.trace)
        if not args.jitter:
            return file
        if not file.quantum_s:
            raise ConfigError("jitter", file.name, "a trace whose timestamps are rounded")
        return Reshaped(file, jittered(args.seed, file.quantum_s))
    if args.jitter or args.length_scale != 1.0 or args.speed != 1.0:
        raise ConfigError("jitter, length-scale and speed", "no trace", "a --trace or a --workload that they change")
    if args.prefix_tokens < 0 or args.prefixes < 1:
        raise ConfigError(
            "prefix-tokens", f"{args.prefix_tokens} in {args.prefixes} prefixes", "at least 0, and 1 prefix"
        )
    lengths = {name: getattr(args, name) or default for name, default in _SYNTHETIC}
    for name, (low, high) in lengths.items():
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ConfigError(name.replace("_", "-"), f"{low}:{high}", f"A:B with 1 <= A <= B <= {MAX_TOKENS}")
    return SyntheticLoad(**lengths, prefix_tokens=args.prefix_tokens, num_prefixes=args.prefixes, seed=args.seed)


def _slo(args: argparse.Namespace) -> Slo | None:
    if args.slo_ttft is None and args.slo_tpot is None:
        return None
    given = {"ttft_s": args.slo_ttft, "tpot_s": args.slo_tpot}
    return Slo(**{name: NO_TARGET_S if value is None else value for name, value in given.items()})


def _servers(args: argparse.Namespace, *, has_sessions: bool) -> list[BenchServer]:
    sampling = RequestOptions(
        temperature=args.temperature,
        ignore_eos=not args.stop_at_eos,
        slo_ttft_s=args.slo_ttft,
        slo_tpot_s=args.slo_tpot,
        slo_task_s=args.slo_task,
        has_sessions=has_sessions,
    )
    token = from_env(TOKEN_ENV) or None
    first_name = args.name or "pdserve"
    servers = [_server(args, first_name, args.url or args.target, token, sampling, is_url=bool(args.url))]
    if args.compare:
        if args.compare_name == first_name:
            raise ConfigError("compare-name", first_name, "another name than that of the first server")
        # Not the first server's token, which must not be sent to another server.
        other_token = from_env(COMPARE_TOKEN_ENV) or None
        servers.append(
            _server(args, args.compare_name, args.compare, other_token, sampling, is_url="://" in args.compare)
        )
    return servers


def _server(
    args: argparse.Namespace, name: str, address: str, token: str | None, sampling: RequestOptions, *, is_url: bool
) -> BenchServer:
    if is_url:
        from simulator.bench.http_server import HttpServer, base_url  # needs the extra `bench`

        return HttpServer(
            name,
            address,
            sampling=sampling,
            endpoint=args.endpoint,
            token=token,
            tls=ssl_context(args, base_url(address)),
            insecure=args.insecure,
            timeout_s=args.timeout,
            model=args.model,
        )
    from simulator.bench.router_server import GrpcServer

    return GrpcServer(
        name,
        address,
        sampling=sampling,
        token=token,
        tls=tls_of(_with_target(args, address)),
        insecure=args.insecure,
        timeout_s=args.timeout,
        model=args.model,
    )


def _with_target(args: argparse.Namespace, address: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "target": address})


async def _run(benchmark: Benchmark) -> BenchResult:
    """The first Ctrl-C ends the benchmark with a report; the second one ends it immediately."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(ignore_poller_races)

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        benchmark.interrupt()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await benchmark.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def as_object(result: BenchResult, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the first run, as `vllm bench serve` has them; with several runs, `runs` holds all."""
    runs = []
    for one in result.levels:
        found = one.summary
        runs.append(
            {
                "server": one.server,
                "request_rate": one.level.rate_rps,
                "max_concurrency": one.level.concurrency,
                "turns": len(one.turns),
                **vllm_fields(found),
                **own_fields(found),
            }
        )
    head = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": result.servers[0][2] if result.servers else "",
        "num_prompts": args.requests,
        "seed": args.seed,
        "is_interrupted": result.is_interrupted,
        "servers": [{"name": name, "address": address, "model": model} for name, address, model in result.servers],
    }
    ratios = {level.label: fields for level in result.shown_levels if (fields := ratio_fields(result.ratios(level)))}
    whole: dict[str, Any] = {**head, **(runs[0] if runs else {})}
    return {**whole, **({"runs": runs, "ratios": ratios} if len(runs) > 1 else {})}


def rows_of(result: BenchResult) -> Iterator[dict[str, Any]]:
    """A row for each request."""
    for one in result.levels:
        for turn_number, turn in enumerate(one.turns):
            for answer in turn.answers:
                is_done = not answer.error and bool(answer.chunk_s)
                yield {
                    "server": one.server,
                    "load": one.level.label,
                    "turn": turn_number,
                    "number": answer.number,
                    "outcome": answer.outcome.value,
                    "error": answer.error,
                    "due_s": answer.due_s,
                    "sent_s": answer.sent_s,
                    "ended_s": answer.ended_s,
                    "session": answer.task,
                    "input_tokens": answer.prompt_tokens,
                    "cached_tokens": answer.cached_tokens,
                    "reusable_tokens": answer.reusable_tokens,
                    "output_tokens": answer.output_tokens,
                    "ttft_s": answer.ttft_s if is_done else None,
                    "tpot_s": answer.tpot_s if is_done else None,
                    "itls_s": answer.itl_s,
                    "server_ttft_s": answer.server_ttft_s,
                    "server_tpot_s": answer.server_tpot_s,
                    "predicted_ttft_s": answer.predicted_ttft_s,
                    "predicted_tpot_s": answer.predicted_tpot_s,
                }


def _command() -> str:
    """The command line of the user. It contains no secret, because tokens come from the environment."""
    return shlex.join(["pdserve", *sys.argv[1:]])
