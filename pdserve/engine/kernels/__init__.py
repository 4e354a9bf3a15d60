"""CPU kernels, compiled by numba at the first start. Each replaces several passes of torch over memory by one."""
