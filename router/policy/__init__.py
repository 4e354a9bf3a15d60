"""Placement policies: a policy gets a request and the usable workers, and returns a Decision. Pure.

Each file in `policies` is one policy; adding one changes no other file. It imports views and settings of router/state,
pdserve.config and pdserve.core. Read `interface.py` first, then `policies/goodput.py`, the default.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from pdserve.config import POLICIES
from pdserve.core.errors import ConfigError
from router.policy.interface import Links, Policy, PolicyEntry, check_rules
from router.state.interface import RouterSettings


def find_policy(name: str) -> PolicyEntry:
    """Imports the policy's file. Raises ConfigError on an unknown name, listing the known ones."""
    if name not in POLICIES:
        raise ConfigError("policy", name, "one of " + ", ".join(POLICIES))
    return cast(PolicyEntry, import_module(f"{__name__}.policies.{name.replace('-', '_')}").POLICY)


def make_policy(settings: RouterSettings, links: Links) -> Policy:
    """Raises ConfigError on an unknown policy or rule, listing the known names."""
    check_rules(settings.rules_off)
    return find_policy(settings.policy).make(settings, links)
