"""The pages name only what exists: other pages and their headings, files, and modules to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_docs import deleted_programs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
SOURCES = {
    path.name
    for folder in (
        "pdserve",
        "router",
        "kvtransfer",
        "decode_worker",
        "prefill_worker",
        "simulator",
        "benchmarks",
        "tests",
        "examples",
        "scripts",
    )
    for path in (ROOT / folder).rglob("*.py")
}
ELSEWHERE = ("http://", "https://", "mailto:")
NOT_OURS = {"pip", "pytest", "venv"}


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    text, found = page.read_text(encoding="utf-8"), []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(ELSEWHERE):
            continue
        name, _, fragment = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (fragment and other.suffix == ".md" and fragment not in anchors(other)):
            found.append(target)
    for module in re.findall(r"python3? -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        is_there = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        is_there = is_there or module in deleted_programs()
        if not is_there and module.partition(".")[0] not in NOT_OURS and not module.endswith(".NAME"):
            found.append(f"python -m {module}")
    if "decisions" in page.parts:  # they also name files of their time
        return found
    for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|proto|toml|sh))`", text):
        if not ((ROOT / name).exists() or (ROOT / "pdserve" / name).exists()):
            found.append(name)
    return found + [name for name in re.findall(r"`(\w+\.py)`", text) if name not in SOURCES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page: Path) -> None:
    assert broken(page) == []


def test_broken_names_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](gone.md) [b](#two) [c](#one) `python -m router.gone` `router/gone.py` `gone.py`\n")
    assert broken(page) == ["gone.md", "#two", "python -m router.gone", "router/gone.py", "gone.py"]
