"""`python -m pdserve.gateway`: one gateway process; its flags are the fields of GatewayConfig."""

from __future__ import annotations

import sys

from pdserve.config import GatewayConfig
from pdserve.program import Host, run


def make(config: GatewayConfig) -> Host:
    # imported here, because flags are parsed without the packages of the extra `gateway`
    from pdserve.gateway.server import make_gateway

    return make_gateway(config)


if __name__ == "__main__":
    sys.exit(run("pdserve.gateway", GatewayConfig, make, sys.argv[1:]))
