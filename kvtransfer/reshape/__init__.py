"""KV between pools of unequal shape: another block size, dtype or tensor-parallel degree.

A prefill worker sends through `sender.ShapedSender`, and a decode worker converts what arrives with
`unpacker.Unpacker`. Both use the plan of `mapping.py` and convert with `convert.py`; `wire_rule.py` chooses the dtype
that is sent. Pools of equal shape do not use this package.
"""
