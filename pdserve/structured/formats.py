"""Patterns of the string formats that are enforced. A value of a format matches all patterns of it. Pure.

They are narrower than the RFCs where strict readers are: what `datetime.fromisoformat`, `ipaddress`, `uuid`,
email-validator or a URL parser rejects is not generated. Regexes are Rust's, without look-around, so that a condition
on the length of a part is a pattern of its own.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Final

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
