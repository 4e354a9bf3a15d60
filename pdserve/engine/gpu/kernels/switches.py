"""Switches of the GPU engine, which a measurement compares one against another.

    PDSERVE_GPU="products=cublaslt,merge=fused,pdl=on" python -m benchmarks.gpu ...

Each switch has a value that is tried on a device before it may become the default, or that replaces a part which fails
there, so that the other parts can still be measured. They are no settings: users have no reason to change them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Final, Literal, get_args, get_type_hints

from pdserve.core.errors import ConfigError

VARIABLE: Final = "PDSERVE_GPU"


@dataclass(frozen=True, slots=True)
class GpuSwitches:
    """The first value of each switch is the default."""

    # Candidates for a default.
    products: Literal["cublas", "cublaslt", "fastest", "split-k"] = "cublas"  # matrix products of at most 32 rows
    layout: Literal["tokens", "heads"] = "tokens"  # which is outside within a block of the KV pool
    merge: Literal["kernel", "fused"] = "kernel"  # of a row's attention that several programs computed
    pdl: Literal["off", "on"] = "off"  # programmatic dependent launch of Triton kernels
    # Replacements of parts that fail.
    attention: Literal["staged", "few-stages"] = "staged"  # few: the attention kernel without a pipeline of loads
    steps: Literal["graphs", "eager"] = "graphs"
    prefill: Literal["flash", "torch"] = "flash"  # attention of prompts
    sampler: Literal["kernel", "argmax"] = "kernel"  # argmax: torch's, so that every row is greedy


@cache
def parse_switches(text: str) -> GpuSwitches:
    """The switches of `text`, as in "merge=fused,pdl=on". Raises ConfigError."""
    hints = get_type_hints(GpuSwitches)
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in hints:
            raise ConfigError(VARIABLE, name, f"one of {', '.join(field.name for field in fields(GpuSwitches))}")
        if value not in (known := get_args(hints[name])):
            raise ConfigError(f"{VARIABLE}, {name}", value, f"one of {', '.join(known)}")
        found[name] = value
    return GpuSwitches(**found)  # type: ignore[arg-type]


def gpu_switches(environ: Mapping[str, str] = os.environ) -> GpuSwitches:
    return parse_switches(environ.get(VARIABLE, ""))
