"""A CA and certificate files for tests and benchmarks. Real ones: they are not valid for long, or no longer valid."""

from __future__ import annotations

import datetime
from pathlib import Path

from pdserve.core.setting import CA, CERT, KEY
from pdserve.tls.authority import Authority, write_private
from pdserve.tls.certificates import ReloadingCertificates, TlsFiles

LOCAL = ("127.0.0.1", "localhost")
DAY = datetime.timedelta(days=1)


class TestAuthority:
    """Writes a folder of files for each process."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "test CA") -> None:
        self.folder = folder
        self.authority = Authority(name, valid=DAY)
        self.ca = folder / "authority.crt"
        folder.mkdir(parents=True, exist_ok=True)
        write_private(self.ca, self.authority.pem)

    def files(self, name: str, hosts: tuple[str, ...] = LOCAL, valid: datetime.timedelta = DAY) -> TlsFiles:
        """New files for the process `name`; earlier ones are replaced."""
        self.authority.write(self.folder / name, name, hosts, valid=valid)
        return files_in(self.folder / name)

    def settings(self, name: str, hosts: tuple[str, ...] = LOCAL, valid: datetime.timedelta = DAY) -> dict[str, str]:
        """For a process's config."""
        files = self.files(name, hosts, valid)
        return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}

    def tls(self, name: str, hosts: tuple[str, ...] = LOCAL) -> ReloadingCertificates:
        return ReloadingCertificates(self.files(name, hosts), is_mutual=True)


def files_in(folder: Path) -> TlsFiles:
    return TlsFiles(cert=str(folder / CERT), key=str(folder / KEY), ca=str(folder / CA))
