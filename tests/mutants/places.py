"""Which mutants exist, and which of them a sample takes.

Left out: typing (annotations, decorators, `if TYPE_CHECKING`), which `make check` judges; the values of constants and
defaults, which are choices and not decisions; and mutants that do not compile.

A mutant's name does not contain a line number, and a sample takes the mutants whose names hash lowest. Therefore a
change of one function changes the sample in that function alone, and the list of survivors stays valid.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code

from tests.mutants.operators import operators


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    module: str  # as it is imported
    path: str
    definition: str  # the function or class around it; empty at the top of a module
    operator: str
    occurrence: int  # Cosmic Ray's: the how-manieth position of the operator in the module
    position: tuple[int, int]
    line: str
    name: str

    @property
    def room(self) -> str:
        return "core" if self.module.startswith("pdserve.core") else self.module.split(".")[0]

    def code(self, source: str) -> str:
        changed = mutate_code(source, operators()[self.operator], self.occurrence)
        assert changed is not None, f"nothing to change: {self.name}"
        return str(changed)

    def compiles(self, root: Path) -> bool:
        """What does not is found without a test, and proves nothing."""
        try:
            compile(self.code((root / self.path).read_text()), self.path, "exec")
        except SyntaxError:
            return False
        return True


def mutants_of(module: str, path: Path, root: Path) -> Iterator[Mutant]:
    source = (root / path).read_text()
    lines = source.split("\n")
    nodes = list(ast_nodes(get_ast(source)))
    seen: Counter[str] = Counter()
    for operator_name, operator in operators().items():
        positions = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(positions):
            line = lines[start[0] - 1].strip()
            definition = ASTQuery(node).get_definition_name() or ""
            name = f"{module} | {definition} | {operator_name} | {line}"
            seen[name] += 1
            is_value = operator_name.startswith(("NumberReplacer", "ReplaceBinaryOperator"))
            if _is_typing(node) or (is_value and _is_default(node)):
                continue
            yield Mutant(
                module=module,
                path=str(path),
                definition=definition,
                operator=operator_name,
                occurrence=occurrence,
                position=start,
                line=line,
                name=f"{name} | {seen[name]}",
            )


def sample(mutants: list[Mutant], count: int, seed: int, root: Path) -> list[Mutant]:
    """`count` mutants at random, at most one for each position in the source."""
    taken: dict[tuple[str, tuple[int, int]], Mutant] = {}
    for mutant in sorted(mutants, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest()):
        if len(taken) == count:
            break
        if (mutant.module, mutant.position) not in taken and mutant.compiles(root):
            taken[mutant.module, mutant.position] = mutant
    return list(taken.values())


def _is_typing(node: Any) -> bool:
    below = node
    while (above := below.parent) is not None:
        if above.type == "decorator":
            return True
        if above.type in ("tfpdef", "annassign") and below is above.children[1]:
            return True
        if above.type == "param" and above.annotation is not None and below is above.annotation:
            return True
        if above.type == "funcdef" and below is above.annotation:
            return True
        below = above
    return node.type == "if_stmt" and node.children[1].get_code().strip() == "TYPE_CHECKING"


def _is_default(node: Any) -> bool:
    """Whether the node is outside of function bodies or is part of a parameter list."""
    while (node := node.parent) is not None:
        if node.type in ("param", "parameters"):
            return True
        if node.type in ("funcdef", "lambdef"):
            return False
    return True
