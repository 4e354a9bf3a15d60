"""Names the packages that are missing or older here than the generated stubs demand. Prints nothing if none is.

    python3 scripts/gpu/floors.py [--say]

The stubs contain the versions (scripts/proto.sh), so no other place must. --say prints the versions that are installed.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

STUBS = Path(__file__).parents[2] / "pdserve/v1"


def floors(stubs: Path = STUBS) -> dict[str, tuple[int, ...]]:
    """The newest version that any stub demands, by distribution."""
    found: dict[str, list[tuple[int, ...]]] = {"grpcio": [], "protobuf": []}
    for path in sorted(stubs.glob("*_pb2*.py")):
        text = path.read_text(encoding="utf-8")
        for version in re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'", text, re.MULTILINE):
            found["grpcio"].append(numbers(version))
        for version in re.findall(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", text):
            found["protobuf"].append(tuple(map(int, version)))
    missing = [name for name, versions in found.items() if not versions]
    if missing:
        raise SystemExit(f"the stubs in {stubs} name no version of {', '.join(missing)}: run scripts/proto.sh")
    return {name: max(versions) for name, versions in found.items()}


def numbers(version: str) -> tuple[int, ...]:
    """The release's numbers: (1, 81, 1) for 1.81.1.dev0."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> int:
    is_said = "--say" in sys.argv[1:]
    for name, floor in floors().items():
        version = installed(name)
        if is_said:
            print(f"{name} {version or 'missing'}, the stubs need {'.'.join(map(str, floor))}")
        elif numbers(version) < floor:
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
