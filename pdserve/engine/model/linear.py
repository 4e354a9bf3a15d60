"""A matrix product: its weights in one form, a place for an addend, and the operations in front of it.

`Linear` is the base class of the storage forms. forms.py has the forms that round or rearrange weights, and the table
by which a weight gets one. `Products` computes a product together with the norm or the gate in front of it. For a form
that rounds its inputs, the operation in front rounds its result while it is in the cache.

An `Addend` adds to a product's results in place, such as y += scale * (x A^T) B^T for the rows of an adapter (LoRA). It
reads the product's inputs before they are rounded. A product with an addend therefore takes its norm or gate from an
operation of its own. A product without one is computed as if there were no addends.
"""

# Shapes: T tokens, K inputs, N outputs, F = N / 2 of a gate.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels.rounding import BFLOAT16_TRIAL

if TYPE_CHECKING:
    from pdserve.engine.cpu.ops import Ops, RoundedOps
    from pdserve.engine.model.config_schema import Activation

Rounding = Literal["none", "bfloat16", "int8", "int4", "fp8"]  # of a product's weights, or of its inputs

_FIXED_ROWS: Final = 64  # number of rows of a product that would otherwise depend on it
TRIED_ROWS: Final = (1, 2, 3, 5, 8, 17, 33)


# --- addends --------------------------------------------------------------------------------------------------


class Addend(Protocol):
    def __call__(self, x_TK: Tensor, y_TN: Tensor) -> None:
        """Adds to results `y_TN` in place. `x_TK` are the product's inputs, not rounded for it; it must not change
        them. Stacked products (queries, keys and values; gate and up) have one addend for all their columns."""
        ...


class LayerAddends(NamedTuple):
    """Of the products of one layer; None: nothing is added. Products of experts take none."""

    qkv: Addend | None = None
    o: Addend | None = None
    gate_up: Addend | None = None
    down: Addend | None = None


class Addends(Protocol):
    """Of all products, for the tokens of one batch. On a tensor-parallel rank they add to the rank's part of each
    product: some outputs of qkv, gate_up and head, partial sums of o and down.

    In a CUDA graph they read which adapter a token has from static memory, so that they launch the same kernels for any
    tokens.
    """

    @property
    def head(self) -> Addend | None: ...

    def layer(self, index: int) -> LayerAddends: ...

    def take(self, token_U: Tensor | slice) -> Addends:
        """Of these tokens of the batch only. In the last layer, only tokens whose logits are needed continue."""
        ...


# --- products -------------------------------------------------------------------------------------------------


class Linear(ABC):
    """y = x w^T + b over the last axis: [T, K] -> [T, N]. A subclass is one form in which weights are stored."""

    rounding: Rounding = "none"  # of its inputs
    form: str = ""  # its name in forms.FORMS

    @abstractmethod
    def product(self, *inputs: Tensor) -> Tensor:
        """Of inputs as `round` returns them: they may have been rounded by the operation that computed them."""

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        """Inputs of `product`."""
        return (x_TK,)

    def __call__(self, x_TK: Tensor, addend: Addend | None = None) -> Tensor:
        y_TN = self.product(*self.round(x_TK))
        if addend is not None:
            addend(x_TK, y_TN)
        return y_TN


@final
class PlainLinear(Linear):
    """Weights as the checkpoint has them, on any device and in any dtype."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def product(self, *inputs: Tensor) -> Tensor:
        (x_TK,) = inputs
        return F.linear(x_TK, self.weight_NK, self.bias_N)

    def into(self, x_TK: Tensor, out_TN: Tensor) -> Tensor:
        """The same product, in `out_TN`, which is of the weight's dtype."""
        if self.bias_N is not None:
            return torch.addmm(self.bias_N, x_TK, self.weight_NK.t(), out=out_TN)
        return torch.mm(x_TK, self.weight_NK.t(), out=out_TN)


class Products:
    """Products with what is in front of them. On a GPU gpu/few_rows.py has another class, for few rows."""

    def __init__(self, ops: Ops, eps: float, activation: Activation) -> None:
        """`eps` of norms, and `activation` of gates."""
        self.ops, self.eps, self.activation = ops, eps, activation

    def plain(self, linear: Linear, x_TK: Tensor, addend: Addend | None = None, out_TN: Tensor | None = None) -> Tensor:
        """`out_TN` only with plain weights."""
        if out_TN is None:
            return linear(x_TK, addend)
        assert isinstance(linear, PlainLinear)
        linear.into(x_TK, out_TN)
        if addend is not None:
            addend(x_TK, out_TN)
        return out_TN

    def normed(
        self, linear: Linear, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor, addend: Addend | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta, which may be in x's memory, and the product of its norm."""
        rounded = self._rounded(linear, addend)
        if rounded is None:
            return x_TK, self.plain(linear, self.norm(x_TK, delta_TK, norm_K), addend)
        if delta_TK is None:
            return x_TK, linear.product(*rounded.rms_norm(x_TK, norm_K, self.eps))
        return x_TK, linear.product(*rounded.add_rms_norm(x_TK, delta_TK, norm_K, self.eps))

    def mlp(
        self,
        gate_up: Linear,
        down: Linear,
        x_TK: Tensor,
        delta_TK: Tensor | None,
        norm_K: Tensor,
        added: LayerAddends,
    ) -> tuple[Tensor, Tensor]:
        """x + delta, which may be in x's memory, and the mlp of its norm."""
        x_TK, gate_up_TN = self.normed(gate_up, x_TK, delta_TK, norm_K, added.gate_up)
        rounded = self._rounded(down, added.down)
        if rounded is None:
            return x_TK, self.plain(down, self.gated(gate_up_TN), added.down)
        round_gated = rounded.silu_mul if self.activation == "silu" else rounded.gelu_mul
        return x_TK, down.product(*round_gated(gate_up_TN))

    def norm(self, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor) -> Tensor:
        """The norm of x after `delta_TK`, if any, is added to it in place."""
        if delta_TK is None:
            return self.ops.rms_norm(x_TK, norm_K, self.eps)
        return self.ops.add_rms_norm(x_TK, delta_TK, norm_K, self.eps)

    def gated(self, gate_up_TN: Tensor) -> Tensor:
        """activation(gate) * up, [T, F]: gate, then up."""
        return self.ops.silu_mul(gate_up_TN) if self.activation == "silu" else self.ops.gelu_mul(gate_up_TN)

    def _rounded(self, linear: Linear, addend: Addend | None) -> RoundedOps | None:
        """The operations whose results the product takes; None if it, or its addend, takes results that are not
        rounded."""
        return self.ops.ROUNDED.get(linear.rounding) if addend is None else None


# --- products for the deterministic mode ----------------------------------------------------------------------


def make_invariant(linear: Linear, num_inputs: int) -> Linear:
    """`linear` if a row's bits do not depend on the number of rows; otherwise a product that always multiplies 64 rows.

    On the CPUs that we have seen, oneDNN's packed and int8 products add in the same order for any number of rows. This
    is not guaranteed, so it is tested on numbers whose sums round at every step, once for each shape and number of
    threads.
    """
    one_TN = linear(torch.zeros(1, num_inputs))
    key = type(linear), linear.form, num_inputs, one_TN.shape[1], torch.get_num_threads()
    if key not in _is_invariant:
        num_rows = _FIXED_ROWS
        if one_TN.dtype == torch.bfloat16:
            num_rows = max(num_rows, -(-BFLOAT16_TRIAL // one_TN.shape[1]))
        x_TK = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(0))
        whole_TN = linear(x_TK)
        _is_invariant[key] = all(
            torch.equal(torch.cat([linear(part) for part in x_TK.split(rows)]), whole_TN) for rows in TRIED_ROWS
        )
    return linear if _is_invariant[key] else FixedRowsLinear(linear)


# by type, form, inputs, outputs and threads
_is_invariant: Final[dict[tuple[type[Linear], str, int, int, int], bool]] = {}


@final
class FixedRowsLinear(Linear):
    """Products of always 64 rows, with padding: every row is computed by the same kernel."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def product(self, *inputs: Tensor) -> Tensor:
        (x_TK,) = inputs
        num_tokens = x_TK.shape[0]
        padded = F.pad(x_TK, (0, 0, 0, -num_tokens % _FIXED_ROWS))
        return torch.cat([self._linear(part) for part in padded.split(_FIXED_ROWS)])[:num_tokens]
