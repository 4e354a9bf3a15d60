"""How a chunk's bytes get from one pool into another: one file per transport, behind the protocols of path.py."""
