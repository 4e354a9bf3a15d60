"""Requirements on compiled kernels: wide loads, asynchronous copies, tensor cores, and occupancy.

    shortcomings(kernel) -> what is missing, by name

Kernels that are bound by memory must move 16 bytes per load or store. Attention must copy keys and values
asynchronously, multiply them on tensor cores, and leave registers and shared memory for the number of programs per
multiprocessor that engine/gpu/kernels/attention.py assumes; so must products of few rows with weights (products.py).
While these programs compute, each multiprocessor must have enough loads in flight to use the memory's full bandwidth
(Little's law). Programs that depend on others must keep the order of memory (`disorder`).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import triton

from benchmarks.gpu.floor import IN_FLIGHT_BYTES

REGISTERS: Final = 65_536  # of a multiprocessor of sm_90; each warp has a multiple of 256
SHARED_BYTES: Final = 227 * 1024  # of which the system reserves 1 KiB per program
WIDE_LOAD, WIDE_STORE, ASYNC_COPY = "LDG.E.128", "STG.E.128", "LDGSTS.E.BYPASS.128"
TENSOR_CORES: Final = ("HMMA", "HGMMA", "IMMA", "QGMMA")
#: Instructions that each kernel must have. Kernels that move few bytes are not listed.
NEEDED: Final = {
    "_norm": (WIDE_LOAD, WIDE_STORE),
    "_gate": (WIDE_LOAD, WIDE_STORE),
    "_place": (WIDE_LOAD, WIDE_STORE),
    "_flatten": (WIDE_LOAD, WIDE_STORE),
    "_attend": (ASYNC_COPY, WIDE_STORE),
    "_product": (ASYNC_COPY,),
    "_merge": (WIDE_LOAD,),
    "_look": (WIDE_LOAD,),
    "_penalise": (WIDE_LOAD, WIDE_STORE),
    "_move": (WIDE_LOAD, WIDE_STORE),
    "_relay": (WIDE_LOAD,),
}
#: Kernels whose programs count themselves, so that the last one sums what all have stored.
COUNTING: Final = ("_attend", "_product")
COUNTED: Final = re.compile(r"atom\.global\S*\.add\.u32")
ACCESS: Final = re.compile(r"\b(?:ld|st|atom|red)\.global|cp\.async\.c")
PROGRAMS: Final = {("_attend", 4): 3, ("_attend", 8): 2, ("_product", 4): 2}  # per multiprocessor, by number of warps


def tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def dump(kernel: Any, name: str, *flags: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool(name), *flags, file.name], capture_output=True, text=True, check=True).stdout


def usage(kernel: Any) -> tuple[int, int]:
    """Registers per thread, and bytes of its local memory."""
    text = dump(kernel, "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[:200]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def shortcomings(kernel: Any) -> list[str]:
    of = kernel.metadata
    opcodes = opcodes_of(dump(kernel, "nvdisasm", "-c"))
    missing = [one for one in NEEDED.get(of.name, ()) if one not in opcodes]
    if wanted := PROGRAMS.get((of.name, of.num_warps)):
        # Products of float32 must be exact, so they cannot use tensor cores.
        if "bf16" in kernel.asm["ptx"] and not any(one.startswith(TENSOR_CORES) for one in opcodes):
            missing.append("tensor cores")
        programs = resident(usage(kernel)[0], of.num_warps, of.shared)
        if programs < wanted:
            missing.append(f"room for {wanted} programs on a multiprocessor: there is for {programs}")
        if "bf16" in kernel.asm["ptx"]:
            moving = in_flight(kernel)
            if moving < IN_FLIGHT_BYTES:
                missing.append(f"{IN_FLIGHT_BYTES:,.0f} bytes in flight on a multiprocessor: there are {moving:,}")
    return missing + disorder(kernel)


def disorder(kernel: Any) -> list[str]:
    """What the order of memory needs and the code lacks: a kernel that may start before its predecessor ends waits
    before its first access, and programs that count themselves release their parts after a barrier."""
    ptx, missing = kernel.asm["ptx"], []
    if getattr(kernel.metadata, "launch_pdl", False):
        wait, access = ptx.find("griddepcontrol.wait"), ACCESS.search(ptx)
        if wait < 0 or (access and access.start() < wait):
            missing.append("griddepcontrol.wait before the first access")
    for count in COUNTED.finditer(ptx) if kernel.metadata.name in COUNTING else ():
        if ".gpu.acq_rel." not in count[0]:
            missing.append(f"acq_rel of the device in {count[0]}")
        if "bar.sync" not in ptx[ptx.rfind("st.global", 0, count.start()) : count.start()]:
            missing.append("a barrier between the last store and the counter")
    return missing


def in_flight(kernel: Any) -> int:
    """The least number of bytes of keys and values, or of a product's operands, in flight to a multiprocessor while all
    its programs compute."""
    num_warps = kernel.metadata.num_warps
    return PROGRAMS[kernel.metadata.name, num_warps] * least_in_flight(kernel.asm["ptx"], num_warps)


def least_in_flight(ptx: str, num_warps: int) -> int:
    """Bytes in flight while one program computes a tile: the newest groups of asynchronous copies in the loop of tiles,
    as many as its wait instruction permits to be unfinished. 0 if it waits for all of them."""
    for body in loops(ptx):
        waits = re.findall(r"cp\.async\.wait_group\s+(\w+)", body)
        # Copies of 4 bytes contain block numbers and scales.
        groups = [
            sum(int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\S*\s[^;]*\],\s*(0x8|0x10)\b", group))
            for group in body.split("cp.async.commit_group")[:-1]
        ]
        if waits and any(groups):
            newest = [groups[-1 - number % len(groups)] for number in range(min(int(wait, 0) for wait in waits))]
            return sum(newest) * 32 * num_warps
    raise RuntimeError("no loop with asynchronous copies")


def loops(ptx: str) -> Iterator[str]:
    """The innermost ones: from a label to a branch back to it, with no label between."""
    parts = re.split(r"^(\$L__BB\w+):", ptx, flags=re.MULTILINE)
    for label, body in zip(parts[1::2], parts[2::2], strict=True):
        if back := re.search(rf"\bbra(?:\.uni)?\s+{re.escape(label)};", body):
            yield body[: back.start()]


def opcodes_of(code: str) -> set[str]:
    """Opcodes with their suffixes, from the output of nvdisasm."""
    found = set(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE))
    if not found:
        raise RuntimeError(f"nvdisasm shows no instructions: {code[:200]}")
    return found


def resident(registers: int, num_warps: int, shared_bytes: int) -> int:
    """The number of programs that run on a multiprocessor at once."""
    of_warp = -(-32 * registers // 256) * 256
    return min(REGISTERS // (of_warp * num_warps), SHARED_BYTES // (shared_bytes + 1024))
