"""`python -m router`: one router process; its flags are the fields of RouterConfig."""

from __future__ import annotations

import sys

from pdserve.config import RouterConfig
from pdserve.program import run
from router.program import make_router

if __name__ == "__main__":
    sys.exit(run("router", RouterConfig, make_router, sys.argv[1:]))
