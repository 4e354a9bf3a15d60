"""The common main function of the roles: flags, logs on stderr, signals, and one line on stdout when it listens."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn, Protocol, final

from pdserve.config import (
    LOG_LEVEL_ENV,
    SECRETS,
    GatewayConfig,
    RouterConfig,
    WorkerConfig,
    forget_secrets,
    from_env,
    gateway_of,
)
from pdserve.config_flags import Config, log_flags, parse_flags, with_file
from pdserve.core.access.hosts import MIN_TOKEN_CHARS, is_loopback_host, is_weak_token
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.installation import missing
from pdserve.core.setting import live_names
from pdserve.listening import allow_descriptors, needed_by
from pdserve.model_source import TOY, find_model
from pdserve.progress import is_on_terminal
from pdserve.telemetry.logs import log_level, log_to_stderr

log = logging.getLogger(__name__)

USAGE_EXIT_CODE: Final = 2
YOUNG_OBJECTS: Final = 10_000  # new objects between two collections of cyclic garbage
SIGNAL_CHECK_S: Final = 0.5  # longest delay of a signal that does not interrupt the main thread


class Host(Protocol):
    """A role that runs on its threads, in this process."""

    @property
    def memory(self) -> str:
        """After the start: how its memory is divided, as JSON; empty if unknown."""
        ...

    def start(self) -> str:
        """Returns HOST:PORT once it listens. Raises PdserveError."""
        ...

    def drain(self) -> None:
        """Returns immediately; the host stops when its work is done or the time limit is reached."""
        ...

    def stop(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def reload(self, changes: Mapping[str, Any]) -> None:
        """Takes new values of settings that are declared with `is_live`."""
        ...


def run(module: str, kind: type[Config], make_host: Callable[[Config], Host], argv: Sequence[str]) -> int:
    """`python -m module`: serves until a signal: SIGTERM and SIGINT drain, a second signal stops immediately."""
    # gRPC, which is not imported yet, would write a line for each failed handshake, so a stranger could fill the log.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    name, prog = module.rpartition(".")[2], f"python -m {module}"
    reloading = Reloading(kind, argv, prog)  # from here on, SIGHUP does not end it
    try:
        words = with_file(argv, prog)
        reloading.set_level(words)
        log_to_stderr(name)
        config = reloading.given = parse_flags(kind, words, prog)
        forget_secrets()
        allow_descriptors(needed_by(config), name)
        _warn_of_plain_text(config)
        if isinstance(config, RouterConfig) and (gateway := gateway_of(config)) is not None:
            _warn_of_plain_text(gateway)
        if isinstance(config, RouterConfig) and is_weak_token(config.token) and not is_loopback_host(config.host):
            log.warning(
                "PDSERVE_TOKEN can be guessed: use at least %d characters, such as those of `openssl rand -hex 16`",
                MIN_TOKEN_CHARS,
                extra={"host": config.host, "characters": len(config.token)},
            )
        if not isinstance(config, GatewayConfig):
            has_weights = isinstance(config, WorkerConfig) and config.engine != TOY
            config = replace(config, model=find_model(config.model, has_weights=has_weights))
        host = make_host(config)
        address = host.start()
    except PdserveError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        return USAGE_EXIT_CODE
    except ModuleNotFoundError as error:  # an extra that is not installed
        if (absent := missing(error)) is None:
            raise
        sys.stderr.write(f"{name}: {absent.message}\n")
        return USAGE_EXIT_CODE
    # Existing objects (modules, tokenizer, weights) are permanent, so the garbage collector need not scan them.
    gc.collect()
    gc.freeze()
    # Requests leave few cycles behind. By default, a collection follows every 700 new objects, which took 7 % of the
    # router's time (docs/benchmarks/router.md).
    gc.set_threshold(YOUNG_OBJECTS)
    _follow_signals(host)  # until here a signal simply ends the process, because it has no clients yet
    own_id = _own_id(config)
    memory = f"{name} {own_id} memory {host.memory}\n" if host.memory else ""
    sys.stdout.write(f"{name} {own_id} listening on {address}\n{memory}")
    sys.stdout.flush()
    # A signal that another thread receives, or that comes just before the main thread blocks, does not interrupt it.
    # Its handler runs when the main thread wakes up.
    while not host.wait(SIGNAL_CHECK_S):
        reloading.follow(host)
    return 0


def end(status: int) -> NoReturn:
    """Ends the process after `run`. A process that has imported vLLM skips Python's own shutdown. That would take
    seconds while gRPC's threads still run, and write errors that hide why a start failed."""
    if "vllm" in sys.modules:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


@final
class Reloading:
    """Follows SIGHUP: reads the flags' file again, and gives the host the new values that it can take while it runs."""

    def __init__(self, kind: Any, argv: Sequence[str], prog: str) -> None:
        self._kind, self._argv, self._prog = kind, argv, prog
        self._first_level = os.environ.get(LOG_LEVEL_ENV, "")
        # The environment will not have them any more. A variable takes precedence over a file.
        names = [one for one in SECRETS if os.environ.get(f"{one}_FILE") and not os.environ.get(one, "").strip()]
        self._secret_files = {name: os.environ[f"{name}_FILE"] for name in names}
        self._is_asked = threading.Event()
        self.given: WorkerConfig | RouterConfig | GatewayConfig | None = None  # by the flags
        if not is_on_terminal():
            signal.signal(signal.SIGHUP, lambda *_: self._is_asked.set())

    def set_level(self, words: Sequence[str]) -> None:
        """The environment, because child processes of this one inherit it."""
        level = log_flags(self._prog).parse_known_args(words)[0].log_level or self._first_level
        os.environ.pop(LOG_LEVEL_ENV, None)
        if level:
            os.environ[LOG_LEVEL_ENV] = level

    def follow(self, host: Host) -> None:
        """Returns immediately, if there was no SIGHUP. An invalid file of flags changes nothing."""
        if not self._is_asked.is_set() or self.given is None:
            return
        self._is_asked.clear()
        before = self.given
        try:
            words = with_file(self._argv, self._prog)
            secrets = {one.metadata["env"]: getattr(before, one.name) for one in dataclasses.fields(before)}
            for name in self._secret_files.keys() & secrets.keys():
                secrets[name] = self._read_secret(name, secrets[name])
            after = parse_flags(self._kind, words, self._prog, secrets)
            self.set_level(words)
            level = log_level()
        except (PdserveError, SystemExit) as error:  # argparse has written a line and exits
            why = error.message if isinstance(error, PdserveError) else "see the line above"
            log.error("SIGHUP: the flags are invalid, and the settings stay as they are", extra={"why": why})
            return
        changed = {
            one.name: getattr(after, one.name)
            for one in dataclasses.fields(after)
            if getattr(after, one.name) != getattr(before, one.name)
        }
        live = {name: value for name, value in changed.items() if name in live_names(self._kind)}
        self.given = replace(before, **live)
        root = logging.getLogger()
        names = sorted(live) + ["log_level"] * (root.level != level)
        root.setLevel(min(level, logging.INFO))  # this line is shown at each level
        log.info("SIGHUP: the settings were read again", extra={"changed": ", ".join(names) or "none"})
        if fixed := sorted(changed.keys() - live.keys()):
            log.warning("SIGHUP: these settings change at the next start only", extra={"settings": ", ".join(fixed)})
        root.setLevel(level)
        host.reload(live)

    def _read_secret(self, name: str, known: str) -> str:
        """`known` if its file can no longer be read: it may be removed after the start."""
        try:
            return from_env(name, {f"{name}_FILE": self._secret_files[name]})
        except ConfigError as error:
            log.warning(
                "SIGHUP: the file of a secret cannot be read, and the secret stays", extra={"why": error.message}
            )
            return known


def _warn_of_plain_text(config: WorkerConfig | RouterConfig | GatewayConfig) -> None:
    if config.insecure and not config.tls_cert and not is_loopback_host(config.host):
        log.warning("plain text is served beyond loopback", extra={"host": config.host})


def _own_id(config: WorkerConfig | RouterConfig | GatewayConfig) -> str:
    if isinstance(config, RouterConfig):
        return config.router_id
    return config.gateway_id if isinstance(config, GatewayConfig) else config.worker_id


def _follow_signals(host: Host) -> None:
    signals_seen = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen == 1:
            host.drain()
        else:
            threading.Thread(target=host.stop, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
