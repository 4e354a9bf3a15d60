"""Transfers of workers whose tensor-parallel ranks have pools of their own. Only they need this room.

The leader's endpoint passes calls on to the ranks and combines their results. Read `joint.py` first, which decides,
then `rank_endpoints.py`.
"""
