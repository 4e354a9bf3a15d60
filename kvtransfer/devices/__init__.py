"""The memory that blocks lie in, on hosts and GPUs, and the libraries that copy it: CUDA, NCCL, NIXL.

Transports use it through the interface in protocol/device.py. Of kvtransfer it imports protocol/ only. Read
`host_device.py` first, the implementation without a GPU.
"""
