"""Communication that overlaps with the matrix products that need it.

Begin with `collective_matmul`.
"""
