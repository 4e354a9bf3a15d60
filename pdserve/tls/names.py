"""The files of a process's certificates, as a Kubernetes secret of type kubernetes.io/tls names them. Pure."""

from __future__ import annotations

from typing import Final

CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
