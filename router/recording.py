"""Writes what a live router did to a file that router.replay reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TextIO, final

from pdserve.core.errors import ConfigError
from router import replay
from router.commands import Command
from router.events import Event
from router.settings import RouterSettings

FLUSH_EVERY: Final = 256  # steps


@final
class RecordFile:
    def __init__(self, path: str, settings: RouterSettings) -> None:
        """Raises ConfigError when the file cannot be written. An older recording of that name is replaced."""
        try:
            self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError("record", path, f"a file that can be written ({error.strerror})") from error
        self._file.write(replay.encode_settings(settings) + "\n")
        self._unflushed = 0

    def step(self, now_s: float, event: Event, commands: list[Command]) -> None:
        self._file.write(replay.encode_step(replay.make_step(now_s, event, commands)) + "\n")
        self._unflushed += 1
        if self._unflushed >= FLUSH_EVERY:
            self._file.flush()
            self._unflushed = 0

    def close(self) -> None:
        self._file.close()
