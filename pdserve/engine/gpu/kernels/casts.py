"""What kernels share: casts that round equally in compiled kernels and in Triton's interpreter, and programmatic
dependent launch.

The interpreter of Triton 3.6 truncates to bfloat16 instead of rounding, loses the carry when it rounds an fp8 mantissa,
and multiplies bfloat16 tiles as integers. Interpreted kernels therefore round each float32 value to one that the target
dtype can represent before they cast it, and multiply in float32. Compiled kernels use the hardware's casts, which round
to the nearest, ties to even.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.engine.gpu.kernels.switches import gpu_switches

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_RINT = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to an integer
_FP8_RINT = tl.constexpr(1.5 * 2.0**14)  # the same, to multiples of 2^-9, the step of fp8's subnormals
_FP8_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 to float32, bfloat16, float16 or fp8 (e4m3; |x| at most 448)."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            x = _round_mantissa(x, 16)
        if dtype == tl.float8e4nv:
            tiny = tl.abs((x + _FP8_RINT) - _FP8_RINT).to(tl.uint32, bitcast=True)
            tiny |= (x.to(tl.uint32, bitcast=True) >> 31) << 31  # a negative number that rounds to zero keeps its sign
            x = tl.where(tl.abs(x) < _FP8_LEAST_NORMAL, tiny.to(tl.float32, bitcast=True), _round_mantissa(x, 20))
    return x.to(dtype)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """An operand of a tl.dot that sums in float32."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x.to(dtype)


@triton.jit
def rint(x):
    """The nearest integer, ties to even, of a float32 below 2^22. Needs enable_fp_fusion=False if x is a product."""
    return (x + _RINT) - _RINT


@triton.jit
def _round_mantissa(x, COUNT: tl.constexpr):
    """Rounds a float32 to a mantissa without its last COUNT bits, ties to even. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + ((1 << (COUNT - 1)) - 1) + ((bits >> COUNT) & 1)
    rounded = (rounded >> COUNT) << COUNT
    return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)


# --- programmatic dependent launch ----------------------------------------------------------------------------
# A kernel may start while the kernel before it in the stream still runs.
#
#     begin(PDL)              the first statement of a kernel that is launched with these options
#     **overlap_options()     PDL, and the launch option `launch_pdl`
#
# `gdc_wait` returns once all kernels before have ended and their writes are visible. Nothing that a kernel writes is
# read or written before it: a kernel's memory may still be in use by the one before (x of a residual sum, scratch). A
# kernel that is launched in this way without the wait would read what its predecessor has not yet written, so `PDL` has
# no default: a kernel without the parameter cannot be launched with the options. At least one program of each kernel
# must wait, so that a kernel ends after its predecessor, which the kernel after it relies on; hence the wait comes
# before any early return. `gdc_launch_dependents` allows the next kernel to start once all programs have called it.
# What is gained is the time between two kernels and the start of the next one. Other kernels (cuBLAS, torch) start
# after the end of the one before, as without this option.
#
# It needs compute capability 9.0. Triton sets CUDA's attribute "programmatic stream serialization" for it, which a
# capture stores as an edge of the graph (CUDA 12.3 and later; CUDA Programming Guide, 4.2).

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
