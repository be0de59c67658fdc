"""Triton kernels, one family a file. Only `ops/select.py` imports them, on a device that runs them.

Their arguments are pointers and sizes, and sizes do not name shapes; a block in registers is named after what it
holds, and its length is the kernel's one constant.
"""
