"""A cluster's workers from the profile of one kind of worker. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.profile import Profile
from pdserve.core.types import Role
from simulator.model import NetworkLink, WorkerShape

MAX_WORKERS: Final = 4096


def make_workers(
    profile: Profile, num_prefill: int, num_decode: int, *, link: str = "", decode_profile: Profile | None = None
) -> tuple[WorkerShape, ...]:
    """Workers p0, p1, ... and d0, d1, ..., all of `profile`, on the link of that name (default: the profile's first).
    `decode_profile`: of the decode workers, if it differs.

    Raises ConfigError on unusable counts, and on a link that the profile lacks, listing its links.
    """
    for field, count, low in (("prefill", num_prefill, 0), ("decode", num_decode, 1)):
        if not low <= count <= MAX_WORKERS:
            why = "; without prefill workers the decode workers read the prompts themselves" if low else ""
            raise ConfigError(field, count, f"{low} to {MAX_WORKERS} workers{why}")
    over = make_link(profile, link)
    return tuple(
        WorkerShape(
            worker_id=f"{role.value[0]}{number}",
            role=role,
            cost=of.cost,
            kv_capacity_tokens=of.kv_capacity_tokens,
            kv_bytes_per_token=of.kv_bytes_per_token,
            link=over,
        )
        for role, count, of in (
            (Role.PREFILL, num_prefill, profile),
            (Role.DECODE, num_decode, decode_profile or profile),
        )
        for number in range(count)
    )


def make_link(profile: Profile, name: str = "") -> NetworkLink:
    if not name and not profile.links:
        return NetworkLink()
    found = profile.links.get(name or next(iter(profile.links)))
    if found is None:
        raise ConfigError(
            "link", name, "one of " + ", ".join(profile.links) if profile.links else "none in the profile"
        )
    latency_s, bytes_per_s = found
    return NetworkLink(latency_s=latency_s, bytes_per_s=bytes_per_s)
