"""Pure modules decide; they import nothing that acts.

Where a process that imports all of them holds nothing that acts, each alone holds nothing; where it does hold
something, and by test-slow, each is imported in a process that has imported nothing else.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.structure import all_string_imports, string_imports

ROOT = Path(__file__).parents[2]
ACTING = ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "threading", "socket", "numpy")

PACKAGES = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator")
#: Modules that decide and never act, but import numpy or torch for arrays, pydantic, jinja2 or protobuf.
USE_ONE = frozenset(
    {
        "pdserve.engine.gpu.plain_rows",
        "pdserve.engine.load.checkpoint",
        "pdserve.engine.load.load_plan",
        "pdserve.engine.model.parameters",
        "pdserve.gateway.api.conversations",
        "pdserve.gateway.api.field_support",
        "pdserve.gateway.api.logprobs",
        "pdserve.gateway.api.message_models",
        "pdserve.gateway.api.messages",
        "pdserve.gateway.api.openapi",
        "pdserve.gateway.api.replies",
        "pdserve.gateway.api.request_models",
        "pdserve.gateway.api.response_models",
        "pdserve.gateway.api.responses",
        "pdserve.gateway.api.sdk_call",
        "pdserve.gateway.tools.plan",
        "pdserve.gateway.tools.grammars",
        "pdserve.top.text",
        "pdserve.wire.convert",
    }
)


def says_pure(path: Path) -> bool:
    text = path.read_text()
    if "Pure" not in text:  # to parse all sources takes seconds, in every process that collects the tests
        return False
    return re.search(r"\bPure\b", ast.get_docstring(ast.parse(text)) or "") is not None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PURE = [
    module
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if says_pure(path) and (module := module_of(path)) not in USE_ONE
]

# One process that has imported nothing forks a child for each module; `before`: an interpreter may load some of the
# acting modules by itself (site hooks, coverage), and only what the import adds counts.
PROBE = """
import os, sys, traceback
before = set(sys.modules)
import importlib
for line in sys.stdin:
    modules, *acting = line.split()
    if os.fork() == 0:
        try:
            for module in modules.split(","):
                importlib.import_module(module)
            found = [name for name in acting if name in sys.modules and name not in before]
            print(modules, "imports", *found)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.wait()
"""
LIGHT = {
    "pdserve": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "pdserve.client": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "router.service.server": ("torch", "ray"),
    # Pure as well; pydantic itself imports threading and socket.
    "pdserve.gateway.api.sdk_call": ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "numpy"),
    "pdserve.gateway.api.replies": ("grpc", "torch", "ray", "redis", "asyncio", "opentelemetry", "numpy"),
    "pdserve.gateway.server": ("torch", "ray", "redis", "opentelemetry", "numpy"),
    "pdserve.engine.toy": ("torch", "numpy"),
    "pdserve.engine.load.build_engine": ("triton", "cupy"),
}
ACTIVE = "kvtransfer.link.channel"


def imported(asked: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Which of what is looked for each module brings, imported alone; several are named with commas between them.

    A module that cannot be imported is not there.
    """
    lines = "".join(f"{modules} {' '.join(names)}\n" for modules, names in asked.items())
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=lines, capture_output=True, text=True, cwd=ROOT, check=True, timeout=240
    )
    print(done.stderr, file=sys.stderr)
    said = (line.partition(" imports") for line in done.stdout.splitlines())
    return {modules: found.split() for modules, _, found in said}


@pytest.fixture(scope="module")
def pure() -> dict[str, list[str]]:
    together = ",".join(PURE)
    if imported({together: ACTING}) == {together: []}:
        return {module: [] for module in PURE}
    return imported(dict.fromkeys(PURE, ACTING))


@pytest.fixture(scope="module")
def light() -> dict[str, list[str]]:
    return imported(LIGHT | {ACTIVE: ("socket", "torch")})


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_only_pure_modules(module: str, pure: dict[str, list[str]]) -> None:
    assert pure.get(module) == []


@pytest.mark.slow
def test_importing_a_pure_module_loads_only_pure_modules() -> None:
    assert imported(dict.fromkeys(PURE, ACTING)) == {module: [] for module in PURE}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_does_not_import_the_heavy_libraries(module: str, light: dict[str, list[str]]) -> None:
    assert light.get(module) == []


def test_the_import_check_detects_imports(light: dict[str, list[str]]) -> None:
    assert light[ACTIVE] == ["socket"]


def test_no_module_is_imported_by_a_string() -> None:
    modules = [module_of(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert list(all_string_imports([one for one in modules if not one.startswith("pdserve.v1")])) == []


@pytest.mark.parametrize(
    "source",
    [
        "from importlib import import_module",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as load",
        "load = __import__",
        "import runpy\nrunpy.run_path(file)",
        "host = sys.modules['router.service.program']",
        "PLACES = {'decode': 'decode_worker.program:build'}",
    ],
)
def test_an_import_by_a_string_is_found(source: str) -> None:
    modules = ("router.service.program", "decode_worker.program", "pdserve.gateway")
    assert list(string_imports(source, modules, ("pdserve.gateway",)))


def test_a_program_may_be_named() -> None:
    source = "command = [sys.executable, '-m', 'pdserve.gateway']\nlabel = 'pdserve.request.id'\nimport router"
    assert list(string_imports(source, ("pdserve.gateway", "router"), ("pdserve.gateway",))) == []
