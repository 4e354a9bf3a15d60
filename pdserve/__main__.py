"""`python -m pdserve` is the command `pdserve`."""

import sys

from pdserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
