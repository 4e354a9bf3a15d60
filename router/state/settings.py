"""The settings of a RouterState; the first line of every recording. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything that influences a router's decisions. A recording needs no other settings."""

    policy: str = "goodput"
    rules_off: tuple[str, ...] = ()  # names of router.policy.interface, for the goodput policy
    local_max_uncached_tokens: int = 16  # a decode worker preferably computes prompts up to this length itself
    max_queue: int = 1024
    max_attempts: int = 4  # attempts that may be lost before the request fails; declined ones do not count
    max_worker_deaths: int = 2  # a request fails if it was on this many workers when they died
    worker_silence_s: float = 5.0  # then a worker gets no new requests; after twice the time its attempts are moved
    # How long requests wait for a decode worker to reconnect. Longer than the watchdog takes to end a hung worker
    # (WorkerConfig.stall_s) plus the load time of its successor. Clients that cannot wait set a deadline.
    workers_grace_s: float = 60.0
    release_timeout_s: float = 120.0  # how long to wait for Released after the end of a request
    explain_capacity: int = 1024  # number of requests whose explanation is kept
    is_strict: bool = False  # raise IllegalMove instead of counting it

    def __post_init__(self) -> None:
        for name, low in (
            ("local_max_uncached_tokens", 0),
            ("max_queue", 0),
            ("max_attempts", 1),
            ("max_worker_deaths", 1),
            ("explain_capacity", 0),
        ):
            if getattr(self, name) < low:
                raise ConfigError(name, getattr(self, name), f"at least {low}")
        for name in ("worker_silence_s", "workers_grace_s", "release_timeout_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(name, getattr(self, name), "at least 0")
