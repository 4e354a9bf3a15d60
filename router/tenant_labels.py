"""The values of the label `tenant` in metrics. Their number is limited, because each costs memory here and in
Prometheus. Pure.

The first tenants to call get labels of their own, for as long as the router runs; later ones share `other`.
"""

from __future__ import annotations

from typing import Final, final

from pdserve.core.key_file import RESERVED_NAMES

DEFAULT_LABEL: Final = RESERVED_NAMES[0]
OTHER_LABEL: Final = RESERVED_NAMES[1]


@final
class TenantLabels:
    def __init__(self, most: int) -> None:
        """`most` tenants get labels of their own, beside the default tenant."""
        self._most = most
        self._labelled: set[str] = set()

    def of(self, tenant: str) -> str:
        if not tenant:
            return DEFAULT_LABEL
        if tenant not in self._labelled:
            if len(self._labelled) >= self._most:
                return OTHER_LABEL
            self._labelled.add(tenant)
        return tenant
