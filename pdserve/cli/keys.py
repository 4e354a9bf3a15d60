"""`pdserve keys`: makes, lists and revokes the keys of tenants in a key file. A running router reads the change."""

from __future__ import annotations

import argparse
import datetime
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pdserve.core.access.key_file import KEY_RANDOM_BYTES, check_tenant_name, key_hash, load, make_key, read
from pdserve.core.errors import ConfigError, NotFound
from pdserve.key_file_access import locked, read_bytes, replace

HELP = "make, list and revoke the keys of tenants"
DEFAULT_FILE: Final = "keys.json"
ID_CHARS: Final = 12  # of a key's hash; they name the key
_QUOTAS: Final = ("tokens_per_minute", "max_concurrent", "slo", "max_priority")


class ListedKey(NamedTuple):
    tenant: str
    id: str
    created: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="print a new key once, and add its hash to the file", allow_abbrev=False)
    new.add_argument("tenant", metavar="TENANT", help="name of the tenant, which must be in the file unless --add")
    new.add_argument("--add", action="store_true", help="add the tenant, and the file if there is none")
    new.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="with --add: quota of prompt and output tokens (no limit)"
    )
    new.add_argument("--max-concurrent", type=int, metavar="N", help="with --add: answers in progress (no limit)")
    listed = actions.add_parser("list", help="list tenants, their quotas and the ids of their keys", allow_abbrev=False)
    revoke = actions.add_parser("revoke", help="remove a key, which then is invalid", allow_abbrev=False)
    revoke.add_argument("id", metavar="ID", help="id of the key, as `pdserve keys list` shows it")
    for one in (new, listed, revoke):
        one.add_argument("--file", type=Path, default=Path(DEFAULT_FILE), help=f"the key file ({DEFAULT_FILE})")


def run(args: argparse.Namespace) -> int:
    actions = {"new": _new, "list": _list, "revoke": _revoke}
    return actions[args.action](args)


def _new(args: argparse.Namespace) -> int:
    given = {
        name: getattr(args, name) for name in ("tokens_per_minute", "max_concurrent") if getattr(args, name) is not None
    }
    if given and not args.add:
        raise ConfigError(
            min(given), given[min(given)], "--add beside it; quotas of known tenants are edited in the file"
        )
    check_tenant_name(args.tenant)
    key = make_key(secrets.token_bytes(KEY_RANDOM_BYTES))
    with locked(args.file):
        content = _content(args.file) if args.file.exists() or not args.add else {}
        tenants = content.setdefault("tenants", {})
        if args.add:
            if args.tenant in tenants:
                raise ConfigError("tenant", args.tenant, "a name that is not in the file; without --add it gets a key")
            tenants[args.tenant] = given
        elif args.tenant not in tenants:
            known = ", ".join(sorted(tenants)[:10]) or "none"
            raise ConfigError("tenant", args.tenant, f"a tenant of {args.file} ({known}); --add adds one")
        entry = {"sha256": key_hash(key), "created": datetime.date.today().isoformat()}
        tenants[args.tenant].setdefault("keys", []).append(entry)
        replace(args.file, content)
    print(key)
    identity = key_hash(key)[:ID_CHARS]
    print(f"key {identity} of tenant {args.tenant}; it is shown this once, {args.file} has its hash", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    content = _content(args.file)
    tenants = content.get("tenants", {})
    for name in sorted(tenants):
        quotas = [f"{quota} {tenants[name][quota]}" for quota in _QUOTAS if tenants[name].get(quota) is not None]
        print(f"{name}: {', '.join(quotas) or 'no quotas'}")
        for one in _keys(content):
            if one.tenant == name:
                print(f"  {one.id}  {one.created}".rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    wanted = args.id.lower()
    if len(wanted) < ID_CHARS:
        raise ConfigError("id", args.id[:64], f"the {ID_CHARS} digits that `pdserve keys list` shows")
    with locked(args.file):
        content = _content(args.file)
        found = [one.tenant for one in _keys(content, whole=True) if one.id.startswith(wanted)]
        if len(found) != 1:
            # The key itself is not repeated, if that was given.
            raise NotFound("key", wanted if len(wanted) == ID_CHARS else f"{wanted[:4]}…")
        tenant = content["tenants"][found[0]]
        tenant["keys"] = [one for one in tenant["keys"] if not one["sha256"].startswith(wanted)]
        replace(args.file, content)
    print(f"{wanted[:ID_CHARS]} of tenant {found[0]} is revoked; routers reject it within a second")
    return 0


def _content(file: Path) -> dict[str, Any]:
    """Raises ConfigError unless it is a key file."""
    content = load(read_bytes(file)[0])
    read(content)
    return content


def _keys(content: dict[str, Any], *, whole: bool = False) -> Iterator[ListedKey]:
    for name, tenant in content.get("tenants", {}).items():
        for one in tenant.get("keys", []):
            yield ListedKey(name, one["sha256"] if whole else one["sha256"][:ID_CHARS], one.get("created", ""))
