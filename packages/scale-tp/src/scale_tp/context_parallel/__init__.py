"""Attention over sequences that are divided between ranks.

Begin with `ring`; `ulysses` divides heads instead, `load_balance` says who has which positions.
"""
