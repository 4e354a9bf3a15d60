"""The goodput policy's rules by name. Each can be switched off (`rules_off`), to measure its effect. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import ConfigError

RULES: Final[dict[str, str]] = {
    "path-choice": "local where it costs less slack than remote; off: remote wherever a prefill worker exists",
    "most-loaded": "the fullest feasible pair; off: the one with the soonest first token",
    "tandem": "TPOT counts what is on its way to a decode worker and will grow there; off: what it reports as running",
    "least-slack": "the least time to spare goes first; off: in order of arrival",
    "ageing": "a share of the work is set aside for late requests in order of arrival; off: they wait for idleness",
    "fairness": "tenants share predicted GPU-seconds; off: no matter whose",
    "priority": "higher classes go first; off: all are one class",
    "refusal": "what surely misses its promise, while others wait, is refused at once; off: nothing is",
    "shortest": "when more comes than can be done, the longest prompts are refused; off: whoever does not fit",
    "deadline-drop": "past its deadline it is dropped before prefill and at the hand-off; off: computed in vain",
    "transfer-price": "the part of the transfer that the prefill does not hide counts; off: transfers cost nothing",
    "prefix-value": "a cached prefix is worth the seconds that it saves; off: caches are not looked at",
}


#: The rules of every other policy: published baselines are served in order of arrival, without rejections by the queue.
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
