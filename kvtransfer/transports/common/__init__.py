"""What transports implement, what several of them share, and the registry that finds them.

Imports protocol/ and devices/, and the channel of link/. Read `interface.py` first.
"""
