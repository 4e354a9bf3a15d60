"""Checks the commit subjects since BASE: `room: imperative verb + object`, at most 72 characters. Part of `make check`.

    python scripts/check_subjects.py [--root DIR] [--base COMMIT]

Commits up to BASE are exempt: they are older than this rule. In a shallow clone, which may lack BASE, all commits at
hand are checked. Where BASE is missing although the history is complete (it was rewritten), only the last commit is
checked. Outside a git repository, as in a source archive, nothing can be checked; the script says so and succeeds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

BASE = "e1e1c0ad4290072381dbfa5f23b3b508c7ab63bd"
MAX_CHARS = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./ -]*: (?P<what>\S.*)")
PLACEHOLDERS = {"wip", "x", "tmp", "temp", "todo", "fixup", "squash"}


def problem(subject: str) -> str | None:
    """Why the subject is rejected. Pure."""
    found = SUBJECT.fullmatch(subject)
    if found is None:
        return "does not begin with `room: `"
    words = found["what"].lower().split()
    if len(words) < 2 or PLACEHOLDERS & {word.strip("!:.,") for word in words[:1]}:
        return "does not say what changed (imperative verb + object)"
    if len(subject) > MAX_CHARS:
        return f"has {len(subject)} characters, at most {MAX_CHARS} are allowed"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--base", default=BASE, metavar="COMMIT")
    args = parser.parse_args()
    try:
        if Path(git(args.root, "rev-parse", "--show-toplevel").strip()).resolve() != args.root.resolve():
            return say_unchecked("this folder is not the root of a git repository")
        commits = git(args.root, "log", "--no-merges", "--format=%h %s", *asked(args.root, args.base)).splitlines()
    except FileNotFoundError:
        return say_unchecked("git is not installed")
    except subprocess.CalledProcessError:
        return say_unchecked("there is no git history here")
    wrong = 0
    for commit in commits:
        name, _, subject = commit.partition(" ")
        if reason := problem(subject):
            print(f"commit {name}: subject {subject!r} {reason}", file=sys.stderr)
            wrong += 1
    if wrong:
        print("reword with `git commit --amend` or `git rebase -i`; CONTRIBUTING.md says how", file=sys.stderr)
        return 1
    print(f"{len(commits)} commit subjects checked")
    return 0


def asked(root: Path, base: str) -> list[str]:
    """The commits to check, as arguments of git log."""
    has_base = subprocess.run(
        ["git", "-C", str(root), "merge-base", "--is-ancestor", base, "HEAD"], capture_output=True, check=False
    )
    if has_base.returncode == 0:
        return [f"{base}..HEAD"]
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        return ["HEAD"]
    print(f"commit {base[:12]} is not in this history: only the last commit is checked")
    return ["-1", "HEAD"]


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout


def say_unchecked(reason: str) -> int:
    print(f"commit subjects are not checked: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
