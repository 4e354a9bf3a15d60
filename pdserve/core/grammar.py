"""The required form of an answer: a grammar of some kind, its text, and its JSON schema in one form. Pure: standard
library only.

Admission checks whether a text compiles and can be satisfied (`pdserve.structured.checker`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final
from urllib.parse import quote, unquote, urldefrag, urljoin

from pdserve.core.errors import InvalidRequest

MAX_GRAMMAR_BYTES: Final = 65_536
MAX_CHOICES: Final = 4096


def is_older_library(version: str) -> bool:
    """Whether an llguidance of this version is known to follow some schemas wrongly (`pdserve.structured.supported`).
    Empty: there is none, or its worker did not say."""
    numbers = version.split(".")[:2]
    if not all(one.isascii() and one.isdigit() and len(one) < 9 for one in numbers):
        return False
    return tuple(map(int, numbers)) < (1, 9)


class GrammarKind(Enum):
    """The values are the names of the request's fields."""

    JSON_SCHEMA = "json_schema"  # the text is the schema
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"  # the whole answer matches; Rust's syntax: no look-around, no back-references
    CHOICE = "choice"  # the text is a JSON array of the strings
    LARK = "grammar"  # Lark, as llguidance reads it


@final
@dataclass(frozen=True, slots=True)
class Grammar:
    """Raises InvalidRequest, naming the field, if the text is empty, too long or invalid for its kind."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if (self.kind is GrammarKind.JSON_OBJECT) != (not self.text):
            raise InvalidRequest(self.field, "a text" if self.text else "an empty text", "a grammar")
        if self.kind is GrammarKind.CHOICE:
            self.choices()

    @property
    def field(self) -> str:
        """The name of the request's field, for messages."""
        return self.kind.value

    def choices(self) -> list[str]:
        """The strings of a CHOICE."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(self.field, str(error), "a JSON array of strings") from None
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise InvalidRequest(self.field, "another value", "a JSON array of strings")
        if not 1 <= len(found) <= MAX_CHOICES:
            raise InvalidRequest(self.field, f"{len(found)} strings", f"1 to {MAX_CHOICES} strings")
        return found


def choice(strings: Sequence[str]) -> Grammar:
    if len(strings) > MAX_CHOICES:
        raise InvalidRequest(GrammarKind.CHOICE.value, f"{len(strings)} strings", f"1 to {MAX_CHOICES} strings")
    return Grammar(GrammarKind.CHOICE, json.dumps(list(strings), ensure_ascii=False))


# --- self-contained JSON schemas ------------------------------------------------------------------------------
# Rewrites a JSON schema of any draft as one self-contained schema of draft 2020-12.
#
# Every reference becomes a JSON pointer within the document, so that the schema can be placed inside another one. Only
# keywords that hold schemas are followed: the values of `const`, `enum`, `default` and `examples` are data, and a
# property may be named `$ref`. Nothing is fetched.

Path = tuple[str, ...]  # keys and indexes from the root


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCHEMA_KEYWORDS: Final = _words(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then "
    "unevaluatedItems unevaluatedProperties"
)
LIST_KEYWORDS: Final = _words("allOf anyOf items oneOf prefixItems")
MAP_KEYWORDS: Final = _words("$defs definitions dependencies dependentSchemas patternProperties properties")
DEFINITIONS: Final = ("$defs", "definitions")
_DRAFTS: Final = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 8}
_NEWEST: Final = 9  # 2020-12
#: The draft that introduced a keyword. An older draft ignores it.
_SINCE: Final = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 8),
    "prefixItems": 9,
}
#: Keywords that draft 7 ignores beside a reference.
_BESIDE: Final = _words(
    "additionalItems additionalProperties allOf anyOf const contains dependencies else enum exclusiveMaximum "
    "exclusiveMinimum format if items maxItems maxLength maxProperties maximum minItems minLength minProperties "
    "minimum multipleOf not oneOf pattern patternProperties properties propertyNames required then type "
    "uniqueItems"
)
MAX_NAME_CHARS: Final = 2048  # of a URI, which is repeated for each reference
MAX_POINTER_CHARS: Final = 262_144  # of all references: many short ones may lead to a place with a long name
_NAMES: Final = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$vocabulary")


@final
@dataclass(slots=True)
class PointerChars:
    """How long the references of several schemas may still become, in total."""

    left: int = MAX_POINTER_CHARS


def localized(schema: dict[str, Any], root: str = "#", chars: PointerChars | None = None) -> dict[str, Any]:
    """A copy whose references are pointers below `root`, the place where the caller puts it. They are charged to
    `chars`. Raises ValueError if a reference cannot be resolved or if they are too long, and RecursionError if the
    schema is nested too deeply."""
    document = copy.deepcopy(schema)
    _Rewriter(document, root, PointerChars() if chars is None else chars).rewrite()
    return document


def pointer(path: Path) -> str:
    """Without the leading `#`, encoded as a part of a URI (RFC 6901, section 6)."""
    return "".join("/" + quote(key.replace("~", "~0").replace("/", "~1"), safe="~!$&'()*+,;=:@") for key in path)


def resolve(document: Any, path: Path) -> Any:
    """Raises LookupError if nothing is there."""
    found = document
    for key in path:
        if isinstance(found, list):
            if not (key.isascii() and key.isdecimal()):
                raise LookupError(key)
            found = found[int(key)]
        elif isinstance(found, dict):
            found = found[key]
        else:
            raise LookupError(key)
    return found


def path_of(fragment: str) -> Path:
    """Of a JSON pointer without the leading `#` (RFC 6901)."""
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in unquote(fragment).split("/")[1:])


def subschemas(node: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas directly below a schema, with their paths from it."""
    for keyword, value in node.items():
        if keyword in MAP_KEYWORDS and isinstance(value, dict):
            # A list in `dependencies` holds names.
            yield from (((keyword, name), one) for name, one in value.items() if not isinstance(one, list))
        elif keyword in LIST_KEYWORDS and isinstance(value, list):
            yield from (((keyword, str(index)), one) for index, one in enumerate(value))
        elif keyword in SCHEMA_KEYWORDS:
            yield (keyword,), value


@final
class _Rewriter:
    def __init__(self, document: dict[str, Any], root: str, chars: PointerChars) -> None:
        self._document = document
        self._root = root
        self._chars = chars
        self._resources: dict[str, Path] = {}  # by URI without a fragment
        self._anchors: dict[str, Path] = {}  # by URI with a fragment
        self._nodes: dict[int, tuple[dict[str, Any], str, int, Path]] = {}  # with base URI and draft

    def rewrite(self) -> None:
        self._resources[""] = ()
        self._index(self._document, "", _draft(self._document, _NEWEST), ())
        pending = list(self._nodes.values())
        while pending:
            node, base, draft, _ = pending.pop()
            reference = node.get("$ref")
            if not isinstance(reference, str):
                continue
            path = self._target(reference, base)
            node["$ref"] = self._root + pointer(path)
            self._chars.left -= len(node["$ref"])
            if self._chars.left < 0:
                raise ValueError(f"the references have over {MAX_POINTER_CHARS} characters as paths; use shorter names")
            target = resolve(self._document, path)
            if isinstance(target, dict) and id(target) not in self._nodes:
                # The target is below an unknown keyword, such as `components`.
                known = len(self._nodes)
                self._index(target, base, draft, path)
                pending += list(self._nodes.values())[known:]
        for node, _, draft, _ in self._nodes.values():
            _modernize(node, draft)

    def _index(self, node: Any, base: str, draft: int, path: Path) -> None:
        if not isinstance(node, dict) or id(node) in self._nodes:
            return
        draft = _draft(node, draft)
        hides = draft <= 7 and "$ref" in node  # a reference then hides the keywords beside it
        name = node.get("id" if draft <= 4 else "$id")
        if isinstance(name, str) and not hides:
            uri, fragment = urldefrag(name)
            if uri:
                base = urljoin(base, uri)
                if len(base) > MAX_NAME_CHARS:
                    raise ValueError(f"an $id of {len(base)} characters; at most {MAX_NAME_CHARS} are supported")
                self._resources.setdefault(base, path)
            if fragment and draft <= 7:
                self._anchors.setdefault(f"{base}#{fragment}", path)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(keyword), str) and not hides:
                self._anchors.setdefault(f"{base}#{anchor}", path)
        self._nodes[id(node)] = (node, base, draft, path)
        for below, one in subschemas(node):
            self._index(one, base, draft, (*path, *below))

    def _target(self, reference: str, base: str) -> Path:
        uri, fragment = urldefrag(reference)
        uri = urljoin(base, uri) if uri else base
        start = self._resources.get(uri)
        if start is None:
            raise ValueError(f"the reference {reference!r} leads out of the schema, and nothing is fetched")
        if fragment and not fragment.startswith("/"):
            anchor = self._anchors.get(f"{uri}#{unquote(fragment)}")
            if anchor is None:
                raise ValueError(f"the reference {reference!r} leads to an anchor that does not exist")
            return anchor
        path = (*start, *path_of(fragment))
        try:
            resolve(self._document, path)
        except LookupError:
            raise ValueError(f"the reference {reference!r} leads to a place that does not exist") from None
        return path


def _draft(node: dict[str, Any], inherited: int) -> int:
    named = node.get("$schema")
    if not isinstance(named, str):
        return inherited
    return next((number for name, number in _DRAFTS.items() if f"/{name}/" in named), _NEWEST)


def _modernize(node: dict[str, Any], draft: int) -> None:
    """Keywords of older drafts in their form of 2020-12, except lists of `items`, into which references may point."""
    dropped = {keyword for keyword, since in _SINCE.items() if draft < since}
    if draft <= 7 and "$ref" in node:
        dropped |= _BESIDE
    if not isinstance(node.get("items"), list):
        dropped.add("additionalItems")
    if draft <= 4:
        dropped.add("id")
    for keyword in dropped.union(_NAMES).intersection(node):
        del node[keyword]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
            node[exclusive] = node.pop(bound)
