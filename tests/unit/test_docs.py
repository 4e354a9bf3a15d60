"""What the documents point at exists: files, headings, modules, flags."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from pdserve.config import GatewayConfig, HttpRouterConfig

ROOT = Path(__file__).parents[2]
OURS = ("benchmarks", "decode_worker", "examples", "kvtransfer", "pdserve", "prefill_worker", "router", "simulator")
# Its table names files of the standard library, which the model was trained on.
NOT_OURS = ("pdserve/models/stdlib-5m/README.md",)
GENERATED = ("docs/reference/",)
FOREIGN_MODULES = ("pip", "pytest", "venv")


@cache
def tracked() -> tuple[str, ...]:
    """Every file of the project; the working tree where there is no git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    rooms = [ROOT, *(ROOT / room for room in (*OURS, "deploy", "docs", "proto", "scripts", "tests"))]
    return tuple(
        str(path.relative_to(ROOT)) for room in rooms for path in (room.rglob("*") if room != ROOT else room.glob("*"))
    )


def pages() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def is_file(name: str, page: str) -> bool:
    """`name` as a path from the root, pdserve/ or the page, or as the name of any file. The tail of a path, too, in
    decisions and of figures and manifests: pages shorten what their table has named."""
    if any((folder / name).exists() for folder in (ROOT, ROOT / "pdserve", (ROOT / page).parent)):
        return True
    may_be_short = "/" not in name or "/decisions/" in page or name.endswith((".svg", ".yaml"))
    return may_be_short and any(f"/{one}".endswith(f"/{name}") for one in tracked())


def broken_links(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith((*NOT_OURS, *GENERATED))])
def test_lines_are_short(page: str) -> None:
    """As CONTRIBUTING.md says. A single word, such as an address, may be longer."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert [line for line in lines if len(line.split()) > 1] == []


def missing_files(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w./-]+\.(?:md|proto|py|sh|svg|toml|yaml))`", text)
    return [name for name in named if not is_file(name, page)]


@pytest.mark.parametrize("page", [page for page in pages() if page not in NOT_OURS])
def test_every_named_file_exists(page: str) -> None:
    assert missing_files(page) == []


def file_of(module: str) -> str:
    """The text of a module or a package's __main__; empty where there is neither."""
    path = ROOT / module.replace(".", "/")
    found = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
    return found.read_text(encoding="utf-8") if found.exists() else ""


@cache
def source(module: str) -> str:
    """A module's text, and that of modules whose `parse_flags` or `add_flags` it calls: flags that several share."""
    code = file_of(module)
    for shared in re.findall(r"^from ([\w.]+) import .*\b(?:parse|add)_flags\b", code, re.MULTILINE):
        code += file_of(shared)
    kind = {"pdserve.gateway": GatewayConfig, "router": HttpRouterConfig}.get(module)
    if kind is not None:  # its flags are the fields of its config
        code += "".join(f'"--{one.name.replace("_", "-")}"' for one in dataclasses.fields(kind))
    return code


@pytest.mark.parametrize("page", pages())
def test_a_command_that_clones_has_an_address(page: str) -> None:
    found = re.findall(r"git clone (?:-\S+ )*(\S+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [one for one in found if "://" not in one and "@" not in one] == []


@cache
def deleted_programs() -> set[str]:
    """The benchmarks that docs/benchmarks.md lists as deleted."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("\n## Deleted programs\n")[2].partition("\n## ")[0]
    return {f"benchmarks.{name}" for name in re.findall(r"`(\w+)`", section)}


def test_programs_that_are_listed_as_deleted_are() -> None:
    assert deleted_programs()
    assert [name for name in deleted_programs() if file_of(name)] == []


@pytest.mark.parametrize("page", pages())
def test_a_figure_of_a_deleted_program_names_its_commit(page: str) -> None:
    """In the same paragraph, or in the same row of a table."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = [part for block in re.split(r"\n\s*\n", text) for part in re.split(r"\n(?=\|)", block)]
    named = re.compile(rf"\b({'|'.join(map(re.escape, deleted_programs()))})\b")
    assert [one for one in parts if named.search(one) and not re.search(r"\b[0-9a-f]{7,8}\b", one)] == []


def invalid_commands(page: str) -> list[str]:
    """`python -m MODULE --flag ..`, and `pdserve COMMAND --flag ..`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    word = r"(?:[ \n]+(?:\\\n\s*)?[\w.,/:x@\[\]-]+)*"
    wrong = []
    for module, rest in re.findall(rf"python3? -m ([\w.]*\w)({word})", text):
        if module.partition(".")[0] in FOREIGN_MODULES or module.endswith(".NAME"):
            continue
        code = source(module)
        wrong += [module] if not code and module not in deleted_programs() else []
        if code and 'f"--{' not in code:  # no computed flags
            flags = [flag for flag in re.findall(r"--[a-z][\w-]*", rest) if flag != "--help"]
            wrong += [f"{module} {flag}" for flag in flags if f'"{flag}"' not in code]
    for command, rest in re.findall(rf"pdserve ([a-z]+)((?=[ \n]+--){word})", text):
        flags = re.findall(r"--[a-z][\w-]*", rest)
        wrong += [f"pdserve {command} {flag}" for flag in flags if flag not in flags_of(command)]
    return wrong


@pytest.mark.parametrize("page", pages())
def test_every_command_is_valid(page: str) -> None:
    assert invalid_commands(page) == []


@cache
def flags_of(command: str) -> str:
    import argparse

    from pdserve.cli.main import NAMES, load

    if command not in NAMES:
        return ""
    parser = argparse.ArgumentParser()
    load(command).add_flags(parser)
    return parser.format_help()


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](gone.md) [b](#two) [c](#one) `python -m router.gone` `python -m pdserve.gateway --gone` "
        "`router/gone.py` `service/server.py` `gone.py`\n"
    )
    assert broken_links(str(page)) == ["gone.md", "#two"]
    assert invalid_commands(str(page)) == ["router.gone", "pdserve.gateway --gone"]
    assert missing_files(str(page)) == ["router/gone.py", "service/server.py", "gone.py"]
