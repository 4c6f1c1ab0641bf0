"""Devices: streams, host memory for copies, and random number generators.

Begin with `streams`, the same methods on CPU and CUDA; `buffer_pool` reuses large host buffers, `rng` sets generators
back.
"""
