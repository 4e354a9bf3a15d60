"""How a chunk's bytes get from one pool into another: each file here is one transport, and nothing else.

A new transport NAME is a file NAME.py whose `TRANSPORT` implements the protocols of common/interface.py, and its test.
Settings, commands and pages read the names of the files. Read `tcp.py` first.
"""
