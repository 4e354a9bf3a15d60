"""The goodput policy's rules, by name. `rules_off` switches rules off, to measure their effect. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import ConfigError

RULES: Final[dict[str, str]] = {
    "path-choice": "a placement is local if that costs less than remote; off: remote if there is a prefill worker",
    "tandem": "TPOT includes arriving requests and their growth; off: only running ones, as the worker reports them",
    "least-slack": "the request whose first token is due first goes first; off: order of arrival",
    "ageing": "a share of the work is reserved for late requests, in order of arrival; off: they wait for idle time",
    "fairness": "tenants share predicted GPU-seconds; off: tenants are ignored",
    "priority": "higher classes go first; off: all are one class",
    "rejection": "under overload, requests that will miss their target are rejected; off: no request is rejected",
    "shortest": "of the requests that do not fit, the longest is given up; off: the last that came",
    "deadline-drop": "a request past its deadline is dropped before prefill or decode; off: it is computed",
    "transfer-price": "the part of the transfer that prefill does not hide counts; off: transfers cost nothing",
    "prefix-value": "a cached prefix counts as the time that it saves; off: caches are ignored",
}


#: The rules of every other policy. Published baselines serve in order of arrival, and the queue rejects no request.
PLAIN: Final = frozenset({"priority", "deadline-drop"})
#: The rules of least-ttft: the order of the queue without tenants and rejections.
LEAST_TTFT: Final = PLAIN | {"least-slack", "ageing"}


def rules_on(policy: str, rules_off: Iterable[str]) -> frozenset[str]:
    if policy == "goodput":
        return frozenset(RULES) - frozenset(rules_off)
    return LEAST_TTFT if policy == "least-ttft" else PLAIN


def check_rules(names: Iterable[str]) -> None:
    """Raises ConfigError on an unknown name."""
    for name in names:
        if name not in RULES:
            raise ConfigError("rules_off", name, "some of " + ", ".join(RULES))
