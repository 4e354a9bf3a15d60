"""Reads an operator's settings from flags, `--set` arguments and a TOML file into a ClusterSpec.

Flags override `--set`, which overrides the file, which overrides defaults. An unknown key is always an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pdserve
from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.config import KV_STORE_ENV, LOG_LEVELS, REDIS_ENV, SECRET_ENV, TOKEN_ENV, bounds_of, from_env
from pdserve.config_flags import words
from pdserve.core.access.key_file import parse
from pdserve.core.adapters import split_adapter
from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.setting import AUTO, Range
from pdserve.core.urls import has_password, hide_password
from pdserve.engine.load_engine import BUILT_IN, OURS, VLLM, registered
from pdserve.engine.memory.host import usable_cores
from pdserve.engine.model.config import read_config
from pdserve.key_file_access import read_bytes
from pdserve.launch import confine
from pdserve.launch.confine import of_operator
from pdserve.launch.engine_python import MAKE_VLLM, absolute, check_python, vllm_python
from pdserve.launch.keys import KINDS, Kind, check_command_line, check_settings, check_top, fields_of
from pdserve.launch.report import LogLimits
from pdserve.launch.spec import (
    ClusterSpec,
    ClusterTls,
    check_reports,
    gateway_config,
    processes,
    recordings,
    scaling_recording,
    served_names,
)
from pdserve.model_source import BUNDLED, TOY, TOY_MODELS, find_model, is_on_hub

NODE_START_S: Final = 300.0  # how long Ray may take to start a node for a worker that the controller adds
_TLS_FILES: Final = {"tls_cert", "tls_key", "tls_ca", "tls_client_ca", "router_cert", "router_key"}
_NOT_ASKED: Final = {"settings", "cores", "gpus"}  # of a ClusterSpec, that `merge` does not compare
_OF_WORKER_TABLES: Final[tuple[Kind, ...]] = ("worker", "prefill_worker", "decode_worker")
_WORKER_COUNTS: Final[Mapping[Kind, str]] = {"prefill_worker": "prefill", "decode_worker": "decode"}
_OF_ROUTER: Final = ("otlp", "generation_config", "served_model_name")
_OF_WORKERS: Final = ("transport", "engine", "device", "dtype", "kv_dtype", "load", "lora", "lora_folders")
ORPHAN_S: Final = 3600.0
ORPHAN: Final = Range(1.0, 7 * DAY_S)
_LISTS: Final = ("served_model_name", "lora", "lora_folders")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The input of `up`: the cluster, and where to run it."""

    spec: ClusterSpec
    ray: str | None  # address of a Ray cluster; empty starts one here; None uses plain processes
    log_dir: Path | None
    log_limits: LogLimits
    log_level: str
    is_level_given: bool  # by a flag, the file or the environment
    own_secrets: frozenset[str]  # settings that the launcher chose at random, because none was given
    orphan_s: float = ORPHAN_S  # how long a detached cluster goes on without a launcher
    unread: tuple[str, ...] = ()  # why files of secrets could not be read again


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSource:
    """Where the settings of `up` come from. The fields are the arguments of the function `read`."""

    flags: Mapping[str, Any]
    file: str | None
    words: tuple[str, ...]
    defaults: Mapping[str, Any]

    def read(self, earlier: Asked | None = None) -> Asked:
        """Raises ConfigError."""
        return read(self.flags, Path(self.file) if self.file else None, self.words, self.defaults, earlier)


def read(
    flags: Mapping[str, Any],
    file: Path | None,
    words: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    earlier: Asked | None = None,
) -> Asked:
    """`flags` contains only the given ones; `defaults` are of the command. If the file of a secret is gone since
    `earlier`, the secret stays. Raises ConfigError naming the key."""
    found: dict[str, Any] = {**(defaults or {}), **({} if file is None else _from_file(file))}
    shown: dict[str, Any] = dict(flags)
    for word in words:
        _put_word(found, word)
        _put_word(shown, word)
    check_command_line(shown)
    if "inject_faults" in found:  # for tests, so it must not be in a file
        raise ConfigError("inject_faults", found["inject_faults"], "no value here: give `up` the flag --inject-faults")
    found.update(flags)
    faults = found.pop("inject_faults", "")
    if faults:
        from kvtransfer.faults.plan import parse as parse_faults

        parse_faults(faults)
    tables = {kind: _table(kind, found.pop(kind)) for kind in KINDS if kind in found}
    for name in found.keys() & set(_LISTS):
        found[name] = _as_tuple(found[name])
    for kind, values in tables.items():
        fields = fields_of(kind)
        for name in values.keys() & fields.keys():
            if fields[name].default == ():
                values[name] = _as_tuple(values[name])
    for name, value in found.items():
        check_top(name, value)
    if ray := found.get("ray"):
        if not confine.is_address(ray):
            raise ConfigError("ray", repr(ray[:128]), f"{confine.ADDRESSES}; without a value, Ray is started here")
        found["ray"] = "" if ray == "local" else ray  # a Ray that this launcher starts has a token of its own
    for kind, values in tables.items():
        check_settings(kind, values)
    for name in _OF_WORKERS:
        if name in found:
            tables.setdefault("worker", {}).setdefault(name, found[name])
    for kind in _OF_WORKER_TABLES:
        _check_adapters(tables.get(kind, {}), is_here=not found.get("ray"))
        if revision := tables.get(kind, {}).get("revision"):
            raise ConfigError(f"{kind}.revision", revision, "none here: `pdserve roll --model` sets it")
    for name in _OF_ROUTER:
        if name in found:
            tables.setdefault("router", {}).setdefault(name, found[name])
    if "record" in found:
        tables.setdefault("router", {}).setdefault("record", found["record"])
    for kind in _OF_WORKER_TABLES:
        if python := tables.get(kind, {}).get("engine_python"):
            tables[kind]["engine_python"] = absolute(python)  # actors have another working directory
    if record := tables.get("router", {}).get("record"):
        # Absolute, because the router may run in another working directory.
        tables["router"]["record"] = str(Path(record).expanduser().absolute())
    if not found.get("ray"):  # workers on other hosts have their own files
        _check_tls_files(tables)
    secrets, unread = _secrets(earlier)
    if token := secrets[TOKEN_ENV]:
        tables.setdefault("router", {}).setdefault("token", token)
    if kv_store := secrets[KV_STORE_ENV]:
        tables.setdefault("worker", {}).setdefault("kv_store", kv_store)
    if found.get("ray") is not None:
        _check_one_store(tables)
    own_secrets = set()
    if _read_key_file(tables, found.get("key_file", "")):
        own_secrets.add("router.token")
    if not (cluster_secret := secrets[SECRET_ENV]):
        cluster_secret = _own_secret(tables.values())
        own_secrets.add("cluster_secret")
    found.setdefault("redis", secrets[REDIS_ENV])
    if "metrics" in found and found.get("ray") is not None:
        raise ConfigError(
            "metrics",
            found["metrics"],
            "no --ray beside it: its workers may be on other hosts. Set worker.metrics_port",
        )
    engines = _of_workers("engine", AUTO, found, tables)
    if found.get("ray") is None:  # each host of a Ray cluster has its own engines
        for engine in engines.keys() - OURS - BUILT_IN.keys():
            registered(engine)
    model = _model(found.get("model"), is_here=not found.get("ray"), has_weights=set(engines) != {TOY})
    degrees = _of_workers("tensor_parallel", 1, found, tables)
    _check_engines(model, engines, degrees)
    if not found.get("ray"):
        _choose_engines(tables, model, engines.keys(), _with_adapters(found, tables))
        _check_pythons(found, tables)
        if found.get("model") not in (None, BUNDLED, *TOY_MODELS):
            _check_texts(Path(model))
    if VLLM in _of_workers("engine", AUTO, found, tables):
        _check_degrees(degrees)
    _fit_bounds(found)
    spec = ClusterSpec(
        model=model,
        cores=usable_cores(),
        gpus=visible_gpus(),
        inject_faults=faults,
        cluster_secret=cluster_secret,
        settings=tables,
        tls=_tls(found, tables),
        **{
            name: found[name]
            for name in (
                "prefill",
                "decode",
                "autoscale",
                "roles",
                "host",
                "port",
                "routers",
                "http",
                "http_process",
                "metrics",
                "redis",
                "cluster",
                "insecure",
                "ray_strategy",
                "ray_wait_s",
            )
            if name in found
        },
    )
    if record := tables.get("router", {}).get("record"):
        for file in (*recordings(spec, Path(record)), scaling_recording(Path(record))):
            _check_writable("record", file)
    if not found.get("ray"):
        _check_defaults(spec)
    for adapters, key in _of_workers("lora", (), found, tables).items():
        if taken := next((one for one in adapters if split_adapter(one)[0] in served_names(spec)), None):
            raise ConfigError(key, taken, "a name other than the model's, which requests choose by it")
    check_reports(processes(spec))  # all processes' settings are checked before any process is started
    gateway_config(spec)
    log_level, log_dir = found.get("log_level", "info"), found.get("log_dir")
    if log_level not in LOG_LEVELS:
        raise ConfigError("log_level", log_level, f"one of {', '.join(LOG_LEVELS)}")
    if (orphan_s := found.get("orphan_s", ORPHAN_S)) not in ORPHAN:
        raise ConfigError("orphan_s", orphan_s, str(ORPHAN))
    limits = {name: found[name] for name in ("log_max_bytes", "log_files") if name in found}
    return Asked(
        spec=spec,
        ray=found.get("ray"),
        log_dir=Path(log_dir) if log_dir else None,
        log_limits=LogLimits(**limits),
        log_level=log_level,
        is_level_given="log_level" in found,
        own_secrets=frozenset(own_secrets),
        orphan_s=float(orphan_s),
        unread=tuple(unread),
    )


def _fit_bounds(found: dict[str, Any]) -> None:
    """More decode workers than the default if the bounds ask for them, and time for nodes that Ray starts. Raises
    ConfigError if the numbers of workers are not within the bounds."""
    if not (bounds := found.get("autoscale")):
        return
    if found.get("ray"):
        found.setdefault("ray_wait_s", NODE_START_S)
    low, high = bounds_of("autoscale", bounds)
    prefill = found.get("prefill", 1)
    decode = found.setdefault("decode", max(low - prefill, 1))
    if not low <= prefill + decode <= high:
        raise ConfigError("autoscale", bounds, f"bounds around the {prefill + decode} workers of the start")


def _check_one_store(tables: Mapping[Kind, Mapping[str, Any]]) -> None:
    """Ray's workers get one URL that has a password, and no command line has one."""
    shared = str(tables.get("worker", {}).get("kv_store", ""))
    for kind in _WORKER_COUNTS:
        own = str(tables.get(kind, {}).get("kv_store", shared))
        if own != shared and (has_password(own) or (not own and has_password(shared))):
            expected = "one URL for all workers beside --ray, if it has a password: worker.kv_store or PDSERVE_KV_STORE"
            raise ConfigError(f"{kind}.kv_store", hide_password(own), expected)


def _secrets(earlier: Asked | None) -> tuple[dict[str, str], list[str]]:
    """Secrets of the environment and its files, by variable, and why some of them are those of `earlier`."""
    if earlier is None:
        return {name: from_env(name) for name in (TOKEN_ENV, SECRET_ENV, REDIS_ENV, KV_STORE_ENV)}, []
    spec = earlier.spec
    token = spec.settings.get("router", {}).get("token", "")
    kv_store = spec.settings.get("worker", {}).get("kv_store", "")
    found = {TOKEN_ENV: str(token), SECRET_ENV: spec.cluster_secret, REDIS_ENV: spec.redis, KV_STORE_ENV: str(kv_store)}
    unread = []
    for name in found:
        try:
            found[name] = from_env(name)
        except ConfigError as error:
            unread.append(error.message)
    return found, unread


def merge(running: Asked, wanted: Asked) -> tuple[Asked, list[str], list[str]]:
    """`running` with the values of `wanted` that a running cluster can take, the names of these, and the names of those
    that change at the next start only. Pure.

    Ray's workers, which may be on other hosts, take none. Random secrets differ at each reading: that is no change.
    """
    same = running.own_secrets & wanted.own_secrets
    changed = [name for name in ("log_level", "log_limits") if getattr(running, name) != getattr(wanted, name)]
    fixed = [name for name in ("ray", "log_dir", "orphan_s") if getattr(running, name) != getattr(wanted, name)]
    for one in dataclasses.fields(ClusterSpec):
        if one.name not in _NOT_ASKED | same and getattr(running.spec, one.name) != getattr(wanted.spec, one.name):
            fixed.append(one.name)
    settings = {kind: dict(values) for kind, values in running.spec.settings.items()}
    for kind in KINDS:
        fields, mine, theirs = fields_of(kind), settings.get(kind, {}), wanted.spec.settings.get(kind, {})
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) == theirs.get(name) or f"{kind}.{name}" in same:
                continue
            if not fields[name].metadata.get("is_live") or (running.ray is not None and kind in _OF_WORKER_TABLES):
                fixed.append(f"{kind}.{name}")
                continue
            changed.append(f"{kind}.{name}")
            values = settings.setdefault(kind, {})
            values.pop(name, None)
            if name in theirs:
                values[name] = theirs[name]
    if "log_level" in changed and running.ray is not None:
        fixed.append("log_level of Ray's workers")
    merged = dataclasses.replace(
        running,
        spec=dataclasses.replace(running.spec, settings=settings),
        log_limits=wanted.log_limits,
        log_level=wanted.log_level,
    )
    return merged, changed, fixed


def _tls(found: Mapping[str, Any], tables: Mapping[Any, Mapping[str, Any]]) -> ClusterTls | None:
    """Raises ConfigError, also if processes that are not on this host would need files that are made here."""
    asked, client_ca = found.get("tls", ""), found.get("tls_client_ca", "")
    if not asked:
        if client_ca:
            raise ConfigError("tls_client_ca", client_ca, "tls beside it")
        return None
    client_ca = str(Path(client_ca).expanduser().absolute()) if client_ca else ""
    if asked != AUTO:
        return of_operator(asked, client_ca)
    if found.get("ray") or any(values.get("rendezvous") for values in tables.values()):
        raise ConfigError("tls", asked, "a folder with certificates that is on every host of the cluster")
    return ClusterTls.asked(asked, client_ca)


def _own_secret(tables: Iterable[Mapping[str, Any]]) -> str:
    """A random secret. Raises ConfigError if processes that the launcher does not start need it too."""
    if any(values.get("rendezvous") for values in tables):
        raise ConfigError(
            "cluster_secret", "nothing", f"one in {SECRET_ENV}, here and where ranks join the rendezvous from"
        )
    return secrets.token_hex(32)


def bundled_model() -> Path:
    """The small model inside the package, for use without a download."""
    models = Path(pdserve.__file__).parent / "models"
    found = sorted(path.parent for path in models.glob("stdlib-*/config.json"))
    if not found:
        raise ConfigError("model", "none", "a folder of a Hugging Face checkpoint, or toy")
    return found[0]


def _read_key_file(tables: dict[Kind, dict[str, Any]], given: str) -> bool:
    """Whether a file of keys is given without a token, which is then random. Raises ConfigError if the file is wrong.
    Checked here, because the router would report it only after the workers have loaded."""
    file = tables.get("router", {}).get("key_file", given)
    if not file:
        return False
    table = tables.setdefault("router", {})
    # Absolute, because the router may run in another working directory.
    table["key_file"] = str(Path(file).expanduser().absolute())
    parse(read_bytes(table["key_file"])[0])
    if "token" in table:
        return False
    table["token"] = secrets.token_hex(32)  # `up` itself needs the operator's token, to see the workers
    return True


def _check_tls_files(tables: Mapping[Kind, Mapping[str, Any]]) -> None:
    """Checked here, because the gateway and the router would report them only after the workers have loaded."""
    for kind, values in tables.items():
        for name in _TLS_FILES & values.keys():
            if values[name] and not (Path(values[name]).is_file() and os.access(values[name], os.R_OK)):
                raise ConfigError(f"{kind}.{name}", values[name], "a file that can be read")


def _check_writable(name: str, file: Path) -> None:
    """Checked here, because the router would report it only after the workers have loaded."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(name, file, "a file that can be written, in a folder that exists")
    if file.is_symlink():
        raise ConfigError(name, file, "a file, not a link to one")


def _model(asked: str | None, *, is_here: bool, has_weights: bool) -> str:
    """Absolute, because actors have another working directory. Raises ModelError if the model is not found."""
    if asked is None:
        return str(bundled_model())
    if asked == BUNDLED:
        return find_model(asked)
    if not is_here:  # each host of the Ray cluster finds it
        return asked if asked in TOY_MODELS or is_on_hub(asked) else str(Path(asked).expanduser().absolute())
    return find_model(asked, has_weights=has_weights)


def _of_workers(
    name: str, default: Any, found: Mapping[str, Any], tables: Mapping[Kind, Mapping[str, Any]]
) -> dict[Any, str]:
    """The values of a setting that the started workers get, each with the key that gives it."""
    return dict(_of_worker(kind, name, default, tables) for kind in _started(found))


def _started(found: Mapping[str, Any]) -> list[Kind]:
    """The kinds of workers of which there is one."""
    return [kind for kind, count in _WORKER_COUNTS.items() if found.get(count) != 0]


def _of_worker(kind: Kind, name: str, default: Any, tables: Mapping[Kind, Mapping[str, Any]]) -> tuple[Any, str]:
    """The value of a setting that workers of this kind get, and the key that gives it."""
    table: Kind = kind if name in tables.get(kind, {}) else "worker"
    return tables.get(table, {}).get(name, default), f"{table}.{name}"


def _check_engines(model: str, engines: Mapping[str, str], degrees: Mapping[int, str]) -> None:
    """Checked here, because a worker would report it only after others have started. Raises ConfigError."""
    is_toy = model in TOY_MODELS
    for name in ("torch", VLLM):
        if is_toy and name in engines:
            raise ConfigError(engines[name], name, f"auto or toy: the model {model} has no weights")
    if not is_toy and TOY in engines and len(engines) > 1:
        raise ConfigError(engines[TOY], TOY, "the same engine for all workers: a toy's KV is not the model's")
    if (is_toy or TOY in engines) and engines.keys() <= OURS and (degree := max(degrees, default=1)) > 1:
        raise ConfigError(degrees[degree], degree, "1: a toy has nothing to divide")


def served_by_vllm_only(folder: Path) -> ModelError | None:
    """Why the engine `auto` is vLLM's for a model: our own engine does not know its architecture, or the form in which
    its weights are stored. Raises ModelError for a model that is wrong in another way."""
    try:
        read_config(folder)
    except ModelError as error:
        if not error.field.endswith("architectures") and "quantization_config" not in error.field:
            raise
        return error
    return None


def _check_degrees(degrees: Mapping[int, str]) -> None:
    """Checked here, because the router would reject the workers that register last. Raises ConfigError."""
    if len(degrees) > 1:
        least, most = min(degrees), max(degrees)
        expected = f"{least}, as in the other role: workers of the engine vllm exchange KV only at equal degrees"
        raise ConfigError(degrees[most], most, expected)


def without_vllm(wrong: ConfigError) -> ConfigError:
    """The error for what our own engine does not serve, on a host without vLLM."""
    what = "other models" if isinstance(wrong, ModelError) else "them"
    return type(wrong)(wrong.field, wrong.seen, f"{wrong.expected}; vLLM may serve {what}: {MAKE_VLLM}")


def _check_adapters(table: dict[str, Any], *, is_here: bool) -> None:
    """Makes folders on this host absolute, because workers may run in another working directory. Raises ConfigError."""
    if "lora" in table:
        adapters = [split_adapter(one) for one in table["lora"]]
        table["lora"] = tuple(f"{name}={_absolute(folder) if is_here else folder}" for name, folder in adapters)
    if is_here and "lora_folders" in table:
        table["lora_folders"] = tuple(str(_absolute(Path(one))) for one in table["lora_folders"])


def _absolute(folder: Path) -> Path:
    return folder.expanduser().absolute()


def _with_adapters(found: Mapping[str, Any], tables: Mapping[Kind, Mapping[str, Any]]) -> str:
    """The key that gives LoRA adapters to a started worker; empty if none does."""
    given = {name: _of_workers(name, (), found, tables) for name in ("lora", "lora_folders")}
    return next((key for keys in given.values() for value, key in keys.items() if value), "")


def _choose_engines(
    tables: dict[Kind, dict[str, Any]], model: str, engines: Collection[str], adapters: str = ""
) -> None:
    """Replaces `auto` in the tables by vLLM's engine for a model or for LoRA adapters that only vLLM serves, and adds
    the Python of vLLM's workers. `engines`: of the workers that are started. `adapters`: the key that gives them
    adapters.

    Raises ModelError if no engine of this host serves the model, and ConfigError if none has vLLM.
    """
    if set(engines) <= OURS - {TOY} and model not in TOY_MODELS:
        wrong: ConfigError | None = served_by_vllm_only(Path(model))
        if adapters:
            wrong = ConfigError(adapters, "LoRA adapters", "engine vllm: our own engine computes none")
        if wrong is not None:
            if set(engines) != {AUTO}:
                raise wrong
            if vllm_python() is None and not any(tables.get(one, {}).get("engine_python") for one in _OF_WORKER_TABLES):
                raise without_vllm(wrong)
            engines = {VLLM}
            for table in _OF_WORKER_TABLES:
                if table == "worker" or "engine" in tables.get(table, {}):
                    tables.setdefault(table, {})["engine"] = VLLM
    for table in _OF_WORKER_TABLES:
        values = tables.get(table, {})
        if tables.get("worker", {}).get("engine_python") or values.get("engine_python"):
            continue
        if values.get("engine") == VLLM and VLLM in engines:
            found = vllm_python()
            if found is None:
                expected = f"own, because vLLM is not installed here: {MAKE_VLLM}, or set {table}.engine_python"
                raise ConfigError(f"{table}.engine", VLLM, expected)
            if found != sys.executable:
                values["engine_python"] = found


def _check_pythons(found: Mapping[str, Any], tables: Mapping[Kind, Mapping[str, Any]]) -> None:
    """Checked here, because a worker would report it only after others have started. Raises ConfigError."""
    checked = set()
    for kind in _started(found):
        engine, _ = _of_worker(kind, "engine", AUTO, tables)
        python, field = _of_worker(kind, "engine_python", "", tables)
        if (python or engine == VLLM) and (asked := (python or sys.executable, engine == VLLM)) not in checked:
            checked.add(asked)
            check_python(field, asked[0], is_for_vllm=asked[1])


def _check_defaults(spec: ClusterSpec) -> None:
    """Checked here for the same reason. Raises ModelError."""
    from pdserve.text.sampling_defaults import read_sampling_defaults

    if spec.model not in TOY_MODELS and spec.settings.get("router", {}).get("generation_config") != "none":
        read_sampling_defaults(Path(spec.model))


def _check_texts(folder: Path) -> None:
    """Checked here, because the router needs tokenizer and templates only after the workers have loaded their weights.
    Raises ModelError."""
    # They need the server extra, and `doctor` asks this module for the bundled model without it.
    from pdserve.text.chat import read_templates
    from pdserve.text.template_facts import finding_facts
    from pdserve.text.tokenizer import load_tokenizer

    with finding_facts(read_templates(folder)) as facts:
        load_tokenizer(str(folder))
        facts()


def _from_file(file: Path) -> dict[str, Any]:
    text = read_text(file, MAX_SETTINGS_BYTES, "config")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise ConfigError("config", file, f"TOML ({error})") from None


def _put_word(found: dict[str, Any], word: str) -> None:
    """Parses `router.max_queue=4` as if it were in the file; a value that is no TOML literal is a string."""
    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise ConfigError("set", word, "KEY=VALUE, such as router.max_queue=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    table, dot, name = key.strip().rpartition(".")
    target = found.setdefault(table, {}) if dot else found
    if not isinstance(target, dict):
        raise ConfigError("set", word, f"{table} to be a table")
    target[name] = value


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(name, repr(value), "a table")
    return dict(value)


def _as_tuple(value: Any) -> Any:
    """TOML has lists; a single text is read as on a command line."""
    return words(value) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, found without loading a library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part for part in visible.split(",") if part and part != "-1")
    return tuple(sorted((path.name[6:] for path in Path("/dev").glob("nvidia*") if _is_gpu(path.name)), key=int))


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"nvidia\d+", name) is not None
