"""Ways to divide GPUs into workers, by number and tensor-parallel degree, and the clusters that they form. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from simulator.model import NetworkLink, TraceRequest, WorkerShape
from simulator.search.goodput import TARGET

MAX_GPUS: Final = 256
MAX_DEGREES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """`prefill` workers of `prefill_degree` GPUs each, and `decode` workers of `decode_degree`. Without prefill workers
    the decode workers prefill, and `prefill_degree` is that of the decode workers."""

    prefill_degree: int
    decode_degree: int
    prefill: int
    decode: int

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_degree + self.decode * self.decode_degree

    @property
    def is_colocated(self) -> bool:
        return self.prefill == 0

    @property
    def text(self) -> str:
        """Such as `1 x tp2 prefill + 2 x tp1 decode`."""
        decode = f"{self.decode} x tp{self.decode_degree}"
        return decode if self.is_colocated else f"{self.prefill} x tp{self.prefill_degree} prefill + {decode} decode"


def all_layouts(gpus: int, prefill_degrees: Iterable[int], decode_degrees: Iterable[int]) -> list[Layout]:
    """Every layout that uses all `gpus`: first the colocated ones, then by degrees and number of prefill workers."""
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError("gpus", gpus, f"1 to {MAX_GPUS}")
    decode_degrees = sorted(set(decode_degrees))
    found = [
        Layout(prefill_degree=one, decode_degree=one, prefill=0, decode=gpus // one)
        for one in decode_degrees
        if gpus >= one and gpus % one == 0
    ]
    for prefill_degree in sorted(set(prefill_degrees)):
        for decode_degree in decode_degrees:
            for prefill in range(1, gpus // prefill_degree + 1):
                left = gpus - prefill * prefill_degree
                if left >= decode_degree and left % decode_degree == 0:
                    found.append(
                        Layout(
                            prefill_degree=prefill_degree,
                            decode_degree=decode_degree,
                            prefill=prefill,
                            decode=left // decode_degree,
                        )
                    )
    return found


def by_degrees(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """A list for each pair of degrees, ordered by the number of prefill workers. Goodput has one peak on each list."""
    return [list(group) for _, group in groupby(layouts, key=lambda one: (one.prefill_degree, one.decode_degree))]


def usable_layouts(
    gpus: int, profiles: Mapping[int, Profile], requests: Iterable[TraceRequest], block_size: int
) -> list[Layout]:
    """The layouts whose workers have enough KV memory: TARGET of the requests must each fit on a decode worker, prompt
    and answer, and that share of the prompts on a prefill worker. Otherwise no rate can be sustained.

    Raises ConfigError if there is none, with the reason.
    """
    lengths = [(one.prompt_tokens, one.prompt_tokens + one.output_tokens) for one in requests]
    prompt, whole = (_quantile(sorted(column)) for column in zip(*lengths, strict=True))
    capacities = {degree: one.kv_capacity_tokens // block_size * block_size for degree, one in profiles.items()}
    decode = [degree for degree, capacity in capacities.items() if capacity >= whole]
    if not decode:
        most = max(capacities, key=capacities.__getitem__)
        raise ConfigError(
            "profile",
            f"KV memory for {capacities[most]} tokens per worker at its largest (tp{most})",
            f"at least {whole}, which {TARGET:.0%} of the requests do not exceed; use more GPUs per worker or a "
            "smaller model",
        )
    layouts = all_layouts(gpus, [one for one, capacity in capacities.items() if capacity >= prompt], decode)
    if not layouts:
        fitting = ", ".join(map(str, decode))
        raise ConfigError("gpus", gpus, f"a multiple of a degree whose memory fits the requests: {fitting}")
    return layouts


def _quantile(values: Sequence[int]) -> int:
    return values[min(len(values) - 1, int(TARGET * len(values)))]


# --- workers and link of a cluster ----------------------------------------------------------------------------
# They follow from the profile of one kind of worker.

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
            copies_beside_steps=of.is_gpu,
            pulls_kv=of.degree == 1,
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
