"""Tells the control tokens that a chat template writes from equal text in the values of a request.

A second program of the template writes a secret name in place of each control token. Text of a request cannot contain
such a name, so every name in its output is a control token of the template, and every control token's own text comes
from the request. Constants that the template only compares with a request's text keep their text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Final, final

import jinja2.nodes as nodes

#: Methods whose arguments are searched for in a text.
_SEARCHES: Final = frozenset(
    ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix", "strip",
     "lstrip", "rstrip", "find", "rfind", "index", "rindex", "count", "get")
)  # fmt: skip
#: Those after which nothing that they have found is left, or which return no text.
_REMOVERS: Final = ("split", "rsplit", "partition", "startswith", "endswith", "removeprefix", "removesuffix", "replace")
_SEARCHING_FILTERS: Final = frozenset(("select", "reject", "selectattr", "rejectattr", "trim", "map", "attr"))


@final
class SecretNames:
    """Names of control tokens and other marks, for the life of a process."""

    def __init__(self, marks: Iterable[str], nonce: str = "") -> None:
        """`nonce` is that of the same names in another process."""
        # Lowercase hexadecimal: no normalizer changes it, and it needs no escape in JSON.
        self.nonce = nonce or secrets.token_hex(12)
        longest_first = sorted(set(marks), key=lambda mark: (-len(mark), mark))
        self.of: dict[str, str] = {mark: f"{self.nonce}{index:06x}" for index, mark in enumerate(longest_first)}
        self.broken = f"{self.nonce}ffffff"  # written into a mark that a request contains
        self._mark_of = {name: mark for mark, name in self.of.items()}
        self._marks = any_of(longest_first)
        self._names = re.compile(f"{self.nonce}[0-9a-f]{{6}}")

    def hidden(self, text: str) -> str:
        """With names in place of marks."""
        return self._marks.sub(lambda found: self.of[found[0]], text)

    def shown(self, text: str, *, but: Container[str] = ()) -> str:
        """With marks in place of names, except those in `but`."""

        def mark(found: re.Match[str]) -> str:
            held = self._mark_of.get(found[0], "")
            return found[0] if held in but else held

        return self._names.sub(mark, text)

    def found(self, text: str) -> list[tuple[int, str]]:
        """The position in shown(text), and the mark, of each name in `text`."""
        found, shift = [], 0
        for one in self._names.finditer(text):
            mark = self._mark_of.get(one[0], "")
            if mark:
                found.append((one.start() + shift, mark))
            shift += len(mark) - len(one[0])
        return found

    def without_marks(self, text: str, marks: Iterable[str]) -> str:
        """A request's text in which none of `marks` is whole; shown() restores it."""
        for mark in marks:
            text = text.replace(mark, mark[:1] + self.broken + mark[1:])
        return text

    def has_part(self, text: str) -> bool:
        """Whether part of a name is left: the template has cut or changed it."""
        lower = text.lower()
        return any(self.nonce[start : start + 8] in lower for start in (0, 8, 16))

    def position(self, text: str, start: int) -> int:
        """The position in `text`, which has names, of the character `start` of shown(text)."""
        shift = 0
        for one in self._names.finditer(text):
            mark = self._mark_of.get(one[0], "")
            if one.start() + shift + len(mark) > start:
                break
            shift += len(mark) - len(one[0])
        return start - shift


def any_of(words: Collection[str]) -> re.Pattern[str]:
    """Finds the leftmost longest word. Takes a time that does not depend on the number of words."""
    return re.compile(_trie(set(words)) if words else "(?!)")


def _trie(words: set[str]) -> str:
    low, high = min(words), max(words)
    begin = low[: next((at for at, char in enumerate(low) if high[at] != char), len(low))]
    rest = {word[len(begin) :] for word in words}
    firsts = sorted({word[0] for word in rest if word})
    branches = [_trie({word for word in rest if word[:1] == first}) for first in firsts]
    inner = f"(?:{'|'.join(branches)})" if branches else ""
    return re.escape(begin) + inner + ("?" if inner and "" in rest else "")


def rewritten(program: nodes.Template, names: SecretNames, named_tokens: Mapping[str, str]) -> nodes.Template:
    """The program of a template that writes names in place of control tokens."""
    _Writer(program, names, named_tokens).visit(program, False)
    return program


@final
class _Writer:
    def __init__(self, program: nodes.Template, names: SecretNames, named_tokens: Mapping[str, str]) -> None:
        self._names = names
        assigned = [name.name for name in program.find_all(nodes.Name) if name.ctx != "load"]
        self._tokens = {name: token for name, token in named_tokens.items() if name not in assigned}
        self._constants = {
            one.target.name: one.node.value
            for one in program.find_all(nodes.Assign)
            if isinstance(one.target, nodes.Name) and assigned.count(one.target.name) == 1
            if isinstance(one.node, nodes.Const) and isinstance(one.node.value, str)
        }

    def visit(self, node: nodes.Node, is_searched: bool) -> nodes.Node:
        """`is_searched`: the value is not written, but compared with other text."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._names.hidden(node.data)
        elif isinstance(node, nodes.Const):
            if isinstance(node.value, str) and not is_searched:
                node.value = self._names.hidden(node.value)
        elif isinstance(node, nodes.Name):
            return self._variable(node, is_searched)
        elif isinstance(node, nodes.Test):
            if not isinstance(node.node, nodes.Name):
                self._each(node, True)
        elif isinstance(node, nodes.Compare):
            self._each(node, True)
            return self._contained(node)
        elif isinstance(node, (nodes.Operand, nodes.Keyword)):
            self._each(node, is_searched or isinstance(node, nodes.Operand))
        elif isinstance(node, (nodes.Call, nodes.Filter)):
            self._call(node, is_searched)
        elif isinstance(node, nodes.Getitem):
            node.node = self._expression(node.node, is_searched)
            node.arg = self._expression(node.arg, True)
        elif isinstance(node, nodes.Pair):
            node.key = self._expression(node.key, True)
            node.value = self._expression(node.value, is_searched)
        else:
            self._each(node, is_searched)
        return node

    def _expression(self, node: nodes.Expr, is_searched: bool) -> nodes.Expr:
        found = self.visit(node, is_searched)
        assert isinstance(found, nodes.Expr)
        return found

    def _each(self, node: nodes.Node, is_searched: bool, fields: Sequence[str] | None = None) -> None:
        for field, value in node.iter_fields(only=fields):
            if isinstance(value, list):
                setattr(node, field, [self._inner(one, is_searched) for one in value])
            else:
                setattr(node, field, self._inner(value, is_searched))

    def _inner(self, value: Any, is_searched: bool) -> Any:
        return self.visit(value, is_searched) if isinstance(value, nodes.Node) else value

    def _call(self, node: nodes.Call | nodes.Filter, is_searched: bool) -> None:
        if isinstance(node, nodes.Filter):
            name, is_search = node.name, node.name in _SEARCHING_FILTERS
        else:
            name = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
            is_search = name in _SEARCHES
        if node.node is not None:
            self._each(node, is_searched, ("node",))
        if name == "replace" and node.args:
            node.args = [
                self._expression(node.args[0], True),
                *(self._expression(one, is_searched) for one in node.args[1:]),
            ]
            self._each(node, is_searched, ("kwargs", "dyn_args", "dyn_kwargs"))
        else:
            self._each(node, is_searched or is_search, ("args", "kwargs", "dyn_args", "dyn_kwargs"))

        if isinstance(node, nodes.Call) and name in _REMOVERS:
            self._unify(node)

    def _unify(self, node: nodes.Call) -> None:
        """A template may search for a mark in a text that it has joined itself: both forms of the mark are found."""
        assert isinstance(node.node, nodes.Getattr)
        for one in node.args[:1]:
            if isinstance(one, nodes.Const) and isinstance(one.value, str):
                hidden = self._names.hidden(one.value)
                if hidden != one.value:
                    replace = nodes.Getattr(node.node.node, "replace", "load", lineno=node.lineno)
                    pair: list[nodes.Expr] = [nodes.Const(hidden), nodes.Const(one.value)]
                    node.node.node = nodes.Call(replace, pair, [], None, None, lineno=node.lineno)

    def _contained(self, node: nodes.Compare) -> nodes.Expr:
        """`MARK in TEXT`, for both forms of the mark."""
        mark, [first, *others] = node.expr, node.ops
        if others or first.op not in ("in", "notin") or not isinstance(mark, nodes.Const):
            return node
        hidden = self._names.hidden(mark.value) if isinstance(mark.value, str) else mark.value
        if hidden == mark.value:
            return node
        other = nodes.Compare(nodes.Const(hidden), [nodes.Operand(first.op, first.expr)], lineno=node.lineno)
        return (nodes.Or if first.op == "in" else nodes.And)(node, other, lineno=node.lineno)

    def _variable(self, node: nodes.Name, is_searched: bool) -> nodes.Node:
        if node.ctx != "load":
            return node
        if node.name in self._tokens and not is_searched:
            return nodes.Const(self._names.hidden(self._tokens[node.name]), lineno=node.lineno)
        if node.name in self._constants and is_searched:
            return nodes.Const(self._constants[node.name], lineno=node.lineno)
        return node


def renamed_tokenizer(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json in which tokens have other names, so that it reads their own names as ordinary text.

    The model's vocabulary is renamed too: Unigram and WordLevel would find a control token there.
    """

    def name(token: str) -> str:
        return names.get(token, token)

    added = [{**one, "content": name(one["content"])} for one in tokenizer.get("added_tokens") or ()]
    model = dict(tokenizer["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {name(token): token_id for token, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[name(one[0]), *one[1:]] for one in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])
    if "merges" in model:
        model["merges"] = [one for one in model["merges"] if not _makes(one, names)]
    return {**tokenizer, "added_tokens": added, "model": model, "post_processor": None}


def _makes(merge: Any, names: Mapping[str, str]) -> bool:
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names
