"""The settings of workers, routers and gateways, frozen and checked once; the environment variables of secrets."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.core.access.hosts import PORTS, check_endpoint, check_token, is_loopback_host
from pdserve.core.adapters import split_adapter
from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError
from pdserve.core.setting import (
    AUTO,
    LARGEST_COUNT,
    NAME,
    CallerTlsSettings,
    TlsSettings,
    check_fields,
    check_tls,
    setting,
)

# --- choices that are one file each ---------------------------------------------------------------------------
# Placement policies and KV transports. The files are listed, not imported, because settings are read without numba and
# CUDA.


def file_names(package: str, folder: str) -> tuple[str, ...]:
    """The modules in a folder of an installed top-level package, sorted; without packages."""
    found = find_spec(package)
    assert found is not None
    folders = [f"{one}/{folder}" for one in found.submodule_search_locations or ()]
    return tuple(sorted(one.name for one in iter_modules(folders) if not one.ispkg))


POLICIES: Final = tuple(name.replace("_", "-") for name in file_names("router", "policy/policies"))
TRANSPORT_FILES: Final = file_names("kvtransfer", "transports")
STAGED: Final = "_staged"  # tcp_staged is tcp for pools on GPUs, and has no setting of its own
TRANSPORTS: Final = ("auto", *(name for name in TRANSPORT_FILES if not name.endswith(STAGED)))


# --- other choices --------------------------------------------------------------------------------------------

DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8")
LOADS: Final = ("auto", "dummy")
KV_DTYPES: Final = ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2")
RAY_STRATEGIES: Final = ("auto", "spread", "pack")
ROLES: Final = ("fixed", "auto")
MOST_WORKERS: Final = 512  # of both roles
_BOUNDS: Final = re.compile(r"([0-9]{1,4}):([0-9]{1,4})")
DEVICES: Final = ("auto", "cpu", "cuda")
PUSHES: Final = ("auto", "end", "chunk", "layers")
KV_WIRES: Final = ("exact", "auto", "int8")
KV_CHECKS: Final = ("off", "step")
SPECULATIONS: Final = ("auto", "ngram", "off")
SWITCHES: Final = ("auto", "on", "off")
GENERATION_CONFIGS: Final = ("auto", "none")
RANK_POOLS: Final = ("auto", "own")
MAX_SERVED_NAMES: Final = 64
_SERVED_NAME: Final = re.compile(r"[^\s,]{1,256}")
GATEWAY_CONNECTIONS: Final = 3072  # of a gateway, by default
MAX_ADAPTERS: Final = 4096
LARGEST_LORA_RANK: Final = 512  # that vLLM computes
MAX_ROUTERS: Final = 32  # of one launcher
MAX_DRAFTS: Final = 15  # attention computes rows of this many drafts and their own token at once


def member_socket(member: int) -> str:
    """Name of the unix socket of a router in the folder of its group."""
    return f"router-{member}.sock"


LOG_LEVELS: Final = ("debug", "info", "warning", "error")

LOG_LEVEL_ENV: Final = "PDSERVE_LOG_LEVEL"
TOKEN_ENV: Final = "PDSERVE_TOKEN"
RAY_TOKEN_ENV: Final = "RAY_AUTH_TOKEN"  # Ray's own
REDIS_ENV: Final = "PDSERVE_REDIS"
SECRET_ENV: Final = "PDSERVE_CLUSTER_SECRET"
KV_STORE_ENV: Final = "PDSERVE_KV_STORE"  # if the URL has a password
SECRET_HELP: Final = "cluster secret, with which routers and workers authenticate each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(TlsSettings):
    """One prefill or decode worker process."""

    model: str = setting(
        "folder of a Hugging Face checkpoint, name on its Hub, or toy for a test model without weights"
    )
    worker_id: str = setting("name of this worker, unique in the cluster", is_name=True)
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("gRPC port; 0 picks a free one", 0, within=PORTS)
    advertise: str = setting("host name or address at which other processes reach this worker; host when empty", "")
    redis: str = setting(
        "Redis URL of the registry and the prefix index; none when empty", "", env=REDIS_ENV, is_url=True
    )
    cluster: str = setting(
        "name of the cluster; clusters that share one Redis need different names", "default", is_name=True
    )
    transport: str = setting(
        "transport for KV blocks; auto chooses one for each pair of workers", "auto", choices=TRANSPORTS
    )
    engine: str = setting(
        "engine: own (torch, or toy for a toy model), vllm, toy (stands in for any model, without its weights), or the "
        "name of an installed one; auto is own, and vllm for a model that only vLLM serves",
        AUTO,
        is_name=True,
    )
    engine_python: str = setting(
        "python of another environment in which the worker runs, such as .venv-vllm/bin/python of `make vllm-env`; "
        "that of its launcher when empty",
        "",
    )
    device: str = setting("device of the model; auto takes CUDA if a GPU is there", "auto", choices=DEVICES)
    dtype: str = setting(
        "dtype of weights and products: auto (bfloat16 on CUDA; on a CPU with the instructions bfloat16 or int4, "
        "if the checkpoint is; otherwise float32), float32, bfloat16, float16 (vllm), "
        "int8 or int4 (weights, on a CPU) or fp8 (on CUDA)",
        "auto",
        choices=DTYPES,
    )
    tensor_parallel: int = setting(
        "number of tensor-parallel ranks; each is a process, with its own GPU if there are GPUs", 1, within=(1, 64)
    )
    rendezvous: str = setting(
        "HOST:PORT of this worker's host at which ranks from other hosts join (`pdserve rank HOST:PORT`); when empty, "
        "all ranks run on this host",
        "",
    )
    local_ranks: int = setting("number of ranks on this worker's host; 0 means all", 0, within=(0, 64))
    rank_pools: str = setting(
        "KV pools of the ranks: auto (one shared pool on a CPU, one pool per rank on GPUs and with vllm) or own (one "
        "pool per rank)",
        "auto",
        choices=RANK_POOLS,
    )
    cuda_graphs: bool = setting("capture decode steps as CUDA graphs and replay them; vllm also compiles", True)
    deterministic: str = setting(
        "compute bitwise identical logits for any batch and chunk, on a CPU: on, off, or auto (on with bfloat16)",
        "auto",
        choices=SWITCHES,
    )
    load: str = setting(
        "auto reads the weights from the folder; dummy generates random weights from config.json, for benchmarks",
        "auto",
        choices=LOADS,
    )
    kv_dtype: str = setting(
        "dtype of the KV cache: auto (float32 if dtype is, otherwise bfloat16), int8, fp8, or with vllm also fp8_e4m3 "
        "(the same as fp8) and fp8_e5m2",
        "auto",
        choices=KV_DTYPES,
    )
    block_size: int = setting("tokens per KV block", 16, within=(1, 4096))
    kv_blocks: int = setting(
        "number of KV blocks in the pool; 0 computes it from kv_memory_bytes", 0, within=(0, LARGEST_COUNT)
    )
    kv_memory_bytes: int = setting(
        "size of the KV pool if kv_blocks is 0; 0 takes the rest of gpu_memory_share on a GPU, and on a CPU an eighth "
        "of the memory that the weights leave free, at most 8 GiB",
        0,
        within=(0, 2**46),
    )
    kv_host_bytes: int = setting(
        "host memory for KV blocks that leave the pool. Later prompts load them if that is predicted to be faster than "
        "computing them. 0: none; -1: on a GPU an eighth of the host's free memory, at most 64 GiB, on a CPU and with "
        "vllm none. For workers of one rank",
        -1,
        within=(-1, 2**46),
    )
    kv_disk_path: str = setting(
        "folder for KV blocks that leave memory; they outlive the worker. Each worker has a folder in it, which only "
        "this user may enter. When empty, there is no disk tier. For pools on a CPU only",
        "",
    )
    kv_disk_bytes: int = setting(
        "maximum size of this worker's folder in kv_disk_path; the oldest blocks leave first",
        2**34,
        within=(1, 2**46),
    )
    kv_disk_write_bytes_s: int = setting(
        "maximum rate of writes to kv_disk_path; blocks that leave memory faster are dropped",
        2**28,
        within=(2**10, 2**40),
    )
    kv_store: str = setting(
        "URL of a shared store of KV blocks: redis://HOST:PORT/DB, file:///FOLDER on a shared file system, or "
        "s3://BUCKET/PATH and what else fsspec reaches (needs the extra store); none when empty. Workers with the same "
        "cluster secret and model share its blocks. For pools on a CPU only",
        "",
        env=KV_STORE_ENV,
        is_url=True,
    )
    kv_store_bytes: int = setting(
        "approximate maximum size of the blocks in kv_store; the least recently used leave first, in a bucket the "
        "first written",
        2**36,
        within=(1, 2**53),
    )
    kv_store_write_bytes_s: int = setting(
        "maximum rate at which this worker writes to kv_store; blocks beyond it are dropped",
        2**26,
        within=(2**10, 2**40),
    )
    gpu_memory_share: float = setting(
        "share of a GPU's memory for this worker: weights, activations, CUDA graphs and KV pool",
        0.9,
        within=(0.01, 1.0),
    )
    max_context_tokens: int = setting(
        "maximum length of a sequence, prompt and output; 0 takes the model's limit", 0, within=(0, LARGEST_COUNT)
    )
    max_batch: int = setting(
        "maximum number of sequences in one decode step; 0 takes 256 on a GPU and 64 on a CPU", 0, within=(0, 65_536)
    )
    max_batch_tokens: int = setting(
        "maximum number of prompt tokens in one step; 0 takes 2048 on a prefill worker with a GPU, else 512",
        0,
        within=(0, 2**20),
    )
    push: str = setting(
        "when a prefill worker sends KV: end (after the prompt), chunk (after each chunk), layers (after each group of "
        "layers), or auto (chosen by measured costs)",
        "auto",
        choices=PUSHES,
    )
    speculation: str = setting(
        "speculative decoding: ngram (drafts from the request's own text), off, or auto (ngram on a CPU, off on a GPU)",
        "auto",
        choices=SPECULATIONS,
    )
    async_scheduling: str = setting(
        "launch a decode step before the results of the last one are read, unless speculative decoding runs: on, off, "
        "or auto (on with a GPU)",
        "auto",
        choices=SWITCHES,
    )
    max_drafts: int = setting("maximum number of draft tokens of one sequence in one step", 8, within=(1, MAX_DRAFTS))
    kv_wire: str = setting(
        "dtype of float KV during a transfer: exact, int8 (the error is at most 1/254 of the largest value of a head), "
        "or auto (int8 if the link is slow)",
        "exact",
        choices=KV_WIRES,
    )
    kv_pull: bool = setting(
        "pull KV that another worker has cached if that is predicted to be faster than computing it, and send cached "
        "KV to others that pull. For workers of one rank",
        True,
    )
    kv_staging_bytes: int = setting(
        "GPU memory for KV on its way over nccl, or over tcp from a GPU, beside one slot of 8 to 16 MiB for each "
        "connection",
        2**30,
        within=(0, 2**40),
    )
    kv_check: str = setting(
        "step verifies every KV block of every sequence before each decode step; off does not", "off", choices=KV_CHECKS
    )
    inbox_depth: int = setting(
        "maximum number of requests that wait on the worker; it rejects more", 16, within=(1, 65_536)
    )
    threads: int = setting(
        "number of compute threads; 0 divides all cores among the workers of this host", 0, within=(0, 4096)
    )
    heartbeat_s: float = setting("time between two load reports to routers", 0.25, within=(0.001, 60.0))
    lease_s: float = setting(
        "time after which the registry removes a worker that does not renew its entry", 5.0, within=(0.1, 3600.0)
    )
    stall_s: float = setting(
        "time without progress after which a busy worker stops itself, so that it is restarted",
        30.0,
        within=(0.01, DAY_S),
        is_live=True,
    )
    drain_s: float = setting(
        "time that running requests have to finish after SIGTERM", 30.0, within=(0.0, DAY_S), is_live=True
    )
    metrics_port: int = setting("port for Prometheus metrics; 0 serves none", 0, within=PORTS)
    is_prefix_cache_on: bool = setting("keep KV blocks of finished requests as a prefix cache", True)
    profile: str = setting(
        "profile with the expected step times: a bundled profile's name or a file; measured at start when empty", ""
    )
    revision: str = setting(
        "name of the revision of the model's weights; empty is that of the cluster's start. Workers of one revision "
        "have the same weights, and an answer stays within its revision",
        "",
    )
    lora: tuple[str, ...] = setting(
        "LoRA adapters that are loaded at start, as NAME=FOLDER; requests choose one by its name as their model", ()
    )
    lora_folders: tuple[str, ...] = setting(
        "folders from which LoRA adapters may be loaded while serving, directly or from folders in them; none when "
        "empty",
        (),
    )
    max_loras: int = setting("maximum number of LoRA adapters that vLLM computes at once", 16, within=(1, 256))
    max_lora_rank: int = setting("maximum rank of a LoRA adapter", 64, within=(1, LARGEST_LORA_RANK))
    max_lora_adapters: int = setting("maximum number of loaded LoRA adapters", 64, within=(1, MAX_ADAPTERS))
    max_lora_bytes: int = setting(
        "maximum size of the weights of all loaded LoRA adapters together", 4 * 2**30, within=(1024, 2**46)
    )
    cluster_secret: str = setting(SECRET_HELP, "", env=SECRET_ENV)
    toy_step_s: float = setting("duration of one step of the engine toy", 0.0, within=(0.0, 3600.0))
    toy_token_s: float = setting(
        "additional duration of a step of the engine toy for each token that it computes", 0.0, within=(0.0, 3600.0)
    )
    inject_faults: str = setting("for tests: faults to inject into KV transfers, such as seed=7,share=0.1", "")

    def __post_init__(self) -> None:
        check_fields(self)
        check_tls(self, self.host, is_worker=True)
        if self.revision and not NAME.fullmatch(self.revision):
            raise ConfigError("revision", repr(self.revision[:128]), "letters, digits, dots, hyphens or underscores")
        if self.inject_faults and self.tls_cert:
            raise ConfigError("inject_faults", self.inject_faults, "no TLS beside it: faults change plain frames")
        _check_ranks(self)
        _check_lora(self)

    @property
    def serves_adapters(self) -> bool:
        return bool(self.lora or self.lora_folders)

    @property
    def ranks_here(self) -> int:
        """The number of the worker's ranks on its own host, including rank 0."""
        return self.local_ranks or self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(CallerTlsSettings):
    """One router process."""

    model: str = setting("model of the workers (for its tokenizer)")
    served_model_name: tuple[str, ...] = setting(
        "names of the model for callers; requests may use each of them, and answers have the first; that of the model "
        "folder or of the Hub when empty",
        (),
    )
    router_id: str = setting("name of this router", "router-0", is_name=True)
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("gRPC port; 0 picks a free one", 50051, within=PORTS)
    workers: tuple[str, ...] = setting("HOST:PORT of workers that are connected without a registry", (), is_live=True)
    redis: str = setting(
        "Redis URL of the registry and the prefix index; none when empty", "", env=REDIS_ENV, is_url=True
    )
    cluster: str = setting(
        "name of the cluster; clusters that share one Redis need different names", "default", is_name=True
    )
    unix_socket: str = setting(
        "path of a unix socket, in a folder that only this user can access, on which the router also listens in plain "
        "text; none when empty",
        "",
    )
    launcher_socket: str = setting(
        "path of the unix socket, in a folder that only this user can access, at which the launcher changes the "
        "workers; none when empty",
        "",
    )
    group: str = setting(
        "folder, which only this user can access, for the routers that share one port: it has the counts of their "
        "tenants, and a unix socket of each; none when empty",
        "",
    )
    member: int = setting("number of this router in its group, from 0", 0, within=(0, MAX_ROUTERS - 1))
    members: int = setting("number of routers in the group", 1, within=(1, MAX_ROUTERS))
    policy: str = setting("placement policy", "goodput", choices=POLICIES)
    slo_ttft_s: float = setting(
        "default TTFT target, for requests that set none", 2.0, within=(0.001, DAY_S), is_live=True
    )
    slo_tpot_s: float = setting(
        "default TPOT target, for requests that set none", 0.2, within=(0.0001, DAY_S), is_live=True
    )
    stream_interval_s: float = setting(
        "time for which a worker may hold tokens back to send several together; the first and the last of an answer "
        "are sent at once. An answer whose TPOT or ITL target is below twice this time turns it off while it runs. "
        "0: each step's tokens at once",
        0.02,
        within=(0.0, 0.16),
        is_live=True,
    )
    local_max_uncached_tokens: int = setting(
        "maximum number of uncached prompt tokens that a decode worker computes itself, without a prefill worker",
        16,
        within=(0, LARGEST_COUNT),
    )
    max_queue: int = setting(
        "maximum number of requests that wait in the router; it rejects more", 1024, within=(0, 2**20)
    )
    max_new_tokens: int = setting("maximum max_tokens of one request", 4096, within=(1, LARGEST_COUNT), is_live=True)
    generation_config: str = setting(
        "sampling defaults of the model's generation_config.json, for requests that give no value: auto applies them, "
        "none ignores them",
        "auto",
        choices=GENERATION_CONFIGS,
    )
    max_message_bytes: int = setting("maximum size of a gRPC message", 4 * 2**20, within=(1024, LARGEST_COUNT))
    max_held_bytes: int = setting(
        "maximum total size of all requests in progress; the router rejects more",
        256 * 2**20,
        within=(1024, 2**40),
        is_live=True,
    )
    max_connections: int = setting(
        "maximum number of open connections; each needs a file descriptor", 512, within=(1, LARGEST_COUNT)
    )
    connection_idle_s: float = setting(
        "time after which a connection without a call is closed", 120.0, within=(0.1, DAY_S)
    )
    connection_age_s: float = setting(
        "time after which a connection accepts no more calls; running calls may finish", 3600.0, within=(0.1, DAY_S)
    )
    request_timeout_s: float = setting("default deadline, for requests that set none", 600.0, within=(0.001, DAY_S))
    prefix_lookup_s: float = setting("maximum time of a lookup in the prefix index", 0.01, within=(0.0, 60.0))
    worker_silence_s: float = setting(
        "time without a load report after which a worker gets no more requests", 5.0, within=(0.01, 3600.0)
    )
    max_attempts: int = setting(
        "number of attempts that a request may lose without progress; it then fails", 4, within=(1, 1000)
    )
    token: str = setting("bearer token that callers must present; none when empty", "", env=TOKEN_ENV)
    key_file: str = setting(
        "file of tenants, their quotas and hashes of their keys; read again when it changes; none when empty", ""
    )
    tenant_labels: int = setting(
        "maximum number of tenants that metrics show by name; further ones share the label other",
        100,
        within=(0, 10_000),
    )
    cluster_secret: str = setting(SECRET_HELP, "", env=SECRET_ENV)
    metrics_port: int = setting("port for Prometheus metrics; 0 serves none", 0, within=PORTS)
    metrics_host: str = setting("address that the metrics port listens on; that of `host` when empty", "")
    otlp: str = setting("OTLP gRPC endpoint for traces (HOST:PORT); no traces when empty", "")
    trace_share: float = setting(
        "share of traces to keep of requests that met their targets; those of slow, rejected and failed requests, and "
        "those that the caller has sampled, are always kept",
        1.0,
        within=(0.0, 1.0),
        is_live=True,
    )
    scaling: str = setting(
        "MIN:MAX, numbers of workers: the metric pdserve_desired_workers then tells how many there should "
        "be, for a program that starts and ends them; no advice when empty",
        "",
    )
    scaling_routers: str = setting(
        "HOST:PORT whose addresses are those of all routers of the cluster, whose arrivals count for `scaling` and "
        "`up --autoscale`; this router and its group when empty",
        "",
    )
    scaling_start_s: float = setting(
        "time from the order of a worker to its first request, for `scaling`", 60.0, within=(0.0, 3600.0)
    )
    record: str = setting("file for a recording of all events and commands, without prompts; none when empty", "")
    record_mib: int = setting(
        "maximum size of the recording; the router then stops recording and continues to serve", 1024, within=(1, 2**20)
    )
    drain_s: float = setting(
        "time that running requests have to finish after SIGTERM", 30.0, within=(0.0, DAY_S), is_live=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_served_names(self.served_model_name)
        if self.token:
            check_token("token", self.token)
        if self.otlp:
            check_endpoint("otlp", self.otlp, "localhost:4317", ("http", "https"))
        for one in self.workers:
            check_endpoint("workers", one)
        if self.scaling:
            bounds_of("scaling", self.scaling)
        if self.scaling_routers:
            check_endpoint("scaling_routers", self.scaling_routers, "pdserve:50051")
        if not is_loopback_host(self.host) and not self.token and not self.key_file:
            raise ConfigError(
                "host",
                self.host,
                "a loopback address, or a token in PDSERVE_TOKEN or a file of keys in --key-file beside it: anyone "
                "could call this port",
            )
        check_tls(self, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(CallerTlsSettings):
    """One HTTP gateway process. Its callers' tokens are checked by the router. It knows no secret but the password of a
    Redis for stored responses."""

    router: str = setting("HOST:PORT of the router, or unix:PATH")
    router_cert: str = setting("PEM file with the certificate that the router sees; tls_cert when empty", "")
    router_key: str = setting("PEM file with the private key of router_cert", "")
    gateway_id: str = setting("name of this gateway", "gateway-0", is_name=True)
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("HTTP port; 0 picks a free one", 8000, within=PORTS)
    max_body_bytes: int = setting(
        "maximum size of the body of a request", 4 * 2**20, within=(1024, LARGEST_COUNT), is_live=True
    )
    max_held_bytes: int = setting(
        "maximum total size of all requests in progress; the gateway rejects more", 256 * 2**20, within=(1024, 2**40)
    )
    max_header_bytes: int = setting(
        "maximum size of a request line and its headers", 16_384, within=(1024, LARGEST_COUNT)
    )
    max_connections: int = setting(
        "maximum number of open connections; each needs a file descriptor, and the limit of open files lowers the "
        "default",
        GATEWAY_CONNECTIONS,
        within=(1, LARGEST_COUNT),
    )
    header_s: float = setting(
        "time that a client has to send a request line and headers", 10.0, within=(0.1, DAY_S), is_live=True
    )
    body_s: float = setting(
        "time that a client has to send the body of a request", 30.0, within=(0.1, DAY_S), is_live=True
    )
    idle_s: float = setting(
        "time after which a connection without a request is closed", 75.0, within=(0.1, DAY_S), is_live=True
    )
    stall_s: float = setting(
        "time after which a client that reads nothing is disconnected", 30.0, within=(0.1, DAY_S), is_live=True
    )
    metrics_port: int = setting(
        "port for Prometheus metrics, which needs no token; /metrics of `port` does; 0 serves none", 0, within=PORTS
    )
    metrics_host: str = setting("address that the metrics port listens on; that of `host` when empty", "")
    drain_s: float = setting(
        "time that running requests have to finish after SIGTERM", 30.0, within=(0.0, DAY_S), is_live=True
    )
    redis: str = setting("Redis URL for stored responses and conversations", "", env=REDIS_ENV, is_url=True)
    cluster: str = setting("name of the cluster, for the keys in Redis", "default", is_name=True)
    store_bytes: int = setting(
        "maximum total size of the stored responses and conversations of one tenant, the oldest of which leave first; "
        "0 stores none",
        0,
        within=(0, 2**40),
    )
    store_count: int = setting(
        "maximum number of stored responses and conversations of one tenant", 1000, within=(1, 100_000)
    )
    store_s: float = setting(
        "time for which a response is stored, and a conversation after its last change", DAY_S, within=(1.0, 30 * DAY_S)
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_tls(self, self.host)
        if bool(self.router_cert) is not bool(self.router_key):
            absent = "router_key" if self.router_cert else "router_cert"
            raise ConfigError(absent, "no file", "both router_cert and router_key, or neither")


# --- a router with an HTTP gateway in its process -------------------------------------------------------------
# Settings of the gateway have the prefix of their table: its `max_body_bytes` is `gateway_max_body_bytes` here.

OF_GATEWAY: Final = "gateway_"
_OF_ITS_PROCESS: Final = frozenset(
    {"router", "router_cert", "router_key", "gateway_id", "tls_peer_name", "redis", "cluster"}
)


def _check_gateway(config: RouterConfig) -> None:
    RouterConfig.__post_init__(config)
    gateway_of(config)


def _prefixed(one: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    text = f"of the gateway: {one.metadata['help']}"
    return (
        OF_GATEWAY + one.name,
        one.type,
        dataclasses.field(default=one.default, metadata={**one.metadata, "help": text}),
    )


#: What `python -m router` reads.
HttpRouterConfig: Final = dataclasses.make_dataclass(
    "HttpRouterConfig",
    [
        ("http", "bool", setting("also serve the HTTP API, by a gateway in this process", False)),
        *(_prefixed(one) for one in dataclasses.fields(GatewayConfig) if one.name not in _OF_ITS_PROCESS),
    ],
    bases=(RouterConfig,),
    namespace={"__post_init__": _check_gateway},
    frozen=True,
    kw_only=True,
)


def with_gateway(router: RouterConfig, gateway: GatewayConfig) -> RouterConfig:
    """The settings of a router that also serves HTTP, with `gateway` in its process."""
    given = {one.name: getattr(router, one.name) for one in dataclasses.fields(RouterConfig)}
    for one in dataclasses.fields(gateway):
        if one.name not in _OF_ITS_PROCESS:
            given[OF_GATEWAY + one.name] = getattr(gateway, one.name)
    found: RouterConfig = HttpRouterConfig(http=True, **given)
    return found


def gateway_of(config: RouterConfig) -> GatewayConfig | None:
    """Of the gateway in the router's process; None if there is none. Raises ConfigError with the name of its field."""
    if not getattr(config, "http", False):
        return None
    names = [one.name for one in dataclasses.fields(GatewayConfig) if one.name not in _OF_ITS_PROCESS]
    try:
        given = {name: getattr(config, OF_GATEWAY + name) for name in names}
        if given["store_bytes"]:
            given |= {"redis": config.redis, "cluster": config.cluster}
        return GatewayConfig(router="", **given)
    except ConfigError as error:
        raise ConfigError(OF_GATEWAY + error.field, error.seen, error.expected) from None


def bounds_of(name: str, value: str) -> tuple[int, int]:
    """The numbers of workers in MIN:MAX, a value of the setting `name`. Raises ConfigError."""
    found = _BOUNDS.fullmatch(value)
    low, high = map(int, found.groups()) if found is not None else (0, 0)
    if not 1 <= low <= high <= MOST_WORKERS:
        raise ConfigError(name, repr(value[:32]), f"MIN:MAX, numbers of workers from 1 to {MOST_WORKERS}, such as 2:8")
    return low, high


def _check_served_names(names: tuple[str, ...]) -> None:
    """Raises ConfigError. A comma separates two names on a command line."""
    if len(names) > MAX_SERVED_NAMES:
        raise ConfigError("served_model_name", f"{len(names)} names", f"at most {MAX_SERVED_NAMES}")
    for index, name in enumerate(names):
        if not _SERVED_NAME.fullmatch(name) or not name.isprintable():
            expected = "names of 1 to 256 printable characters without spaces and commas"
            raise ConfigError("served_model_name", repr(name[:300]), expected)
        if name in names[:index]:
            raise ConfigError("served_model_name", f"{name!r} twice", "names that differ")


def _check_ranks(config: WorkerConfig) -> None:
    """Raises ConfigError if ranks on other hosts could not join or could not be reached."""
    if not config.rendezvous:
        if config.ranks_here != config.tensor_parallel:
            expected = f"{config.tensor_parallel} ranks, or a rendezvous at which the others join from other hosts"
            raise ConfigError("local_ranks", config.local_ranks, expected)
        return
    host, _ = check_endpoint("rendezvous", config.rendezvous)
    if not 1 <= config.local_ranks < config.tensor_parallel:
        expected = f"1 to {config.tensor_parallel - 1} of {config.tensor_parallel} ranks beside a rendezvous"
        raise ConfigError("local_ranks", config.local_ranks, expected)
    reached = config.advertise or config.host
    if is_loopback_host(reached) and not is_loopback_host(host):
        expected = f"an address that other hosts reach, as the rendezvous {config.rendezvous} is: ranks there move KV"
        raise ConfigError("host", config.host, expected)


def _check_lora(config: WorkerConfig) -> None:
    """Raises ConfigError. Limits matter only with adapters."""
    if not config.serves_adapters:
        return
    names = [split_adapter(one)[0] for one in config.lora]
    if wrong := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ConfigError("lora", f"{wrong!r} twice", "names that differ")
    if len(names) > config.max_lora_adapters:
        raise ConfigError("lora", f"{len(names)} adapters", f"at most max_lora_adapters, {config.max_lora_adapters}")
    for folder in config.lora_folders:
        if not folder or "," in folder:
            raise ConfigError("lora_folders", repr(folder), "folders without commas in their paths")


SECRETS: Final = frozenset(
    one.metadata["env"] for kind in (WorkerConfig, RouterConfig, GatewayConfig) for one in dataclasses.fields(kind)
) - {""}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without secrets, for a process that receives its secrets separately."""
    hidden = SECRETS | {RAY_TOKEN_ENV}
    return {name: value for name, value in environ.items() if name.removesuffix("_FILE") not in hidden}


def forget_secrets() -> None:
    """Removes secrets from this process's environment, so that its child processes do not inherit them."""
    for name in SECRETS:
        os.environ.pop(name, None)
        os.environ.pop(f"{name}_FILE", None)


def from_env(name: str, environ: Mapping[str, str] | None = None) -> str:
    """A secret from the variable `name`, or from the file that `name`_FILE names; empty if neither is set. Spaces and
    line ends around it are removed. The variable takes precedence.

    Raises ConfigError if the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(f"{name}_FILE", "")
    if (own := environ.get(name, "").strip()) or not file:
        return own
    return read_text(file, MAX_SETTINGS_BYTES, f"{name}_FILE").strip()
