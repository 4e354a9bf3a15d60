"""How many file descriptors a process may need, and whether its limit allows them."""

from __future__ import annotations

from typing import Final

from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.core.errors import ConfigError

try:
    import resource
except ImportError:  # a system without such a limit
    resource = None  # type: ignore[assignment]

OF_A_PROCESS: Final = 128  # libraries, event loops, logs, model files, metrics, Redis, traces
OF_A_CHILD: Final = 8  # of a launcher for each of its processes: pipes, ports, log file
WORKER_CONNECTIONS: Final = 512 + 256  # to a worker's gRPC port and to its KV port


def needed_by(config: WorkerConfig | RouterConfig | GatewayConfig) -> int:
    if isinstance(config, WorkerConfig):
        return OF_A_PROCESS + WORKER_CONNECTIONS
    to_workers = len(config.workers) if isinstance(config, RouterConfig) else 0
    return OF_A_PROCESS + config.max_connections + to_workers


def allow_descriptors(needed: int, process: str) -> None:
    """Raises the soft limit of this process to its hard limit. Raises ConfigError if `needed` are not allowed then."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS reports a hard limit that it does not accept
            pass
    if soft != resource.RLIM_INFINITY and soft < needed:
        expected = f"at least {needed} open files for {process}: raise it with `ulimit -n {needed}`"
        raise ConfigError("ulimit -n", soft, expected)
