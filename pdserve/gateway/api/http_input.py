"""What an HTTP request says before its fields are known: its headers, and its body as JSON. Pure."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import jiter

from pdserve.core.access.hosts import is_token
from pdserve.core.errors import InvalidRequest, Unauthenticated, shortened
from pdserve.core.types import MAX_SESSION_ID_CHARS
from pdserve.telemetry import trace_context

if TYPE_CHECKING:
    from pdserve.client.options import Options

REQUEST_ID: Final = "x-request-id"
SESSION_ID: Final = "x-session-id"
#: In which clients say what session a request belongs to. The first one counts; of the others, the first valid one.
SESSION_IDS: Final = (
    SESSION_ID,
    "x-claude-code-session-id",
    "session-id",  # Codex
    "session_id",  # Codex before, and clients that follow it
    "x-session-affinity",  # OpenCode, Crush
    "x-opencode-session",
)
API_KEY: Final = "x-api-key"
IGNORED: Final = "x-pdserve-ignored"  # of an answer: parts of its request that had no effect
TARGETS: Final[Mapping[str, str]] = {"x-slo-ttft-ms": "ttft_s", "x-slo-tpot-ms": "tpot_s"}
SLO_TASK_S: Final = "x-slo-task-s"
REUSE_WITHIN_S: Final = "x-reuse-within-s"
EXPECTED_TOKENS: Final = "x-expected-output-tokens"
_SCHEME: Final = "bearer "


def bearer_token(authorization: str | None) -> str | None:
    """The token; None without the header, or if it is empty, as clients without a key send it (lm-evaluation-harness).
    Raises Unauthenticated if the header has no bearer token."""
    if authorization is None or authorization.strip().lower() == "bearer":
        return None
    token = authorization[len(_SCHEME) :].strip()
    is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
    if not is_bearer or not is_token(token):
        raise Unauthenticated("no bearer token in the authorization header")
    return token


def token_of(headers: Mapping[str, str]) -> str | None:
    """The caller's token: OpenAI's clients send it as a bearer token, and Anthropic's as `x-api-key`. None without
    either. Raises Unauthenticated."""
    token = bearer_token(headers.get("authorization"))
    if token is not None:
        return token
    key = headers.get(API_KEY, "")
    if key and not is_token(key):
        raise Unauthenticated(f"no token in the header {API_KEY}")
    return key or None


def foreign(headers: Mapping[str, str], scheme: str = "http") -> str:
    """Why the call may come from a page of another site in a browser on this host; empty if there is no such sign."""
    host = headers.get("host", "")
    if not is_own_host(host):
        return f"the call is for the name {shortened(repr(host))}"
    # Browsers also send both headers to loopback addresses. A page of the same site may have another port or scheme.
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none").lower()
    if site not in ("none", "same-origin"):
        return "the call comes from a page of another origin"
    if origin is None:
        return ""
    given = _origin(*origin.lower().partition("://")[::2])
    # The browser knows the address of its page. This process does not know it behind a proxy that ends TLS or changes
    # the host. No page can set `sec-fetch-site`; an origin without a host (null) is never that of a page of ours.
    is_own = bool(given[1]) if site == "same-origin" else given == _origin(scheme, host.lower())
    return "" if is_own else f"the call comes from a page of another origin, {shortened(repr(origin))}"


def _origin(scheme: str, host: str) -> tuple[str, str]:
    """Without the port that the scheme implies."""
    return scheme, host.removesuffix({"http": ":80", "https": ":443"}.get(scheme, " "))


def is_own_host(host: str) -> bool:
    """Whether the Host header is an address, or a name that nobody can register.

    The owner of any other name can let it resolve to 127.0.0.1. A browser then lets the pages of that name read what
    this port answers (DNS rebinding).
    """
    name = (host if host.endswith("]") else host.rpartition(":")[0] or host).strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True


def options(headers: Mapping[str, str]) -> Options:
    """Raises InvalidRequest. A malformed traceparent is ignored, as W3C's rules ask. So is a malformed session in a
    client's own header, which was not made for this server."""
    found: dict[str, Any] = {}
    if REQUEST_ID in headers:
        found["request_id"] = _text(REQUEST_ID, headers[REQUEST_ID])
    if SESSION_ID in headers:
        found["session_id"] = _text(SESSION_ID, headers[SESSION_ID])
    elif (header := next((one for one in SESSION_IDS if _is_session(headers.get(one, ""))), None)) is not None:
        found["session_id"] = _text(header, headers[header])
    targets = {
        name: _number(header, headers[header], "a number of milliseconds") / 1000.0
        for header, name in TARGETS.items()
        if header in headers
    }
    if targets:
        found["slo"] = targets
    for header, name in ((SLO_TASK_S, "slo_task_s"), (REUSE_WITHIN_S, "reuse_within_s")):
        if header in headers:
            found[name] = _number(header, headers[header], "a number of seconds")
    if EXPECTED_TOKENS in headers:
        found["expected_output_tokens"] = _whole(EXPECTED_TOKENS, headers[EXPECTED_TOKENS])
    traceparent = headers.get(trace_context.HEADER)
    if trace_context.parse(traceparent) is not None:
        found["traceparent"] = traceparent
    return cast("Options", found)


def _is_session(value: str) -> bool:
    try:
        text = _text(SESSION_ID, value)
    except InvalidRequest:
        return False
    return 0 < len(text) <= MAX_SESSION_ID_CHARS and text.isprintable()


def _text(header: str, value: str) -> str:
    """ASGI's headers are bytes, which Starlette reads as Latin-1. Ids are UTF-8, as the answer's header is."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidRequest(header, shortened(repr(value)), "text in UTF-8") from None


def _number(header: str, value: str, expected: str) -> float:
    try:
        number = float(value[:32])
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or len(value) > 32:
        raise InvalidRequest(header, shortened(repr(value)), expected)
    return number


def _whole(header: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise InvalidRequest(header, shortened(repr(value)), "a number of tokens of at most 9 digits")
    return int(value)


# --- body -----------------------------------------------------------------------------------------------------
# The number of objects, arrays, names and items is limited before the parser runs, because each costs far more than its
# bytes. The parser rejects nesting over 200 levels while it reads, before an object exists. The length of a number is
# limited because the time to write an integer grows with the square of its digits.

MAX_PARTS: Final = 65_536  # objects, arrays and names of a body
MAX_ITEMS: Final = 262_144  # commas of a body, which separate numbers and texts too; more in a longer context
MAX_TEXTS: Final = 131_072
MAX_DIGITS: Final = 300  # of a number, in a row; the largest float has 309
_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_LONG: Final = b"0" * (MAX_DIGITS + 1)
_KINDS: Final = {list: "an array", dict: "an object", str: "a string", type(None): "null"}
_DUPLICATE: Final = re.compile(r'Detected duplicate key (".*") at line \d+ column \d+', re.DOTALL)


def parse(body: bytes, context_tokens: int = 0) -> dict[str, Any]:
    """`context_tokens`: of the model, because a prompt may have as many token ids.

    Raises InvalidRequest. Fields that are null count as absent, as in OpenAI's API. A name that an object has twice is
    rejected, because other parsers on the way may read the other value.
    """
    _check_parts(body, max(MAX_ITEMS, context_tokens + MAX_PARTS))
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except (ValueError, RecursionError) as error:
        text = str(error)
        if twice := _DUPLICATE.fullmatch(text):
            raise InvalidRequest("body", f"twice the name {shortened(twice[1], 128)}", "each name once") from None
        raise InvalidRequest("body", "a body that does not parse", f"JSON in UTF-8 ({shortened(text)})") from None
    if not isinstance(found, dict):
        raise InvalidRequest("body", summarised(found), "a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def summarised(value: object) -> str:
    """A value in a message: numbers are repeated, and texts are not, because they may be prompts."""
    if value is True or value is False:
        return str(value).lower()
    return _KINDS.get(type(value)) or shortened(value)


def _check_parts(body: bytes, max_items: int) -> None:
    """Counts the marks of parts: first everywhere, which is enough for almost all bodies, and then outside of texts."""
    are_few = _num_marks(body) <= MAX_PARTS and body.count(b",") <= max_items and body.count(b'"') <= 2 * MAX_TEXTS
    if are_few and not _has_digits(body):
        return
    num_texts, outside = _texts(body)
    if num_texts > MAX_TEXTS:
        raise InvalidRequest("body", f"{num_texts} texts", f"at most {MAX_TEXTS} texts")
    num_parts, num_items = _num_marks(outside), outside.count(b",")
    if num_parts > MAX_PARTS:
        raise InvalidRequest("body", f"{num_parts} objects, arrays and names", f"at most {MAX_PARTS} of them")
    if num_items > max_items:
        raise InvalidRequest("body", f"{num_items} items", f"at most {max_items} of them")
    if _has_digits(outside):
        raise InvalidRequest("body", f"a number of over {MAX_DIGITS} digits", f"at most {MAX_DIGITS} digits")


def has_long_number(text: bytes) -> bool:
    """Whether JSON has a number of over MAX_DIGITS digits."""
    return _has_digits(text) and _has_digits(_texts(text)[1])


def _has_digits(data: bytes) -> bool:
    """In a time that grows with the length alone, unlike that of a regular expression's search."""
    return _TOO_LONG in data.translate(_AS_ZEROS)


def _texts(body: bytes) -> tuple[int, bytes]:
    """The number of texts, and what is outside of them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that each quote begins or ends a text
    return plain.count(b'"') // 2, b'"'.join(plain.split(b'"')[::2])


def _num_marks(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")
