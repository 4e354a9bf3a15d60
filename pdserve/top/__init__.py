"""The live view in a terminal: `pdserve top`.

It shows frames of a router, or of a recording that is played, and imports the client and core. Read `app.py` first;
`text.py` is pure.
"""
