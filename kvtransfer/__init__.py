"""KV blocks on their way from a prefill worker to a decode worker."""
