"""Settings of each process: frozen, checked once, turned into flags and back by one rule.

A field `kv_blocks: int` is the flag `--kv-blocks`. The launcher builds a config and starts a process with
`to_flags(config)`; the process reads it with `parse_flags`. Nothing else reads the command line of a worker
or a router, so what a manifest says and what a laptop runs are the same words.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pdserve.core.errors import ConfigError

TRANSPORTS: Final = ("auto", "shm", "tcp", "nccl", "cuda_ipc", "nixl")
DTYPES: Final = ("auto", "float32", "bfloat16", "int8", "fp8")
LOADS: Final = ("auto", "dummy")
KV_DTYPES: Final = ("auto", "int8", "fp8")
DEVICES: Final = ("auto", "cpu", "cuda")
PUSHES: Final = ("auto", "end", "chunk", "layers")
KV_WIRES: Final = ("exact", "auto", "int8")
KV_CHECKS: Final = ("off", "step")
SPECULATIONS: Final = ("ngram", "off")
AHEADS: Final = ("auto", "on", "off")
MOST_DRAFTS: Final = 15  # a row of as many and its own token is what attention computes at once

SECRET_ENV: Final = "PDSERVE_CLUSTER_SECRET"
SECRET_HELP: Final = "secret of the cluster: routers and workers prove to each other that they know it"


def _doc(text: str, default: Any = dataclasses.MISSING, env: str = "") -> Any:
    return field(default=default, metadata={"help": text, "env": env})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One prefill or decode worker process."""

    model: str = _doc("folder of a Hugging Face checkpoint, or toy for integer arithmetic")
    worker_id: str = _doc("name of this worker, unique in the cluster")
    host: str = _doc("address to listen on", "127.0.0.1")
    port: int = _doc("gRPC port; 0 picks a free one", 0)
    advertise: str = _doc("HOST that others reach this worker at; the listening host when empty", "")
    redis: str = _doc("Redis URL of the registry and the prefix index; none when empty", "")
    cluster: str = _doc("name that keeps clusters on one Redis apart", "default")
    transport: str = _doc("how KV travels: " + ", ".join(TRANSPORTS), "auto")
    device: str = _doc("auto, cpu or cuda", "auto")
    dtype: str = _doc(
        "auto (float32 on CPU, bfloat16 on CUDA), float32, bfloat16, int8 weights on a CPU, fp8 on CUDA", "auto"
    )
    tensor_parallel: int = _doc("ranks that hold the model together: processes of one host, with a GPU each, if any", 1)
    cuda_graphs: bool = _doc("decode steps on CUDA are captured once and replayed", True)
    deterministic: bool = _doc("logits have the same bits whatever the batch; a CPU with float32 or int8", False)
    load: str = _doc("auto reads the folder's weights; dummy makes them up from config.json, to measure speed", "auto")
    kv_dtype: str = _doc("of stored keys and values: auto (the compute dtype), or a byte each: int8 or fp8", "auto")
    block_size: int = _doc("tokens per KV block", 16)
    kv_blocks: int = _doc("KV blocks in the pool; 0 sizes it from kv_memory_bytes", 0)
    kv_memory_bytes: int = _doc("bytes of the KV pool where kv_blocks is 0", 512 * 2**20)
    max_context_tokens: int = _doc("longest sequence; 0 takes the model's own limit", 0)
    max_batch: int = _doc("sequences in one decode step", 64)
    max_batch_tokens: int = _doc("prompt tokens in one prefill step", 512)
    push: str = _doc(
        "when KV leaves a prefill worker: auto (what the measured costs say), end, chunk or layers", "auto"
    )
    speculation: str = _doc(
        "guesses that decode steps verify: ngram (what followed before in the text) or off", "ngram"
    )
    ahead: str = _doc(
        "launch a decode step before the last one is read, where nobody speculates: auto (engines on a GPU), on, off",
        "auto",
    )
    max_drafts: int = _doc("guessed tokens of one sequence in one step, at most", 8)
    kv_wire: str = _doc(
        "as what float KV leaves a prefill worker: exact, int8 (off by 1/254 of a head's largest value at most) or "
        "auto (int8 where the link is slow)",
        "exact",
    )
    kv_check: str = _doc("step compares every block of every text with its stamp at each decode step; or off", "off")
    inbox_depth: int = _doc("requests that may wait on the worker before it refuses", 16)
    threads: int = _doc("compute threads; 0 shares the cores among this host's workers", 0)
    heartbeat_s: float = _doc("seconds between load reports", 0.25)
    lease_s: float = _doc("seconds that the registry keeps a silent worker", 5.0)
    stall_s: float = _doc("seconds without progress after which a busy worker ends itself", 30.0)
    drain_s: float = _doc("seconds that residents get to finish on SIGTERM", 30.0)
    metrics_port: int = _doc("Prometheus port; 0 serves none", 0)
    otlp: str = _doc("OTLP gRPC endpoint for traces; none when empty", "")
    is_prefix_cache_on: bool = _doc("keep finished blocks for later prompts", True)
    profile: str = _doc("what steps are believed to take: a known worker's name or a file; measured when empty", "")
    cluster_secret: str = _doc(SECRET_HELP, "", env=SECRET_ENV)
    toy_step_s: float = _doc("seconds that a toy step takes", 0.0)
    inject_faults: str = _doc("for tests: faults that KV transfers meet, as kvtransfer.faults reads them", "")

    def __post_init__(self) -> None:
        _choice("transport", self.transport, TRANSPORTS)
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, DTYPES)
        _choice("load", self.load, LOADS)
        _choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _at_least("tensor_parallel", self.tensor_parallel, 1)
        _at_least("block_size", self.block_size, 1)
        _at_least("kv_blocks", self.kv_blocks, 0)
        _at_least("max_batch", self.max_batch, 1)
        _at_least("max_batch_tokens", self.max_batch_tokens, 1)
        _choice("push", self.push, PUSHES)
        _choice("speculation", self.speculation, SPECULATIONS)
        _choice("ahead", self.ahead, AHEADS)
        _choice("kv_check", self.kv_check, KV_CHECKS)
        _choice("kv_wire", self.kv_wire, KV_WIRES)
        if not 1 <= self.max_drafts <= MOST_DRAFTS:
            raise ConfigError("max_drafts", self.max_drafts, f"between 1 and {MOST_DRAFTS}")
        _at_least("inbox_depth", self.inbox_depth, 1)
        _port("port", self.port)
        _port("metrics_port", self.metrics_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router process."""

    model: str = _doc("the workers' model folder (for its tokenizer), or toy")
    router_id: str = _doc("name of this router", "router-0")
    host: str = _doc("address to listen on", "127.0.0.1")
    port: int = _doc("gRPC port; 0 picks a free one", 50051)
    workers: tuple[str, ...] = _doc("HOST:PORT of workers that are known without a registry", ())
    redis: str = _doc("Redis URL of the registry and the prefix index; none when empty", "")
    cluster: str = _doc("name that keeps clusters on one Redis apart", "default")
    policy: str = _doc("placement policy", "goodput")
    slo_ttft_s: float = _doc("promised time to first token where a request names none", 2.0)
    slo_tpot_s: float = _doc("promised time per output token where a request names none", 0.2)
    local_max_uncached_tokens: int = _doc("uncached prompt tokens that decode workers rather read themselves", 16)
    max_queue: int = _doc("requests that may wait in the router before it refuses", 1024)
    max_new_tokens: int = _doc("most tokens that one request may ask for", 4096)
    max_message_bytes: int = _doc("largest gRPC message that is accepted", 4 * 2**20)
    request_timeout_s: float = _doc("deadline of a request that brings none", 600.0)
    prefix_lookup_s: float = _doc("time that the prefix index may take", 0.01)
    worker_silence_s: float = _doc("seconds without a load report after which a worker is routed around", 5.0)
    max_attempts: int = _doc("placements of one request before it fails", 4)
    token: str = _doc("bearer token that every call must bring; none when empty", "", env="PDSERVE_TOKEN")
    cluster_secret: str = _doc(SECRET_HELP, "", env=SECRET_ENV)
    metrics_port: int = _doc("Prometheus port; 0 serves none", 0)
    otlp: str = _doc("OTLP gRPC endpoint for traces; none when empty", "")
    record: str = _doc("file that events and commands are recorded to, without prompts; none when empty", "")
    record_mib: int = _doc("the recording ends at this size, serving goes on", 1024)
    drain_s: float = _doc("seconds that running requests get to finish on SIGTERM", 30.0)

    def __post_init__(self) -> None:
        _port("port", self.port)
        _port("metrics_port", self.metrics_port)
        _at_least("max_queue", self.max_queue, 0)
        _at_least("max_attempts", self.max_attempts, 1)
        _at_least("record_mib", self.record_mib, 1)
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.token:
            raise ConfigError(
                "host", self.host, "a loopback address, or a token beside it: anyone could call this port"
            )


Config = TypeVar("Config", WorkerConfig, RouterConfig)


def parse_flags(kind: type[Config], argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None) -> Config:
    """Reads flags; unknown ones end the process with a message, wrong values raise ConfigError.

    `environ` is read in place of this process's environment.
    """
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        flag = "--" + one.name.replace("_", "-")
        help_text = one.metadata.get("help", "").replace("%", "%%")
        env = one.metadata.get("env", "")
        if env:
            help_text += f"; better in the environment as {env}, since others can read a command line"
        required = one.default is dataclasses.MISSING
        if not required and not env and one.default not in ("", ()):
            help_text += f" ({'on' if one.default is True else 'off' if one.default is False else one.default})"
        hint = hints[one.name]
        if hint is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=one.default, help=help_text)
        elif isinstance(hint, types.GenericAlias) and typing.get_origin(hint) is tuple:
            parser.add_argument(flag, type=_words, default=one.default, help=help_text + " (comma-separated)")
        else:
            default = None if required else (from_env(env, environ) or one.default) if env else one.default
            parser.add_argument(flag, type=hint, required=required, default=default, help=help_text)
    return kind(**vars(parser.parse_args(argv)))


def to_flags(config: WorkerConfig | RouterConfig) -> list[str]:
    """The flags that, beside `to_env`, parse_flags turns back into an equal config; defaults are left out."""
    flags: list[str] = []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if value == one.default or one.metadata.get("env"):
            continue
        flag = "--" + one.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            flags.append(f"{flag}={','.join(value)}")
        else:
            flags.append(f"{flag}={value}")
    return flags


def to_env(config: WorkerConfig | RouterConfig) -> dict[str, str]:
    """The environment variables that carry what must not stand on a command line."""
    named = ((one.metadata.get("env", ""), getattr(config, one.name)) for one in dataclasses.fields(config))
    return {env: value for env, value in named if env}


def from_env(name: str, environ: Mapping[str, str] | None = None) -> str:
    """A secret from the variable `name`, or from the file that `name`_FILE names; empty where neither is set.

    Raises ConfigError where the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(f"{name}_FILE", "")
    if environ.get(name) or not file:
        return environ.get(name, "")
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}_FILE", file, f"a text file that can be read ({error})") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(name, value, "one of " + ", ".join(choices))


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(name, value, f"at least {low}")


def _port(name: str, value: int) -> None:
    if not 0 <= value <= 65_535:
        raise ConfigError(name, value, "a port between 0 and 65535")
