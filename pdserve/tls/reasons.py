"""Why a TLS connection failed, in words for the caller. Pure."""

from __future__ import annotations

import re
from typing import Final

_CLOSED: Final = "it closed the connection; it may require TLS, or a client certificate"
UNKNOWN_CA: Final = "its certificate is not from a CA that this side trusts"
# Texts of BoringSSL within gRPC, and of OpenSSL within Python.
_REASONS: Final = (
    (r"certificate has expired", "its certificate has expired"),
    (r"certificate is not yet valid", "its certificate is not valid yet"),
    (
        r"unable to get (?:local )?issuer certificate|self[- ]signed certificate",
        UNKNOWN_CA,
    ),
    (
        r"Hostname Verification Check failed|Hostname mismatch|IP address mismatch|certificate is not valid for",
        "its certificate is for another host name",
    ),
    (r"CERTIFICATE_REQUIRED|certificate required", "it requires a client certificate"),
    (r"UNKNOWN_CA|unknown ca", "it does not trust the CA of this side's certificate"),
    (r"CERTIFICATE_EXPIRED|certificate expired", "this side's certificate has expired"),
    (r"WRONG_VERSION_NUMBER|wrong version number|record layer failure", "it does not speak TLS"),
    (r"CERTIFICATE_VERIFY_FAILED: *(?P<why>[\w ,-]+)", "its certificate was not accepted"),
)


def tls_failure(text: str) -> str:
    """What was wrong with the other side; empty if `text` is not about TLS."""
    for pattern, reason in _REASONS:
        if found := re.search(pattern, text):
            why = found.groupdict().get("why")
            return f"{reason}: {why}" if why else reason
    return ""


def connection_failure(text: str) -> str:
    """Like `tls_failure`, for an attempt that ended before anything was received; empty if there is no reason to think
    of TLS."""
    return tls_failure(text) or (_CLOSED if re.search(r"Socket closed|Connection reset|recvmsg", text) else "")
