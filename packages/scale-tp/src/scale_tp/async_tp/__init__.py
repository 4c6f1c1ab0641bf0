"""Exchanges that run beside the products that need them.

Begin with `collective_matmul`.
"""
