"""`python -m router`: one router process; its flags are the fields of RouterConfig, and those of a gateway in it."""

from __future__ import annotations

import sys

from pdserve.config import HttpRouterConfig, RouterConfig
from pdserve.program import Host, run


def make(config: RouterConfig) -> Host:
    # Imported here, because `--help` must work without the packages of the extra `server`.
    from router.service.program import make_router

    return make_router(config)


if __name__ == "__main__":
    sys.exit(run("router", HttpRouterConfig, make, sys.argv[1:]))
