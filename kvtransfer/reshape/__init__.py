"""KV between pools of unequal shape: another block size, dtype or tensor-parallel degree.

A prefill worker sends through `sender.ShapedSender`, and a decode worker converts what arrives with
`unpacker.Unpacker`. Both copy by one plan, `mapping.py`, and convert by `convert.py`; `wire_rule.py` chooses the dtype
that travels. Pools of equal shape never get here.
"""
