"""Placement policies by name. Pure.

A policy is one function or small class that gets a request and the usable workers, and returns a Decision. Adding one
is a line in POLICIES. It imports views and settings of router/state, and pdserve.core. Read `interface.py` first, then
`goodput.py`, the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdserve.core.errors import ConfigError
from router.policy.baselines import Mooncake, RoundRobin, colocated, make_dynamo, make_least_loaded, make_lmetric
from router.policy.goodput import Goodput
from router.policy.interface import Links, Policy, check_rules
from router.policy.least_ttft import LeastTtft
from router.state.settings import RouterSettings

POLICIES: Final[dict[str, Callable[[RouterSettings, Links], Policy]]] = {
    "goodput": lambda settings, links: Goodput(links, settings.rules_off, settings.local_max_uncached_tokens),
    "least-ttft": lambda settings, links: LeastTtft(settings.local_max_uncached_tokens, links),
    "round-robin": lambda settings, links: RoundRobin(),
    "least-loaded": lambda settings, links: make_least_loaded(),
    "colocated": lambda settings, links: colocated,
    "dynamo": lambda settings, links: make_dynamo(),
    "lmetric": lambda settings, links: make_lmetric(),
    "mooncake": lambda settings, links: Mooncake(),
}


def make_policy(settings: RouterSettings, links: Links) -> Policy:
    """Raises ConfigError on an unknown policy or rule, listing the known names."""
    check_rules(settings.rules_off)
    make = POLICIES.get(settings.policy)
    if make is None:
        raise ConfigError("policy", settings.policy, "one of " + ", ".join(sorted(POLICIES)))
    return make(settings, links)
