"""Picks where kernels run: a CUDA device, or else Triton's interpreter. Call before importing pdserve.engine.gpu."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch

#: Everything that is decorated with triton.jit: whether it is interpreted is settled when it is imported.
KERNELS = (
    *(
        f"pdserve.engine.gpu.{name}"
        for name in ("casts", "norms", "gated", "place", "attention", "noise", "cutoff", "sampling", "extents")
    ),
    "tests.gpu.case_sampling",
)


def prepare() -> torch.device:
    """The device for tensors. The environment is left as it was: other tests and their children see nothing of it."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    names = [name for name in sys.modules if name == "triton" or name.startswith("triton.")]
    if any(name in sys.modules for name in KERNELS):
        raise RuntimeError("kernels were imported before the interpreter was chosen")
    for name in names:  # triton's own functions have to be interpreted as well
        del sys.modules[name]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        let_scalars_be_loop_bounds()
        import_module("triton.experimental.gluon")  # triton imports it late, and it must find itself interpreted
        for name in KERNELS:
            import_module(name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return torch.device("cpu")


def let_scalars_be_loop_bounds() -> None:
    """The interpreter holds scalars as arrays of one element, and numpy 2.4 refuses int() of these."""
    interpreter = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend
