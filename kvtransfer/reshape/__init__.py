"""KV between pools of unequal shape: another block size, dtype or tensor-parallel degree.

A prefill worker sends through `sender.ShapedSender`. A decode worker converts received blocks with `unpacker.Unpacker`.
Both use the mapping of `protocol/mapping.py` and convert with `convert.py`. `wire_rule.py` chooses the dtype that is
sent. Between pools of equal shape, blocks are not converted.
"""
