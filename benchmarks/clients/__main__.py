r"""Times of other benchmarks beside those of `pdserve bench` and of the router itself, all against one cluster.

    make clients CLIENTS="aiperf guidellm vllm"
    python -m benchmarks.clients [--only aiperf,guidellm] [--concurrency 1,2] [--requests 24] [--model DIR]

Each client runs alone, at each level of concurrency. The servers measure the same requests: the differences of their
histograms before and after give their mean TTFT and TPOT of exactly these. So a row compares two measurements of the
same requests, and other load of the machine affects both. Over HTTP, the TTFT is the gateway's, from the headers of a
request to the first part of its answer; everything else is the router's. The bar is a ratio within 10 %. Clients whose
environment was not made are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.clients.programs import PROGRAMS, ClientLoad, ClientTimes, python_of
from pdserve.launch.running import Running
from simulator.report.comparison import table

MODEL: Final = Path("pdserve/models/stdlib-5m")
BAR: Final = 0.10
_SAMPLE: Final = re.compile(r"^pdserve_(ttft|tpot|http_ttft)_seconds_(sum|count)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
OURS: Final = ("bench over gRPC", "bench over HTTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    client: str
    concurrency: int
    requests: int
    routed: int  # requests that the router finished meanwhile
    ttft_s: float
    server_ttft_s: float  # of the gateway, or of the router over gRPC
    router_ttft_s: float
    tpot_s: float
    router_tpot_s: float

    @property
    def ttft_ratio(self) -> float:
        return self.ttft_s / self.server_ttft_s

    @property
    def tpot_ratio(self) -> float:
        return self.tpot_s / self.router_tpot_s

    @property
    def agrees(self) -> bool:
        return abs(self.ttft_ratio - 1.0) <= BAR and abs(self.tpot_ratio - 1.0) <= BAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PROGRAMS), help="clients, by comma")
    parser.add_argument("--concurrency", default="1,2", help="levels of the sweep")
    parser.add_argument("--requests", type=int, default=24, help="of each level")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--model", default=str(MODEL), metavar="DIR", help="of the cluster")
    flags = parser.parse_args()
    chosen = [name for name in flags.only.split(",") if name]
    for name in [name for name in chosen if python_of(name) is None]:
        print(f"{name}: left out, its environment was not made (make clients CLIENTS={name})", file=sys.stderr)
        chosen.remove(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    threads = str(max((os.cpu_count() or 1) // 2, 1))
    sets = (f"router.metrics_port={metrics_port}", "router.slo_ttft_s=60", "router.slo_tpot_s=10")
    words = [word for one in sets for word in ("--set", one)]
    with Running.start(
        "--model", flags.model, "--http", "0", *words, timeout_s=120.0, env={"OMP_NUM_THREADS": threads}
    ) as cluster:
        rows = []
        for row in _rows(cluster, flags, chosen, metrics_port):
            rows.append(row)
            print(
                f"  TTFT {row.ttft_ratio:.3f} and TPOT {row.tpot_ratio:.3f} of the servers'",
                file=sys.stderr,
                flush=True,
            )
    print(render(rows))


def render(rows: list[ClientRow]) -> str:
    head = (
        "CLIENT",
        "AT ONCE",
        "REQUESTS",
        "TTFT ms",
        "SERVER'S",
        "RATIO",
        "ROUTER'S",
        "TPOT ms",
        "ROUTER'S",
        "RATIO",
        "WITHIN 10 %",
    )
    cells = [
        (
            one.client,
            str(one.concurrency),
            str(one.requests) if one.requests == one.routed else f"{one.requests} of {one.routed}",
            *(f"{1000 * one.ttft_s:.1f}", f"{1000 * one.server_ttft_s:.1f}", f"{one.ttft_ratio:.3f}"),
            f"{1000 * one.router_ttft_s:.1f}",
            *(f"{1000 * one.tpot_s:.2f}", f"{1000 * one.router_tpot_s:.2f}", f"{one.tpot_ratio:.3f}"),
            "yes" if one.agrees else "no",
        )
        for one in rows
    ]
    return table([head, *cells])


def _rows(cluster: Running, flags: argparse.Namespace, chosen: list[str], metrics_port: int) -> Iterator[ClientRow]:
    programs: dict[str, Callable[[ClientLoad, Path], ClientTimes]] = {
        OURS[0]: lambda load, folder: _bench(load, "--target", cluster.target),
        OURS[1]: lambda load, folder: _bench(load, "--url", load.url, "--endpoint", "chat"),
        **{name: PROGRAMS[name] for name in chosen},
    }
    for concurrency in [int(one) for one in flags.concurrency.split(",")]:
        for name, program in programs.items():
            load = ClientLoad(
                url=cluster.http_url.removesuffix("/v1"),
                model=Path(flags.model).name,
                tokenizer=Path(flags.model).resolve(),
                concurrency=concurrency,
                requests=flags.requests,
                input_tokens=flags.input_tokens,
                output_tokens=flags.output_tokens,
            )
            print(f"{name}, {concurrency} at once ...", file=sys.stderr, flush=True)
            pages = [f"http://127.0.0.1:{metrics_port}", load.url]
            before = _histograms(pages)
            with tempfile.TemporaryDirectory() as folder:
                times = program(load, Path(folder))
            after = _histograms(pages)
            spent = {key: after[key] - before.get(key, 0.0) for key in after}
            ttft = "ttft" if name == OURS[0] else "http_ttft"
            yield ClientRow(
                client=name,
                concurrency=concurrency,
                requests=times.requests,
                routed=round(spent["ttft", "count"]),
                ttft_s=times.ttft_s,
                server_ttft_s=spent[ttft, "sum"] / spent[ttft, "count"],
                router_ttft_s=spent["ttft", "sum"] / spent["ttft", "count"],
                tpot_s=times.tpot_s,
                router_tpot_s=spent["tpot", "sum"] / spent["tpot", "count"],
            )


def _bench(load: ClientLoad, *where: str) -> ClientTimes:
    words = [sys.executable, "-m", "pdserve", "bench", *where, "--concurrency", str(load.concurrency), "--json"]
    words += ["--requests", str(load.requests), "--warmup", "0", "--input-tokens", str(load.input_tokens)]
    words += ["--output-tokens", str(load.output_tokens), "--seed", str(load.concurrency)]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return ClientTimes(
        requests=found["completed"], ttft_s=found["mean_ttft_ms"] / 1000.0, tpot_s=found["mean_tpot_ms"] / 1000.0
    )


def _histograms(urls: Sequence[str]) -> dict[tuple[str, str], float]:
    """Sums and counts over all paths."""
    found: dict[tuple[str, str], float] = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
            text = answer.read().decode()
        for name, part, value in _SAMPLE.findall(text):
            found[name, part] = found.get((name, part), 0.0) + float(value)
    return found


if __name__ == "__main__":
    main()
