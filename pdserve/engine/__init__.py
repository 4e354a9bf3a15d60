"""The transformer that prefill and decode workers share. Import its modules; this package imports nothing."""
