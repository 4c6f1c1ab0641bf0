"""Fewer bits for what ranks send: blocks of numbers with one scale each, and collectives that send these.

Begin with `blocks`, the arithmetic; `collectives` sends its messages, `error_feedback` keeps what rounding has lost.
`float8_weights` are those that torchao computes with in fp8.
"""
