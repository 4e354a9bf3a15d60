"""Servers that the benchmark's tests load."""

from __future__ import annotations

from tests.unit.gateway.conftest import bundled as bundled
from tests.unit.gateway.conftest import toy as toy
