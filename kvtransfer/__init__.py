"""Transfers KV blocks from a prefill worker to a decode worker."""
