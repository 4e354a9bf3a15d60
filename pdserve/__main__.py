"""`python -m pdserve` and the script `pdserve`. Imports are delayed, so that Ctrl-C during them prints no traceback."""

import sys


def main() -> int:
    try:
        from pdserve.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
