"""Names of what is one file each: placement policies, KV transports. The files are listed, not imported. Pure."""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Final


def file_names(package: str, folder: str) -> tuple[str, ...]:
    """The modules in a folder of an installed top-level package, sorted; without packages."""
    found = find_spec(package)
    assert found is not None
    folders = [f"{one}/{folder}" for one in found.submodule_search_locations or ()]
    return tuple(sorted(one.name for one in iter_modules(folders) if not one.ispkg))


POLICIES: Final = tuple(name.replace("_", "-") for name in file_names("router", "policy/policies"))
