"""The packages around a model: data, pipeline and tensor parallelism, activation checkpointing, AdaScale.

Begin with `engine`.
"""
