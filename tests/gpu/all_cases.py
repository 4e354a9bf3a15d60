"""Every kernel's cases and launches.

On a machine without CUDA, call interpreter.prepare before this import, unless kernels are only compiled.
"""

from __future__ import annotations

from typing import Any

from tests.gpu import (
    case_attention,
    case_flatten,
    case_forbid,
    case_fp8,
    case_norms,
    case_penalties,
    case_place,
    case_prepare,
    case_products,
    case_relay,
    case_sampling,
)
from tests.gpu.cases import Case, Launch

FILES = (
    case_norms,
    case_fp8,
    case_prepare,
    case_products,
    case_place,
    case_attention,
    case_flatten,
    case_sampling,
    case_forbid,
    case_penalties,
    case_relay,
)
CASES = [case for file in FILES for case in file.CASES]
LAUNCHES = [launch for file in FILES for launch in file.LAUNCHES]


def _named(kind: str) -> dict[str, Any]:
    return {
        f"{file.__name__.removeprefix('tests.gpu.case_')}: {one.name}": one
        for file in FILES
        for one in getattr(file, kind)
    }


#: By the name of their file and their own.
NAMED_CASES: dict[str, Case] = _named("CASES")
NAMED_LAUNCHES: dict[str, Launch] = _named("LAUNCHES")
