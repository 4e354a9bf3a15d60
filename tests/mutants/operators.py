"""Which changes a mutant can have: a selection of Cosmic Ray's operators, and one more that drops a call.

Cosmic Ray offers every replacement of every operator; 11 variants of one `+` say little more than one. Here a
comparison is moved by its boundary or negated, and an arithmetic operator is replaced by its nearest opposite.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

_COMPARISONS = {
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
_ARITHMETIC = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "FloorDiv": "Mul",
    "Mod": "FloorDiv",
    "Pow": "Mul",
    "LShift": "RShift",
    "RShift": "LShift",
    "BitOr": "BitAnd",
    "BitAnd": "BitOr",
    "BitXor": "BitAnd",
}
_OTHERS = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "ZeroIterationForLoop",
)


class DropCall(Operator):  # type: ignore[misc]
    """Replaces a statement that is a call by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if self._is_call(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return (Example("f(x)\n", "pass\n"),)

    @staticmethod
    def _is_call(node: Any) -> bool:
        if node.type != "atom_expr" or node.parent is None or node.parent.type != "simple_stmt":
            return False
        last = node.children[-1]
        return bool(last.type == "trailer" and last.children[0].value == "(")


@functools.cache
def operators() -> dict[str, Operator]:
    names = [f"ReplaceComparisonOperator_{old}_{new}" for old, every in _COMPARISONS.items() for new in every]
    names += [f"ReplaceBinaryOperator_{old}_{new}" for old, new in _ARITHMETIC.items()]
    return {**{name: get_operator(f"core/{name}")() for name in (*names, *_OTHERS)}, "DropCall": DropCall()}
