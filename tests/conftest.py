"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine may be many times slower than a quiet one: no example fails because it took long.
settings.register_profile("pdserve", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("pdserve")
