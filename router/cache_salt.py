"""The salt of a request's block hashes: requests with different salts never share a cached prefix. Pure.

The salt is derived from the tenant and from the salt that the request itself may have. Without either, it is empty. The
cluster's secret is the key of the derivation, so block hashes in Redis or in a recording cannot be compared with the
hashes of a guessed prompt. All routers of a cluster compute the same salt.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.proof import ClusterSecret

MAX_SALT_CHARS: Final = 256


def cache_salt(secret: ClusterSecret | None, tenant: str, given: str | None) -> bytes:
    """32 bytes, or empty for a request of the default tenant without a salt. Raises InvalidRequest."""
    if given is not None and not 1 <= len(given) <= MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"{len(given)} characters", f"1 to {MAX_SALT_CHARS} characters")
    if not tenant and given is None:
        return b""
    assert secret is not None
    return secret.mac("cache salt", tenant, given or "")
