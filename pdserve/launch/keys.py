"""The keys of `--set` and of a TOML file, their types and ranges, and the nearest key to an unknown one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import check_shown
from pdserve.core.errors import ConfigError
from pdserve.core.setting import check_value, did_you_mean, nearest

Value = str | int | float | bool | tuple[str, ...]
Kind = Literal["worker", "prefill_worker", "decode_worker", "router", "gateway"]
Settings = Mapping[Kind, Mapping[str, Value]]  # tables; an overlay has only what roll-outs set
KINDS: Final[tuple[Kind, ...]] = ("worker", "prefill_worker", "decode_worker", "router", "gateway")

# The launcher computes these itself. If a file could set them too, only part of the cluster would use the value.
COMPUTED: Final = frozenset(
    {
        "model",
        "worker_id",
        "router_id",
        "group",
        "member",
        "members",
        "gateway_id",
        "router",
        "unix_socket",
        "launcher_socket",
        "port",
        "host",
        "workers",
        "redis",
        "cluster",
        "cluster_secret",
        "inject_faults",
    }
)
TOP: Final[Mapping[str, type]] = {
    "model": str,
    "prefill": int,
    "decode": int,
    "autoscale": str,
    "roles": str,
    "host": str,
    "port": int,
    "routers": int,
    "http": int,
    "http_process": bool,
    "metrics": int,
    "redis": str,
    "cluster": str,
    "ray": str,
    "ray_strategy": str,
    "ray_wait_s": float,
    "log_level": str,
    "log_dir": str,
    "log_max_bytes": int,
    "log_files": int,
    "orphan_s": float,
    "tls": str,
    "tls_client_ca": str,
    "insecure": bool,
    # Settings of all processes; each process's own table overrides them.
    "transport": str,
    "engine": str,
    "device": str,
    "dtype": str,
    "kv_dtype": str,
    "load": str,
    "lora": tuple,
    "lora_folders": tuple,
    "otlp": str,
    "generation_config": str,  # of the router
    "served_model_name": tuple,  # of the router
    "record": str,  # of the router
    "key_file": str,  # of the router
}
_CONFIGS: Final[Mapping[str, type[RouterConfig] | type[GatewayConfig]]] = {
    "router": RouterConfig,
    "gateway": GatewayConfig,
}
_TYPES: Final[Mapping[str, type]] = {"str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple}
_WORDS: Final[Mapping[type, str]] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
}


def check_top(name: str, value: Any) -> None:
    """Raises ConfigError on an unknown key outside all tables, or one whose value has the wrong type."""
    if isinstance(value, dict):
        raise ConfigError(f"[{name}]", "a table", f"one of {', '.join(KINDS)}{did_you_mean(_nearest_table(name))}")
    if name not in TOP:
        raise ConfigError(name, repr(value), _unknown(name))
    _check_type(name, value, TOP[name])
    same = (fields_of("router") | fields_of("worker")).get(name)
    if same is not None:
        check_value(same, value, name)


def check_settings(kind: str, values: Mapping[str, Value]) -> None:
    """Raises ConfigError on an unknown table or key, on one that the launcher computes, and on an invalid value."""
    if kind not in KINDS:
        check_top(kind, values)
    fields = fields_of(kind)
    for name, value in values.items():
        where = f"{kind}.{name}"
        if name in COMPUTED:
            raise ConfigError(where, "a value", "none here: the launcher sets it for all processes")
        if name not in fields:
            raise ConfigError(where, repr(value), _unknown(name, kind))
        expected = _TYPES.get(str(fields[name].type))
        if expected is not None:
            _check_type(where, value, expected)
        check_value(fields[name], value, where)


def check_command_line(found: Mapping[str, Any]) -> None:
    """Raises ConfigError if a key on the command line has a secret as its value."""
    for name, value in found.items():
        fields = fields_of(name if name in KINDS else "worker")
        for key, held in value.items() if isinstance(value, dict) else [(name, value)]:
            if key in fields:
                check_shown(fields[key], held, f"{name}.{key}" if isinstance(value, dict) else name)


def _check_type(where: str, value: Any, expected: type) -> None:
    accepted: Any = int | float if expected is float else expected
    is_of_type = isinstance(value, accepted) and (not isinstance(value, bool) or expected is bool)
    if not is_of_type or (expected is tuple and not all(isinstance(one, str) for one in value)):
        raise ConfigError(where, repr(value), _WORDS[expected])


def fields_of(kind: str) -> dict[str, dataclasses.Field[Any]]:
    return {one.name: one for one in dataclasses.fields(_CONFIGS.get(kind, WorkerConfig))}


def _unknown(name: str, kind: str = "") -> str:
    where = f"[{kind}]" if kind else "any table"
    found = _nearest(name, kind)
    program = {"router": "router", "gateway": "pdserve.gateway"}.get(kind, "decode_worker")
    hint = "" if found else f"; `python -m {program} --help` lists them" if kind else f": {', '.join(TOP)}"
    return f"a known key {'of' if kind else 'outside'} {where}{did_you_mean(found)}{hint}"


def _nearest(name: str, kind: str) -> str | None:
    """Prefers the same name in another table, then a similar name in this table, then a similar one in another."""
    tables: dict[str, Iterable[str]] = {"": TOP, **{one: fields_of(one).keys() - COMPUTED for one in KINDS}}
    tables = {kind: tables.pop(kind), **tables}
    whole = {f"{table}.{key}" if table else key: key for table, keys in tables.items() for key in sorted(keys)}
    same = [full for full, key in whole.items() if key == name]
    if same:
        return same[0]
    for group in (kind, None):
        keys = [key for full, key in whole.items() if group is None or full == (f"{kind}.{key}" if kind else key)]
        close = nearest(name, keys, cutoff=0.6 if group is not None else 0.75)
        if close:
            return next(full for full, key in whole.items() if key == close)
    return None


def _nearest_table(name: str) -> str | None:
    found = nearest(name, KINDS)
    return found and f"[{found}]"
