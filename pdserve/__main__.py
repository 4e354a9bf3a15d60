"""`python -m pdserve` and the script `pdserve`. Imports late, so that Ctrl-C during the imports prints no traceback."""

import sys


def main() -> int:
    try:
        from pdserve.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
