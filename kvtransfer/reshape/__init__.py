"""KV between pools of unequal shape: another block size, dtype or tensor-parallel degree.

A prefill worker sends through `sender.ShapedSender`, whose rule chooses the dtype that is sent. A decode worker
converts received blocks with `convert.Unpacker`. Both use the mapping in `protocol/plan.py`. Between pools of equal
shape, blocks are not converted.
"""
