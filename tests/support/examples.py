"""How many examples hypothesis tries: a share of them in `make test`, all of them in `make test-slow`."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

FULL: Final = "full"
SHARE: Final = 4
LEAST: Final = 15
DEFAULT: Final = 100  # hypothesis's own


def register_profiles() -> None:
    """Before test modules are imported. `--hypothesis-profile full` selects the full number."""
    # A busy machine may be many times slower than a quiet one: no example fails because it took long.
    settings.register_profile("pdserve", deadline=None, max_examples=DEFAULT // SHARE)
    settings.register_profile(FULL, deadline=None, max_examples=DEFAULT)
    if settings.get_current_profile_name() == "default":
        settings.load_profile("pdserve")


def examples(full: int) -> int:
    """For a test that sets `max_examples` itself."""
    return full if settings.get_current_profile_name() == FULL else max(LEAST, full // SHARE)
