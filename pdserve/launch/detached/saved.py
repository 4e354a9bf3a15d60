"""What a launcher needs to take the place of another one, as JSON. It is kept in the memory of the keeper."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pdserve.core.errors import ConfigError
from pdserve.core.installation import VERSION
from pdserve.launch.keys import Settings
from pdserve.launch.report import LogLimits
from pdserve.launch.settings import Asked, SettingsSource
from pdserve.launch.spec import ClusterSpec
from router.recording.replay import decode_value, encode_value

#: Of the environment of a launcher, what belongs to its own installation. A new one may be of another.
_OF_INSTALLATION: Final = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PWD", "_")  # beside those of Python itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCluster:
    spec: ClusterSpec
    has_own_redis: bool = True
    authority: str = ""  # of the certificates that were made for this cluster
    overlay: Settings = field(default_factory=dict)  # these as of ChangingCluster
    overlays: Mapping[str, Settings] = field(default_factory=dict)
    former: Settings | None = None
    draining: tuple[str, ...] = ()  # workers that a change drains
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLauncher:
    asked: Asked = field(repr=False)  # with secrets
    source: SettingsSource
    cluster: SavedCluster = field(repr=False)
    folder: str  # in which it was started
    environ: Mapping[str, str] = field(repr=False)

    @classmethod
    def of_this(
        cls, asked: Asked, source: SettingsSource, cluster: SavedCluster, environ: Mapping[str, str]
    ) -> SavedLauncher:
        """`environ`: at its start, with the secrets."""
        kept = {name: value for name, value in environ.items() if not _is_of_installation(name)}
        return cls(asked=asked, source=source, cluster=cluster, folder=str(Path.cwd()), environ=kept)

    def restore(self) -> None:
        """Folder and environment of this process become those of the saved one. Raises ConfigError."""
        try:
            os.chdir(self.folder)
        except OSError as error:
            expected = "a folder that can be entered: the cluster was started in it, and relative paths begin there"
            raise ConfigError("folder", f"{self.folder} ({error.strerror})", expected) from None
        for name in [one for one in os.environ if not _is_of_installation(one)]:
            del os.environ[name]
        os.environ.update(self.environ)

    def to_json(self) -> dict[str, Any]:
        asked = {
            "spec": encode_value(self.asked.spec),
            "ray": self.asked.ray,
            "log_dir": None if self.asked.log_dir is None else str(self.asked.log_dir),
            "log_limits": encode_value(self.asked.log_limits),
            "log_level": self.asked.log_level,
            "is_level_given": self.asked.is_level_given,
            "own_secrets": sorted(self.asked.own_secrets),
            "orphan_s": self.asked.orphan_s,
        }
        return {
            "version": VERSION,
            "asked": asked,
            "source": {
                "flags": encode_value(self.source.flags),
                "file": self.source.file,
                "words": list(self.source.words),
                "defaults": encode_value(self.source.defaults),
            },
            "cluster": encode_value(self.cluster),
            "folder": self.folder,
            "environ": dict(self.environ),
        }

    @classmethod
    def from_json(cls, found: Any) -> SavedLauncher:
        """Raises ConfigError if another minor version has saved it, or if it is not what `to_json` returns."""
        if found is None:
            raise ConfigError("cluster", "one that is still starting", "one that is ready")
        try:
            version = str(found["version"])
            if version.split(".")[:2] != VERSION.split(".")[:2]:
                expected = f"one of the same MAJOR.MINOR version as this pdserve ({VERSION}): see docs/upgrade.md"
                raise ConfigError("cluster", f"one of pdserve {version}", expected)
            asked, source = dict(found["asked"]), found["source"]
            return cls(
                asked=Asked(
                    **{
                        **asked,
                        "spec": decode_value(ClusterSpec, asked["spec"]),
                        "log_dir": None if asked["log_dir"] is None else Path(asked["log_dir"]),
                        "log_limits": decode_value(LogLimits, asked["log_limits"]),
                        "own_secrets": frozenset(asked["own_secrets"]),
                    }
                ),
                source=SettingsSource(
                    flags={name: _as_flag(value) for name, value in source["flags"].items()},
                    file=source["file"],
                    words=tuple(source["words"]),
                    defaults=dict(source["defaults"]),
                ),
                cluster=decode_value(SavedCluster, found["cluster"]),
                folder=str(found["folder"]),
                environ={str(name): str(value) for name, value in found["environ"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                "cluster", f"a saved state that cannot be read ({error})", "one of this version"
            ) from None


def _as_flag(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_of_installation(name: str) -> bool:
    return name in _OF_INSTALLATION or name.startswith("PYTHON")
