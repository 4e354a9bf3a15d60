"""`pdserve bench`: load on running servers, with the traces and workloads of the simulator."""
