"""TLS of a cluster's processes: certificate files that are read again when they change, and the cluster's own CA."""
