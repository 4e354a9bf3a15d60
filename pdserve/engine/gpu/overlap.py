"""Programmatic dependent launch: a kernel may start while the kernel before it in the stream still runs.

    begin(PDL)              the first statement of a kernel that is launched with these options
    **overlap_options()     PDL, and the launch option `launch_pdl`

`gdc_wait` returns once all kernels before have ended and their writes are visible. Nothing that a kernel writes is read
or written before it: a kernel's memory may still be in use by the one before (x of a residual sum, scratch). A kernel
that is launched in this way without the wait would read what its predecessor has not yet written, so `PDL` has no
default: a kernel without the parameter cannot be launched with the options. At least one program of each kernel must
wait, so that a kernel ends after its predecessor, which the kernel after it relies on; hence the wait comes before any
early return.
`gdc_launch_dependents` allows the next kernel to start once all programs have called it. What is gained is the time
between two kernels and the start of the next one. Other kernels (cuBLAS, torch) start after the end of the one before,
as without this option.

It needs compute capability 9.0. Triton sets CUDA's attribute "programmatic stream serialization" for it, which a
capture stores as an edge of the graph (CUDA 12.3 and later; CUDA Programming Guide, 4.2).
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.engine.gpu.casts import INTERPRETED
from pdserve.engine.gpu.switches import gpu_switches

_LEAST_CAPABILITY = (9, 0)


class OverlapOptions(TypedDict):
    PDL: bool
    launch_pdl: bool


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL and not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


def overlap_options() -> OverlapOptions:
    is_on = gpu_switches().pdl == "on" and _has_pdl()
    return {"PDL": is_on, "launch_pdl": is_on}


@cache
def _has_pdl() -> bool:
    """Of the current device. Without one, kernels are interpreted, or compiled for sm_90."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _LEAST_CAPABILITY
