"""How a chunk's bytes get from one pool into another: one file per transport, behind the protocols of interface.py.

`registry.py` lists the transports. It imports protocol/ and devices/, and the channel of link/.
Read `interface.py` first, then `tcp.py`.
"""
