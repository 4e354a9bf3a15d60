"""Converts the settings of a worker, a router or a gateway to flags, and back, by one rule.

A field `kv_blocks: int` is the flag `--kv-blocks`. The launcher builds a config and starts a process with
`to_flags(config)` and `to_env(config)`; the process reads it with `parse_flags`. Nothing else reads the command line of
a worker or a router, so manifests and local clusters use the same flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.config import LOG_LEVEL_ENV, LOG_LEVELS, GatewayConfig, RouterConfig, WorkerConfig, from_env
from pdserve.core.errors import ConfigError, shortened
from pdserve.core.setting import did_you_mean, is_hidden, live_names, nearest
from pdserve.core.urls import hide_password

Config = TypeVar("Config", WorkerConfig, RouterConfig, GatewayConfig)
Value = TypeVar("Value")
FLAGS_FILE: Final = "--flags-file"
_MOST_NAMED: Final = 8  # unknown words in one message


class Parser(argparse.ArgumentParser):
    """Prints one line for a wrong command line, because a page of flags would hide the error, and suggests the nearest
    known word."""

    #: What to write instead of a flag that this program lacks, by its name without dashes in front.
    elsewhere: Mapping[str, str] = types.MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.{1,100}?)' \(choose from (.*)\)", message):
            message += did_you_mean(nearest(wrong[1], re.findall(r"[^\s',]+", wrong[2])))
        message = re.sub(r"invalid (int|float) value: (.*)", _expected_number, message, flags=re.DOTALL)
        self.exit(2, f"{self.prog}: error: {shortened(message, 2000)} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown flags are reported before missing ones: a mistyped flag is often the missing one."""
        words = list(sys.argv[1:] if args is None else args)
        own = words[: words.index("--")] if "--" in words else words
        unknown = [] if self._subparsers else [one for one in own if self._is_unknown(one)]
        if unknown:
            self.reject(unknown)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.reject(unknown)
        return found

    def reject(self, words: Sequence[str]) -> NoReturn:
        named = [shortened(one, 64) + self._suggestion(one) for one in words[:_MOST_NAMED]]
        self.error(f"unrecognized arguments: {' '.join(named)}{' ...' if len(words) > _MOST_NAMED else ''}")

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("--") and " " not in word and word.partition("=")[0] not in self._flags()

    def _suggestion(self, word: str) -> str:
        """Names are compared without their dashes, which would make short ones similar."""
        name = word.partition("=")[0].lstrip("-").replace("_", "-")
        if not word.startswith("-"):
            return ""
        if name in self.elsewhere and f"--{name}" not in self._flags():
            return f" (here: {self.elsewhere[name]})"
        if name == "model" and self.prog.startswith("pdserve ") and "--model" not in self._flags():
            return "; a cluster serves one model, chosen with `pdserve up MODEL`"
        found = nearest(name, [one[2:] for one in self._flags() if one.startswith("--")])
        return did_you_mean(found and f"--{found}")

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


class _PartParser(Parser):
    """Of a part of the flags: it leaves others to another parser."""

    parse_known_args = argparse.ArgumentParser.parse_known_args


def _expected_number(wrong: re.Match[str]) -> str:
    return f"got {wrong[2]}, expected {'a whole number' if wrong[1] == 'int' else 'a number'}"


def parse_flags(kind: type[Config], argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None) -> Config:
    """Reads flags; unknown ones end the process with a message, wrong values raise ConfigError.

    Secrets come from `environ`; None: this process's environment.
    """
    parser = Parser(prog=prog, allow_abbrev=False, parents=[log_flags(prog)])
    hints = typing.get_type_hints(kind)
    from_environ: dict[str, str] = {}
    help_lines: list[str] = []
    for one in dataclasses.fields(kind):
        flag = "--" + one.name.replace("_", "-")
        help_text = one.metadata["help"].replace("%", "%%")
        env = one.metadata["env"]
        if env:
            from_environ[one.name] = from_env(env, environ) or str(one.default)
            help_lines.append(f"{env}: {help_text}")
            if not one.metadata["is_url"]:
                continue
            help_text += f"; with a password it goes into {env}"
        required = one.default is dataclasses.MISSING
        if not required and one.default not in ("", ()):
            help_text += f" ({'on' if one.default is True else 'off' if one.default is False else one.default})"
        hint = hints[one.name]
        if hint is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=one.default, help=help_text)
        elif isinstance(hint, types.GenericAlias) and typing.get_origin(hint) is tuple:
            help_text += " (separated by spaces or commas)"
            parser.add_argument(flag, type=words, nargs="+", default=one.default, help=help_text)
        else:
            default = None if required or env else one.default
            metavar = "|".join(one.metadata["choices"]) or None
            parser.add_argument(flag, type=hint, required=required, default=default, help=help_text, metavar=metavar)
    if help_lines:
        parser.epilog = (
            f"Secrets come from the environment, or from files: {'; '.join(help_lines)}. NAME_FILE names a file of it."
        )
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    for name in ("log_level", "flags_file"):
        flags.pop(name, None)
    flags |= {name: joined(value) for name, value in flags.items() if isinstance(value, list)}
    for one in dataclasses.fields(kind):
        if one.name in flags:
            check_shown(one, flags[one.name], one.name)
    return kind(**(from_environ | flags))


def log_flags(prog: str) -> argparse.ArgumentParser:
    """The flags of a program that are no settings of its part of the cluster."""
    parser = _PartParser(prog=prog, allow_abbrev=False, add_help=False)
    parser.add_argument("--log-level", choices=LOG_LEVELS, help=f"least level to log; also in {LOG_LEVEL_ENV} (info)")
    parser.add_argument(
        FLAGS_FILE,
        metavar="FILE",
        help="file with further flags, one on each line; they override those of the command line, and are read again "
        "after SIGHUP",
    )
    return parser


def with_file(argv: Sequence[str], prog: str) -> list[str]:
    """The command line, and the flags of its FLAGS_FILE behind it. Raises ConfigError."""
    file = log_flags(prog).parse_known_args(argv)[0].flags_file
    if not file:
        return list(argv)
    lines = [line.strip() for line in read_text(file, MAX_SETTINGS_BYTES, "flags_file").splitlines()]
    flags = [line for line in lines if line and not line.startswith("#")]
    for flag in flags:
        if not flag.startswith("--") or flag.partition("=")[0] == FLAGS_FILE:
            raise ConfigError("flags_file", repr(shortened(flag)), "one flag on each line, such as --drain-s=60")
    return [*argv, *flags]


def live_flags(config: WorkerConfig | RouterConfig | GatewayConfig) -> list[str]:
    """Flags of all settings that a running process takes new values of."""
    values = {name: getattr(config, name) for name in live_names(type(config))}
    return [f"--{name.replace('_', '-')}={_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def check_shown(one: dataclasses.Field[Any], value: Any, name: str) -> None:
    """Raises ConfigError if `value` came from a command line and is a secret."""
    if is_hidden(one, str(value)):
        env = one.metadata["env"]
        expected = f"no secret on a command line, which others can read: set {env}, or name its file in {env}_FILE"
        raise ConfigError(name, hide_password(str(value)) if one.metadata["is_url"] else "a secret", expected)


def to_flags(config: WorkerConfig | RouterConfig | GatewayConfig) -> list[str]:
    """The flags from which, together with `to_env`, parse_flags makes an equal config; defaults are left out."""
    flags: list[str] = []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if value == one.default or is_hidden(one, str(value)):
            continue
        flag = "--" + one.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            flags.append(f"{flag}={_shown(value)}")
    return flags


def to_env(config: WorkerConfig | RouterConfig | GatewayConfig) -> dict[str, str]:
    """The environment variables for values that must not be on a command line."""
    values = ((one, getattr(config, one.name)) for one in dataclasses.fields(config))
    return {one.metadata["env"]: value for one, value in values if value and is_hidden(one, str(value))}


def read_as(read: Callable[[str], Value], expected: str) -> Callable[[str], Value]:
    """A `type` for argparse whose error says what is allowed. Argparse would name the function."""

    def checked(text: str) -> Value:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {shortened(repr(text))}, expected {expected}") from None

    return checked


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def joined(values: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The value of a flag that takes several arguments, each of which `words` has read."""
    return tuple(word for value in values for word in value)
