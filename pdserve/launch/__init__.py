"""Starts a cluster and keeps it running. Import its modules; this package imports nothing."""
