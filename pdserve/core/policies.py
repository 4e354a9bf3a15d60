"""Names of the router's placement policies: its files in router/policy/policies, which are not imported. Pure."""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Final


def _names() -> tuple[str, ...]:
    router = find_spec("router")
    assert router is not None
    folders = [f"{one}/policy/policies" for one in router.submodule_search_locations or ()]
    return tuple(sorted(one.name.replace("_", "-") for one in iter_modules(folders) if not one.ispkg))


POLICIES: Final = _names()
