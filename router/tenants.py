"""The router's tenants: the key file, which is read again when it changes. If it is invalid, the old one stays
valid."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.key_file import KeyFile, parse
from pdserve.key_file_access import FileVersion, read_bytes, version_of
from router.quotas import Quotas

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 0.5


@final
class Tenants:
    def __init__(self, path: str) -> None:
        """Without a path there is only the default tenant. Raises ConfigError if the file is invalid."""
        self._path = path
        self.quotas = Quotas()
        self.file: KeyFile | None = None
        self._tried: FileVersion | None = None  # version of the last file that was read, valid or not
        self._error = ""  # error of the last read
        if path:
            data, self._tried = read_bytes(path)
            self.file = parse(data)

    async def watch(self) -> None:
        while self._path:
            await asyncio.sleep(CHECK_EVERY_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the file again if it has changed. Reads in a thread, because a large file takes a while."""
        version = await asyncio.to_thread(version_of, self._path)
        if version is not None and version == self._tried:
            return
        try:
            # A file that cannot be opened is tried again: the reason may be this process, such as too many open files.
            data, self._tried = await asyncio.to_thread(read_bytes, self._path)
            file = await asyncio.to_thread(parse, data)
        except ConfigError as error:
            if error.message != self._error:
                self._error = error.message
                log.error("the key file is invalid; the old one stays valid", extra={"why": error.message})
            return
        self.file, self._error = file, ""
        self.quotas.forget_all_but(file.tenants)
        log.info("the key file was read", extra={"tenants": len(file.tenants), "keys": len(file.keys)})
