"""What a transfer is: frames, states, tables, and the plan of bytes. Pure: it knows no socket and no device.

Both sides of a transfer run these tables, and so does the simulator. Everything else in kvtransfer executes what
they decide. Read `session.py` first, which has the states, then `transport.py`, the interface to workers.
"""
