"""Profiles of known workers, shipped as JSON beside this file, and the reading of others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import MAX_JSON_BYTES, parse_json, read_bytes
from pdserve.core.cost.profile import Profile, degrees, parse_profile, profiles_by_degree
from pdserve.core.errors import ConfigError

FOLDER: Final = Path(__file__).parent


def known_profiles() -> list[str]:
    """Names that `load_profile` takes; one for each tensor-parallel degree where a profile has several."""
    names = []
    for path in sorted(FOLDER.glob("*.json")):
        several = degrees(_read(path))
        names += [f"{path.stem}:tp{degree}" for degree in several] if several else [path.stem]
    return names


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or one's own file by path; `:tpN` behind either picks a tensor-parallel degree.

    Raises ConfigError, which lists the known names where there is no such profile.
    """
    data, degree = _named(name_or_path)
    return parse_profile(data, degree)


def load_degrees(name_or_path: str, wanted: Sequence[int] = ()) -> dict[int, Profile]:
    """The profile at each of the `wanted` tensor-parallel degrees; none wanted: at those whose costs it lists. `:tpN`
    behind the name wants that one.

    Raises ConfigError as `load_profile` does, and on a degree that the profile neither lists nor lets us derive.
    """
    data, degree = _named(name_or_path)
    return profiles_by_degree(data, wanted or ([degree] if degree else []))


def _named(name_or_path: str) -> tuple[Any, int]:
    """The content of the file, and the degree behind the name; 0: none."""
    match = re.fullmatch(r"(.+?)(?::tp(\d{1,4}))?", name_or_path)
    name, degree = match.groups() if match is not None else ("", None)
    shipped = FOLDER / f"{name}.json"
    path = shipped if shipped.parent == FOLDER and shipped.is_file() else Path(name)
    if not name or not path.is_file():
        raise ConfigError("profile", name_or_path or "nothing", f"a file, or one of {', '.join(known_profiles())}")
    return _read(path), int(degree or 0)


def _read(path: Path) -> Any:
    return parse_json(read_bytes(path, MAX_JSON_BYTES, "profile"), "profile")
