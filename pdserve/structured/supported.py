"""Converts a JSON schema to one of the keywords that the compiler enforces, or names what it does not. Pure.

Each keyword of 2020-12 and of the older drafts belongs to one of four classes:
- enforced by the compiler, or by a rewrite here (`format`, `unevaluatedProperties: false` without siblings);
- an annotation, which is ignored, as are unknown keywords;
- a keyword that can be without effect (`uniqueItems: false`), which is then removed;
- everything else, which raises ValueError with the keyword and its place.

Documents that the compiler would accept although they break the schema are refused too: a minimum of properties that
repeated names could reach, and integers that a float does not hold.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, NoReturn, TypeGuard, final

from pdserve.core.errors import shortened
from pdserve.core.grammar import DEFINITIONS, Path, localized, path_of, pointer, resolve, subschemas

# --- string formats -------------------------------------------------------------------------------------------
# The patterns of the formats that are enforced. A value of a format matches all patterns of it.
#
# They are narrower than the RFCs where strict readers are: what `datetime.fromisoformat`, `ipaddress`, `uuid`,
# email-validator or a URL parser rejects is not generated. Regexes are Rust's, without look-around, so that a condition
# on the length of a part is a pattern of its own.

# Names that a public address must not end in (RFC 2606, 6761, 6762, 7686, 8375).
_RESERVED: Final = ("alt", "arpa", "internal", "invalid", "local", "localhost", "onion", "test")


_TAIL: Final = "[a-zA-Z]{0,22}"  # no scheme and no last part of a host name is longer


def _without(words: Sequence[str]) -> str:
    """Matches letters, at least one, except the lower-case words in any case of their letters."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    free = "".join(letter for letter in string.ascii_lowercase if letter not in rests)
    options = [f"[{free}{free.upper()}]{_TAIL}"]
    for first, ends in sorted(rests.items()):
        longer = _without([one for one in ends if one])
        options.append(f"[{first}{first.upper()}](?:{longer}){'' if '' in ends else '?'}")  # '': a word ends here
    return "|".join(options)


_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"
_COUNT: Final = "[0-9]{1,6}"  # a duration of more does not fit into timedelta
_HOURS: Final = f"(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS: Final = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
# Full, or with `::` for at least one group: k groups before it, and at most 7 - k after it.
_IPV6: Final = "|".join(
    (
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?",
        *(
            f"{_GROUP}(?::{_GROUP}){{{before - 1}}}::(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
            for before in range(1, 7)
        ),
        f"{_GROUP}(?::{_GROUP}){{6}}::",
    )
)
# At most 63 characters, without `--`, which internationalized names reserve.
_LABEL: Final = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}"
_LAST_LABEL: Final = "[a-zA-Z](?:-?[a-zA-Z0-9]){0,31}"
_HOSTNAME: Final = rf"(?:{_LABEL}\.)*{_LAST_LABEL}"
_ATOM: Final = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_ESCAPED: Final = "%[0-9a-fA-F]{2}"
_USER: Final = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|{_ESCAPED})*"
_SEGMENT_CHAR: Final = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|{_ESCAPED})"
_QUERY: Final = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|{_ESCAPED})*"
_PORT: Final = "(?:[0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST: Final = rf"(?:{_HOSTNAME}|{_IPV4}|\[(?:{_IPV6})\])"
# URL parsers require an authority after these schemes.
_OTHER_SCHEME: Final = rf"(?:{_without(('file', 'ftp', 'http', 'https', 'ws', 'wss'))})"
_PATH: Final = f"(?:/{_SEGMENT_CHAR}*)*"

_PATTERNS: Final = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}T{_TIME}",),
    "duration": (f"P(?:{_DAYS}(?:T{_HOURS})?|T{_HOURS}|{_COUNT}W)",),
    "email": (
        rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+(?:{_without(_RESERVED)})",
        "[^@]{1,64}@[^@]{4,189}",
    ),
    "hostname": (_HOSTNAME, "[^@]{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uuid": ("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",),
    "uri": (
        f"(?:[a-zA-Z][a-zA-Z0-9+.-]{{0,22}}://(?:{_USER}@)?{_HOST}(?::{_PORT})?{_PATH}"
        f"|(?:[fF][iI][lL][eE]):///(?:{_SEGMENT_CHAR}+{_PATH})?"
        rf"|{_OTHER_SCHEME}:(?:/(?:{_SEGMENT_CHAR}+{_PATH})?|{_SEGMENT_CHAR}+{_PATH}))"
        rf"(?:\?{_QUERY})?(?:#{_QUERY})?",
    ),
}
#: By the name of the format: patterns of the whole value.
FORMATS: Final = {name: tuple(f"^(?:{one})$" for one in patterns) for name, patterns in _PATTERNS.items()}


# --- conversion of a schema -----------------------------------------------------------------------------------

_NEVER: Final = ("$dynamicRef", "$recursiveRef")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_ANNOTATIONS: Final = ("$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_CONTENT: Final = ("contentEncoding", "contentMediaType", "contentSchema")
#: Control characters without a short escape, which the compiler writes nowhere but in listed names.
_UNSPELLABLE: Final = frozenset(map(chr, (*range(32), 127))) - frozenset("\b\t\n\f\r")
EXACT_DIGITS: Final = 15  # a decimal number of so many digits is one float, and the float is that number again


Rule = Callable[[dict[str, Any], Path], None]  # changes a schema at its place, or raises ValueError


def supported(schema: dict[str, Any], *, has_older_compiler: bool = False) -> dict[str, Any]:
    """Raises ValueError, which names the keyword, its place and what is possible, or RecursionError.

    `has_older_compiler`: also of what the compiler is known to get wrong before its version 1.9.
    """
    rules = (*_OF_OLDER, *_REWRITES) if has_older_compiler else _REWRITES
    return _Simplifier(localized(schema), rules).root()


@final
class _Simplifier:
    def __init__(self, document: dict[str, Any], rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._document: dict[str, Any] = {"": document}  # so that the root has a place, like every other schema
        self._pending: list[Path] = [("",)]
        self._seen: dict[Path, dict[str, Any]] = {}

    def root(self) -> dict[str, Any]:
        while self._pending:
            path = self._pending.pop()
            try:
                parent = resolve(self._document, path[:-1])
                key = int(path[-1]) if isinstance(parent, list) else path[-1]
                parent[key] = self._simplified(parent[key], path)
            except LookupError:
                raise _lost(path) from None
        for path, node in self._seen.items():
            self._check_min_properties(node, path)
        found = self._document[""]
        if found is False:
            raise ValueError('Unsatisfiable schema: "not" at # excludes every document')
        return found if isinstance(found, dict) else {}

    def _simplified(self, node: Any, path: Path) -> Any:
        if not isinstance(node, dict) or path in self._seen:
            return node
        self._seen[path] = node
        if isinstance(reference := node.get("$ref"), str):
            self._pending.append(("", *path_of(reference[1:])))
        for keyword in (*_ANNOTATIONS, *_CONTENT, *_without_effect(node)):
            node.pop(keyword, None)
        for below, one in list(subschemas(node)):
            if below[0] not in DEFINITIONS:
                parent = resolve(node, below[:-1])
                key = int(below[-1]) if isinstance(parent, list) else below[-1]
                parent[key] = self._simplified(one, (*path, *below))
        for keyword in _NEVER:
            if keyword in node:
                _refuse(keyword, path, "$ref is followed instead")
        if _is_true(node.get("not", False)):
            return False
        for rule in self._rules:
            rule(node, path)
        return node

    def _check_min_properties(self, node: dict[str, Any], path: Path) -> None:
        """The compiler counts a name that is repeated, and only names that the schema lists cannot be repeated."""
        least = node.get("minProperties")
        if not isinstance(least, int) or least < 2 or "const" in node or "enum" in node:
            return
        kinds = node.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            return
        required: set[str] = set()
        is_closed = self._collect(node, required, set())
        if not is_closed and least > len(required) + 1:
            expected = "at most one more than the `required` names, or no names beside `properties`"
            _refuse("minProperties", path, f"{least} here, where a free name could be counted twice; {expected}")

    def _collect(self, node: Any, required: set[str], visited: set[int]) -> bool:
        """Adds the names that every document has. True if the schema admits no names but those that it lists."""
        if not isinstance(node, dict) or id(node) in visited:
            return False
        visited.add(id(node))
        required |= _names(node.get("required"))
        patterns = node.get("patternProperties")
        is_closed = node.get("additionalProperties") is False and not any(
            one is not False for one in (patterns.values() if isinstance(patterns, dict) else ())
        )
        parts = list(node["allOf"]) if isinstance(node.get("allOf"), list) else []
        if isinstance(reference := node.get("$ref"), str):
            try:
                parts.append(resolve(self._document, path := ("", *path_of(reference[1:]))))
            except LookupError:
                raise _lost(path) from None
        return any([is_closed, *(self._collect(one, required, visited) for one in parts)])


def _refuse(keyword: str, path: Path, why: str = "remove it, or check it in the answer") -> NoReturn:
    raise ValueError(f'"{keyword}" at #{pointer(path[1:])} is not supported: {why}')


def _lost(path: Path) -> ValueError:
    return ValueError(f"the reference to #{pointer(path[1:])} leads into a keyword without effect")


def _names(value: object) -> set[str]:
    return {one for one in value if isinstance(one, str)} if isinstance(value, list) else set()


def _without_effect(node: dict[str, Any]) -> list[str]:
    """Keywords that say nothing without another one."""
    found = [] if "if" in node else ["then", "else"]
    if "contains" not in node:
        found += ["minContains", "maxContains"]
    elif node.get("minContains") == 0 and "maxContains" not in node:
        found += ["contains", "minContains"]
    return found


def _is_true(schema: object) -> bool:
    return schema is True or schema == {}


def _drop_true(node: dict[str, Any], keyword: str) -> None:
    if keyword in node and _is_true(node[keyword]):
        del node[keyword]


def _types(node: dict[str, Any], path: Path) -> None:
    given = node.get("type", [])
    for one in given if isinstance(given, list) else [given]:
        if one not in _TYPES:
            raise ValueError(
                f'"type" at #{pointer(path[1:])} is {shortened(repr(one), 64)}; it is one of {", ".join(_TYPES)}'
            )


def _formats(node: dict[str, Any], path: Path) -> None:
    patterns = FORMATS.get(name, ()) if isinstance(name := node.pop("format", None), str) else ()
    if patterns:
        _and(node, *({"pattern": one} for one in patterns))


def _and(node: dict[str, Any], *schemas: dict[str, Any]) -> None:
    parts = node.get("allOf", [])
    node["allOf"] = [*(parts if isinstance(parts, list) else []), *schemas]


def _conditions(node: dict[str, Any], path: Path) -> None:
    _drop_true(node, "then")
    _drop_true(node, "else")
    if "then" not in node and "else" not in node:
        node.pop("if", None)
    elif _is_true(node["if"]) or node["if"] is False:
        taken, other = ("then", "else") if node.pop("if") is not False else ("else", "then")
        node.pop(other, None)
        if taken in node:
            _and(node, node.pop(taken))
    else:
        _refuse("if", path)
    if node.get("not") is False:
        del node["not"]
    elif "not" in node:
        _refuse("not", path)


def _arrays(node: dict[str, Any], path: Path) -> None:
    most = node.get("maxItems")
    if not node.get("uniqueItems") or (isinstance(most, int) and most <= 1):
        node.pop("uniqueItems", None)
    else:
        _refuse("uniqueItems", path)
    least, most = node.pop("minContains", 1), node.pop("maxContains", None)
    contained = node.pop("contains", None)
    if contained is None or (least == 0 and contained is False):
        return
    if not _is_true(contained):
        _refuse("contains", path)
    parts: dict[str, Any] = {"minItems": least}
    _and(node, parts if most is None else parts | {"maxItems": most})


def _objects(node: dict[str, Any], path: Path) -> None:
    if (names := node.get("propertyNames")) in ({"type": "string"}, {"type": ["string"]}) or _is_true(names):
        node.pop("propertyNames", None)
    elif "propertyNames" in node:
        _refuse("propertyNames", path)
    required = _names(node.get("required"))
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        entries = node.pop(keyword, {})
        rest = entries.values() if isinstance(entries, Mapping) else [entries]
        if not all(required >= _names(one) if isinstance(one, list) else _is_true(one) for one in rest):
            _refuse(keyword, path)


def _unevaluated(node: dict[str, Any], path: Path) -> None:
    """Without in-place applicators, nothing but the keywords beside it evaluates a property or an item."""
    for keyword, beside in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword not in node:
            continue
        schema = node.pop(keyword)
        if _is_true(schema) or (beside in node and not isinstance(node[beside], list)):
            continue
        if any(one in node for one in _IN_PLACE):
            _refuse(keyword, path)
        node[beside if not isinstance(node.get(beside), list) else "additionalItems"] = schema


def _counts(node: dict[str, Any], path: Path) -> None:
    for keyword in _COUNTS:
        if isinstance(count := node.get(keyword), float) and count.is_integer():
            node[keyword] = int(count)


def _bounds(node: dict[str, Any], path: Path) -> None:
    """The compiler reads bounds as floats, and takes an exclusive 4 for an inclusive one if the other bound is below
    5. So a bound of too many digits is moved inward to one that it reads exactly, and an exclusive one by one more
    unit of the last digit."""
    for keyword, rounding in (("Minimum", ROUND_CEILING), ("Maximum", ROUND_FLOOR)):
        inclusive, exclusive = keyword.lower(), f"exclusive{keyword}"
        if _is_number(bound := node.get(inclusive)) and not _is_exact(bound):
            node[inclusive] = _plain(_rounded(bound, rounding))
        bound = node.get(exclusive)
        if not _is_number(bound) or (node.get("type") == "integer" and _is_exact(bound)):
            continue
        at = _rounded(bound, rounding)
        if at == Decimal(repr(bound)):
            unit = Decimal(1).scaleb(max(at.adjusted(), 0) - EXACT_DIGITS + 1)
            at = _rounded(at + unit if keyword == "Minimum" else at - unit, rounding)
        del node[exclusive]
        beside = node.get(inclusive)
        widest = (max if keyword == "Minimum" else min)(at, Decimal(repr(beside)) if _is_number(beside) else at)
        node[inclusive] = _plain(widest)


def _values(node: dict[str, Any], path: Path) -> None:
    values = one if isinstance(one := node.get("enum"), list) else []
    for keyword, value in [("const", node.get("const")), *(("enum", one) for one in values)]:
        if why := _inexpressible(value):
            _refuse(keyword, path, why)


def _inexpressible(value: object) -> str:
    """Why the compiler cannot write the value exactly; empty if it can."""
    if isinstance(value, list):
        return next(filter(None, map(_inexpressible, value)), "")
    if isinstance(value, dict):
        return next(filter(None, map(_inexpressible, value.values())), "")
    if _is_number(value) and not _is_exact(value):
        return f"a number of over {EXACT_DIGITS} digits or an exponent beyond 22"
    if isinstance(value, str) and not _UNSPELLABLE.isdisjoint(value):
        return "a control character that has no short escape"
    return ""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    """Whether every reader takes the decimal number for the same float."""
    if isinstance(value, int) and abs(value) <= 2**53:
        return True
    digits, exponent = Decimal(repr(value)).normalize().as_tuple()[1:]
    return len(digits) <= EXACT_DIGITS and isinstance(exponent, int) and abs(exponent) <= 22


def _rounded(value: float | Decimal, rounding: str) -> Decimal:
    number = value if isinstance(value, Decimal) else Decimal(repr(value))
    return Context(prec=EXACT_DIGITS, rounding=rounding).plus(number)


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() and abs(value) <= 2**53 else float(value)


def _multiples(node: dict[str, Any], path: Path) -> None:
    """An older compiler finds no negative multiple."""
    least = [node[name] for name in ("minimum", "exclusiveMinimum") if _is_number(node.get(name))]
    if "multipleOf" in node and max(least, default=-1) < 0:
        _refuse("multipleOf", path, 'a worker\'s llguidance, before 1.9, needs a "minimum" of at least 0 beside it')


def _free_names(node: dict[str, Any], path: Path) -> None:
    """An older compiler lets a free name spell a listed one with an escape, so that it has two values."""
    for keyword in ("patternProperties", "additionalProperties"):
        if node.get(keyword) and node.get("properties"):
            why = 'a worker\'s llguidance, before 1.9, tells no free name from those in "properties"; '
            _refuse(keyword, path, why + 'put "additionalProperties": false')


_OF_OLDER: Final[tuple[Rule, ...]] = (_multiples, _free_names)
_REWRITES: Final[tuple[Rule, ...]] = (
    _types,
    _conditions,
    _arrays,
    _objects,
    _unevaluated,
    _formats,
    _counts,
    _bounds,
    _values,
)
