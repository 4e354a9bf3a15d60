"""The memory that blocks lie in on GPUs, what copies it (CUDA, NCCL), and copies on a CPU that also hash.

Transports use it through the interface in protocol/device.py. Of kvtransfer it imports protocol/ only. Read
`cuda.py` first; `HostDevice` in transports/tcp_staged.py is the implementation without a GPU.
"""
