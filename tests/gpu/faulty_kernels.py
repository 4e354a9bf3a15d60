"""Kernels with one mistake each, which the strict interpreter must find."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target, size, BLOCK: tl.constexpr, MASK_LOADS: tl.constexpr, MASK_STORES: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(source + at, mask=inside, other=0.0) if MASK_LOADS else tl.load(source + at)
    if MASK_STORES:
        tl.store(target + at, value, mask=inside)
    else:
        tl.store(target + at, value)


@triton.jit
def add_before(values, BLOCK: tl.constexpr):
    """Each program adds the result of the previous one."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.load(values + (program - 1) * BLOCK + at, mask=at + program * BLOCK >= BLOCK, other=0.0)
    here = values + program * BLOCK + at
    tl.store(here, tl.load(here) + before)


@triton.jit
def store_and_load(values, out, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    """Reverses a block through memory, so each thread loads what another one has stored."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(values + at))
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(values + at, tl.load(out + BLOCK - 1 - at))


@triton.jit
def sum_of_last(values, parts, count, out, PROGRAMS: tl.constexpr, SEM: tl.constexpr, HAS_BARRIER: tl.constexpr):
    """The last program to arrive adds what all have stored, and resets the counter for the next launch."""
    program = tl.program_id(0)
    tl.store(parts + program, tl.load(values + program))
    if HAS_BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=SEM) == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)), axis=0))
        tl.store(count, 0)


@triton.jit
def reset_early(count, SEM: tl.constexpr):
    """The last program resets the counter, and unless SEM acquires, another one may still be changing it."""
    if tl.atomic_add(count, 1, sem=SEM) == tl.num_programs(0) - 1:
        tl.store(count, 0)
