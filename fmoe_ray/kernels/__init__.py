"""Triton kernels of the GPU path and the torch operators around them. Importing needs no GPU."""
