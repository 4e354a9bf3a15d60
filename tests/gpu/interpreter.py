"""Selects where kernels run: on a CUDA device if there is one, otherwise in Triton's interpreter. Call `prepare` before
importing pdserve.engine.gpu."""

from __future__ import annotations

import os
import pkgutil
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Final

import numpy as np
import torch

import pdserve.engine.gpu

#: Whether a triton.jit function is interpreted is decided when its module is imported.
KERNELS: Final = (
    *(m.name for m in pkgutil.walk_packages(pdserve.engine.gpu.__path__, "pdserve.engine.gpu.")),
    "tests.gpu.case_sampling",  # has a kernel of its own
    "tests.gpu.faulty_kernels",
)


_COMPARISONS: Final = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


def prepare() -> torch.device:
    """The device for tensors. The environment is restored, so other tests and their child processes are not
    affected."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    early = [name for name in KERNELS if hasattr(sys.modules.get(name), "triton")]
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before the interpreter was chosen: its tests belong in unit/engine/gpu"
        )
    # triton's own functions must be interpreted as well, so it is imported again if transformers' models have already
    # imported it. Its compiled part cannot be loaded twice, and contains nothing to interpret.
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        let_scalars_be_loop_bounds()
        let_comparisons_be_masks()
        patch_the_language_once()
        skip_sums_for_unused_checks()
        describe_types_once()
        import_module("triton.experimental.gluon")  # triton imports it late, and it must be interpreted too
        for name in KERNELS:
            import_module(name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return torch.device("cpu")


def let_scalars_be_loop_bounds() -> None:
    """The interpreter stores scalars as arrays of one element, and numpy 2.4 rejects int() of these."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def let_comparisons_be_masks() -> None:
    """The interpreter gives a comparison the type of its operands, so a scalar comparison that is broadcast becomes a
    mask of integers. Triton 3.9's interpreter rejects such masks; for its compiler they are int1."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    int1, builder = import_module("triton.language").int1, interpreter.InterpreterBuilder
    compute = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = compute(self, lhs, rhs, op)
        return interpreter.TensorHandle(result.data.astype(bool), int1) if op in _COMPARISONS else result

    builder.binary_op = binary_op


def patch_the_language_once() -> None:
    """The interpreter patches triton.language at each call of a function in a kernel, although it is already patched.
    Without this, that takes a third of a test's time."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch, language = interpreter._patch_lang, import_module("triton.language")

    @cache
    def modules_of(fn: Any) -> tuple[Any, ...]:
        return tuple(one for one in (language, language.core) if any(one is value for value in fn.__globals__.values()))

    def patch_once(fn: Any) -> Any:
        if all(module.static_assert.__module__ == interpreter.__name__ for module in modules_of(fn)):
            return interpreter._LangPatchScope()  # the kernel's own scope restores
        return patch(fn)

    interpreter._patch_lang = patch_once


def skip_sums_for_unused_checks() -> None:
    """The interpreter computes each sum and product of integers in int64, too, to detect an overflow, which it reports
    in debug mode only. That is off."""
    builder: Any = import_module("triton.runtime.interpreter").interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def describe_types_once() -> None:
    """The interpreter derives numpy's type, shape and size of a value from its type at each operation."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    core: Any = import_module("triton.language.core")
    derive, make_block, found = interpreter._get_np_dtype, core.block_type.__init__, {}

    def numpy_type(one: Any) -> Any:
        if one.name not in found:
            found[one.name] = derive(one)
        return found[one.name]

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def describe(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    @cache
    def block_of(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        one = core.block_type.__new__(core.block_type)
        make_block(one, core.int1, list(sizes))
        return one.shape, one.numel, str(one.shape)

    def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, sizes = block_of(tuple(core._unwrap_if_constexpr(size) for size in shape))
        self.name = f"<{sizes}, {element_ty}>"

    interpreter._get_np_dtype = numpy_type
    core.tensor.__init__ = describe
    core.block_type.__init__ = describe_block
