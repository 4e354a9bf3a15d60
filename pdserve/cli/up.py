"""`pdserve up`: starts a cluster on this host or on Ray and keeps it until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Final

from pdserve.cli.background import is_in_background, start_in_background
from pdserve.config import (
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    KV_DTYPES,
    LOADS,
    LOG_LEVEL_ENV,
    LOG_LEVELS,
    RAY_STRATEGIES,
    ROLES,
    TRANSPORTS,
    RouterConfig,
    WorkerConfig,
)
from pdserve.config_flags import Parser, joined, words
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.installation import check_platform
from pdserve.telemetry.logs import FORMAT_ENV, FORMATS

HELP = "start a cluster"
SERVE_PORT: Final = 8000  # of HTTP, for `pdserve serve`
NOT_SETTINGS: Final = ("command", "argv", "given_model", "config", "set", "detach")
SETTINGS = (
    "`python -m router --help` and `python -m decode_worker --help` list the keys of these tables with their defaults."
)


#: Flags of vLLM and SGLang, by what they are here.
_ELSEWHERE: Final = {
    "quantization": "--dtype, such as int8",
    "kv-cache-dtype": "--kv-dtype",
    "tensor-parallel-size": "--set worker.tensor_parallel=N",
    "tp": "--set worker.tensor_parallel=N",
    "tp-size": "--set worker.tensor_parallel=N",
    "data-parallel-size": "--prefill N and --decode M, the numbers of workers",
    "gpu-memory-utilization": "--set worker.gpu_memory_share=X",
    "mem-fraction-static": "--set worker.gpu_memory_share=X",
    "max-model-len": "--set worker.max_context_tokens=N",
    "context-length": "--set worker.max_context_tokens=N",
    "max-num-seqs": "--set worker.max_batch=N",
    "max-num-batched-tokens": "--set worker.max_batch_tokens=N",
    "chunked-prefill-size": "--set worker.max_batch_tokens=N",
    "page-size": "--set worker.block_size=N",
    "model-path": "--model",
    "load-format": "--load",
    "lora-modules": "--lora",
    "enable-lora": "--lora NAME=FOLDER, or --lora-folders FOLDER",
    "max-lora-rank": "--set worker.max_lora_rank=N",
    "max-loras": "--set worker.max_loras=N",
    "api-key": "the token in PDSERVE_TOKEN, or --key-file FILE for several tenants",
}


def _elsewhere() -> dict[str, str]:
    """With each setting of a worker or a router, by the name of its flag."""
    settings = {
        one.name.replace("_", "-"): f"--set {part}.{one.name}=VALUE"
        for part, kind in (("router", RouterConfig), ("worker", WorkerConfig))
        for one in fields(kind)
        if not one.metadata["env"]
    }
    return settings | _ELSEWHERE


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"{SETTINGS} If PDSERVE_TOKEN is set, callers must present that token or, with --key-file, a tenant's key. "
        "Ctrl-C and SIGTERM let open requests finish, in each process for at most its drain_s (30 s). A second signal "
        "ends everything at once."
    )
    if isinstance(parser, Parser):
        parser.elsewhere = _elsewhere()
    keep = argparse.SUPPRESS  # without the flag, the file's value applies
    add = parser.add_argument
    add("given_model", nargs="?", default=None, metavar="MODEL", help="the same as --model")
    add(
        "--model",
        default=keep,
        metavar="MODEL",
        help="folder of a Hugging Face checkpoint, name on its Hub (org/name), or toy; the bundled model when absent",
    )
    add(
        "--served-model-name",
        nargs="+",
        type=words,
        default=keep,
        metavar="NAME",
        help="names of the model for callers; requests may use each of them, and answers have the first. A "
        "positional MODEL comes before it (that of the folder or of the Hub)",
    )
    add("--prefill", type=int, default=keep, metavar="N", help="number of prefill workers (1)")
    add("--decode", type=int, default=keep, metavar="M", help="number of decode workers (1)")
    add(
        "--autoscale",
        default=keep,
        metavar="MIN:MAX",
        help="add and end workers while the cluster serves, within these numbers of workers of both roles, so that "
        "predicted requests meet their targets at the least cost (the number is fixed)",
    )
    add(
        "--roles",
        choices=ROLES,
        default=keep,
        help="auto: also change how many workers prefill and how many decode (fixed)",
    )
    add(
        "--routers",
        type=int,
        default=keep,
        metavar="N",
        help="number of router processes, which share the port: one uses at most one core (1)",
    )
    add("--host", default=keep, help="address that the router listens on (127.0.0.1)")
    add("--port", type=int, default=keep, help="gRPC port of the router; 0 picks a free port (50051)")
    add(
        "--http",
        type=int,
        default=keep,
        metavar="PORT",
        help="also serve OpenAI's HTTP API on this port; 0 picks a free port (no HTTP)",
    )
    add(
        "--http-process",
        action="store_true",
        default=keep,
        help="with --http: serve HTTP in a process of its own, and not in the router's",
    )
    add(
        "--metrics",
        type=int,
        default=keep,
        metavar="PORT",
        help="serve Prometheus metrics on loopback: the launcher on PORT, which also lists the ports of the others at "
        "/targets, and each process on a port after it (no metrics)",
    )
    add(
        "--tls",
        default=keep,
        metavar="auto|DIR",
        help="use TLS on all ports: auto makes a CA and certificates for this start; DIR holds tls.crt, tls.key and "
        "ca.crt (plain text, on loopback only)",
    )
    add(
        "--tls-client-ca",
        default=keep,
        metavar="FILE",
        help="with --tls: callers need a certificate from the CA in FILE (none)",
    )
    add(
        "--insecure",
        action="store_true",
        default=keep,
        help="allow plain text on a --host that is not loopback",
    )
    add("--redis", default=keep, metavar="URL", help="URL of a Redis server (one that is started on this host)")
    add(
        "--ray",
        nargs="?",
        const="",
        default=keep,
        metavar="ADDRESS",
        help="run the workers as Ray actors, on the Ray cluster at ADDRESS (auto, HOST:PORT or ray://HOST:PORT); "
        "without it, Ray is started on this host",
    )
    add(
        "--ray-strategy",
        choices=RAY_STRATEGIES,
        default=keep,
        help="with --ray: spread the workers over the nodes, or pack them on few; auto packs workers with GPUs (auto)",
    )
    add(
        "--ray-wait-s",
        type=float,
        default=keep,
        metavar="SECONDS",
        help="with --ray: how long Ray may take to place the workers; more if it starts nodes on demand, and 300.0 "
        "unless given with --autoscale and an ADDRESS (10.0)",
    )
    add("--transport", choices=TRANSPORTS, default=keep, help="transport for KV blocks (auto)")
    add(
        "--engine",
        default=keep,
        metavar="auto|own|vllm|toy",
        help="engine of the workers: own, vllm (with `make vllm-env`), toy (a mock of the model, without weights), or "
        "the name of an installed one; auto takes own where it serves the model (auto)",
    )
    add("--device", choices=DEVICES, default=keep, help="device of the model (auto)")
    add(
        "--load",
        choices=LOADS,
        default=keep,
        help="auto reads the weights; dummy generates random ones, for benchmarks (auto)",
    )
    add("--dtype", choices=DTYPES, default=keep, help="dtype of weights and activations (auto)")
    add("--kv-dtype", choices=KV_DTYPES, default=keep, help="dtype of the KV cache (auto)")
    add(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default=keep,
        help="sampling defaults of the model's generation_config.json, for requests that give no value: auto applies "
        "them, none ignores them (auto)",
    )
    add(
        "--lora",
        action="append",
        type=words,
        default=keep,
        metavar="NAME=FOLDER",
        help="LoRA adapter, which requests choose by its name as the model; repeatable (none)",
    )
    add(
        "--lora-folders",
        action="append",
        type=words,
        default=keep,
        metavar="FOLDER",
        help="folder from which operators may load LoRA adapters while the cluster serves; repeatable (none)",
    )
    add("--otlp", default=keep, metavar="HOST:PORT", help="OpenTelemetry collector that receives traces")
    add(
        "--record",
        default=keep,
        metavar="FILE",
        help="record the router's events and commands in FILE, without prompts",
    )
    add(
        "--key-file",
        default=keep,
        metavar="FILE",
        help="tenants, their quotas and hashes of their keys, as `pdserve keys` writes them",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default=keep,
        help=f"text, or one JSON object per line; also in {FORMAT_ENV} (text)",
    )
    add(
        "--log-level",
        choices=LOG_LEVELS,
        default=keep,
        help=f"least level that the processes log; also in {LOG_LEVEL_ENV} (info; during the start, warning)",
    )
    add(
        "--log-dir",
        default=keep,
        metavar="DIR",
        help="write the log of each process to a file in DIR instead of stderr",
    )
    add(
        "--log-max-bytes",
        type=int,
        default=keep,
        metavar="BYTES",
        help="size at which a file in --log-dir is renamed to NAME.log.1, an earlier one to NAME.log.2 (64 MiB)",
    )
    add(
        "--log-files",
        type=int,
        default=keep,
        metavar="N",
        help="number of renamed files to keep of each process; 0 keeps none (5)",
    )
    add(
        "--detach",
        action="store_true",
        help="return when the cluster is ready, and keep it in the background; `pdserve adopt` replaces its launcher, "
        "and `pdserve down` ends it",
    )
    add(
        "--orphan-s",
        type=float,
        default=keep,
        metavar="SECONDS",
        help="with --detach: how long the cluster goes on if its launcher has ended, before it drains and ends (3600)",
    )
    add(
        "--inject-faults",
        default=keep,
        metavar="PLAN",
        help="for tests: inject faults into KV transfers, such as seed=7,share=0.1",
    )
    add(
        "--config",
        metavar="FILE",
        help="TOML file with the same names, and tables [worker], [prefill_worker], [decode_worker], [router] and "
        "[gateway]",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one line of that file, such as router.max_queue=4; repeatable",
    )


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line. A word after `--ray` is the model if it has not the form of an address and no
    other model is given, because argparse gives `--ray` whatever follows it."""
    from pdserve.launch.confine import is_address

    flags = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    if args.given_model is not None:
        flags.setdefault("model", args.given_model)
    if (word := flags.get("ray")) and "model" not in flags and not is_address(word):
        flags |= {"model": word, "ray": ""}
    return flags


def run(args: argparse.Namespace) -> int:
    check_platform(sys.platform)
    if find_spec("redis") is None:  # before a process starts that needs the extra
        raise ModuleNotFoundError(name="redis")
    if args.detach and not is_in_background():
        return start_in_background(args.argv)
    from pdserve.launch import settings
    from pdserve.launch.confine import ADDRESSES
    from pdserve.launch.serve import serve

    flags = given_flags(args)
    if args.given_model is not None and flags["model"] != args.given_model:
        print(f"pdserve {args.command}: error: two models, {args.given_model} and {args.model}", file=sys.stderr)
        return 2
    for name in ("served_model_name", "lora", "lora_folders"):
        if name in flags:
            flags[name] = joined(flags[name])
    defaults: dict[str, Any] = {"http": SERVE_PORT} if args.command == "serve" else {}
    if level := os.environ.get(LOG_LEVEL_ENV):
        defaults["log_level"] = level
    if "log_format" in flags:
        os.environ[FORMAT_ENV] = flags.pop("log_format")  # the processes inherit it

    source = settings.SettingsSource(flags=flags, file=args.config, words=tuple(args.set), defaults=defaults)
    try:
        asked = source.read()
    except ConfigError as error:
        is_guess = isinstance(error, ModelError) and flags.get("model") == getattr(args, "ray", "")
        hint = f" (if --ray was given an address: it is {ADDRESSES})" if is_guess else ""
        print(f"pdserve {args.command}: error: {error}{hint}", file=sys.stderr)
        return 2
    os.environ[LOG_LEVEL_ENV] = asked.log_level  # the processes inherit it
    return asyncio.run(serve(asked, source, detaches=args.detach))
