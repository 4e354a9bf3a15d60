"""What the router knows and decides: `RouterState.handle(event, now_s) -> commands`. Pure.

Every decision about a request is made here: admission, order, placement, recovery, rejection. The runtime in
router/service executes the commands; the simulator and the replay run the same code. It imports router/policy,
pdserve.config and pdserve.core only. Read `state.py` first, then `lifecycle.py`, whose table is the specification.
"""
