"""Checks the interpreter that runs this file, or finds the newest one. Runs under any Python, however old.

PYTHON scripts/python.py check     # exit status 1 and one line where it is older than pyproject.toml allows
PYTHON scripts/python.py newest    # path of the newest interpreter here that the pins support; nothing if none is
PYTHON scripts/python.py 3.12      # path of one of that version
"""

# Newer syntax than Python 2's would fail where this file must print its message.
# ruff: noqa: UP031, RUF005

import glob
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HAS = "import ensurepip, sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"


def bounds():
    """The oldest version that pyproject.toml allows, and the newest that constraints.txt has been tried with."""
    with open(os.path.join(ROOT, "pyproject.toml")) as file:
        oldest = re.search(r'requires-python = ">=(\d+)\.(\d+)"', file.read()).groups()
    with open(os.path.join(ROOT, "constraints.txt")) as file:
        newest = re.search(r"Python (?:\d+\.\d+ to )(\d+)\.(\d+)", file.read()).groups()
    return tuple(map(int, oldest)), tuple(map(int, newest))


def supported():
    """(version, path) of each supported interpreter on PATH and of pyenv that can make an environment, newest first."""
    oldest, newest = bounds()
    home = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = {}
    for minor in range(newest[1], oldest[1] - 1, -1):
        name = "python%d.%d" % (oldest[0], minor)
        paths = [os.path.join(folder, name) for folder in os.environ.get("PATH", "").split(os.pathsep)]
        paths += sorted(glob.glob(os.path.join(home, "versions", "*", "bin", name)), reverse=True)
        for path in paths:
            if (oldest[0], minor) not in found and works(path, "%d.%d" % (oldest[0], minor)):
                found[oldest[0], minor] = path
    return sorted(found.items(), reverse=True)


def works(path, version):
    """Whether it is that version and has what `python -m venv` needs. A pyenv shim may name one that is not active."""
    if not os.access(path, os.X_OK):
        return False
    try:
        with open(os.devnull, "w") as nowhere:
            return subprocess.check_output([path, "-c", HAS], stderr=nowhere).decode() == version
    except (OSError, subprocess.CalledProcessError):
        return False


def main():
    if re.match(r"\d+\.\d+$", "".join(sys.argv[1:])):
        version = tuple(map(int, sys.argv[1].split(".")))
        sys.stdout.write(dict(supported()).get(version, "") + "\n")
        return 0
    if sys.argv[1:] == ["newest"]:
        found = supported()
        sys.stdout.write(found[0][1] + "\n" if found else "")
        return 0
    oldest = bounds()[0]
    if sys.version_info[:2] >= oldest:
        return 0
    found = supported()
    other = found[0][1] if found else "/path/to/python%d.%d" % oldest
    sys.stderr.write(
        "pdserve needs Python %d.%d or newer; %s is %d.%d. Choose another: make PYTHON=%s ...\n"
        % (oldest + (sys.executable,) + tuple(sys.version_info[:2]) + (other,))
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
