"""Fewer bits in messages: blocks of numbers with one scale each, and collectives that send these.

Begin with `blocks`, the arithmetic; `collectives` sends its messages, `error_feedback` keeps the rounding errors.
`float8_weights` are those that torchao computes with in fp8.
"""
