"""The TLS files of a cluster's processes: an operator's, or made for this start. Pure: no file is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.core.tls_settings import AUTO
from pdserve.tls.names import CA, CERT, KEY

CALLERS: Final = ("router", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTls:
    """`folder` holds CERT, KEY and CA. If the launcher made it, each process has a folder of its own in it, with its
    own certificate and key."""

    folder: str
    is_made_here: bool = False
    peer_name: str = ""  # name in the operator's certificate; empty: it is valid for the addresses that are called
    client_ca: str = ""

    @classmethod
    def asked(cls, value: str, client_ca: str) -> ClusterTls:
        return cls(folder=value, is_made_here=value == AUTO, client_ca=client_ca)

    @property
    def ca(self) -> str:
        return str(Path(self.folder, CA))

    def of(self, process: str) -> dict[str, str]:
        """The settings of a process."""
        folder = Path(self.folder, process) if self.is_made_here else Path(self.folder)
        found = {"tls_cert": str(folder / CERT), "tls_key": str(folder / KEY), "tls_ca": str(folder / CA)}
        if self.peer_name:
            found["tls_peer_name"] = self.peer_name
        if process == "gateway":  # its tls_cert may be one of a public CA, which the router does not accept
            found |= {"router_cert": found["tls_cert"], "router_key": found["tls_key"]}
        if self.client_ca and process in CALLERS:
            found["tls_client_ca"] = self.client_ca
        return found
