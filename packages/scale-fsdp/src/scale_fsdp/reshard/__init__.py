"""Conversion, deferred initialization and live resharding: parameters get another device, dtype or other ranks.

Begin with `reshard`; `meta_init` initializes modules that were built on the meta device, `convert` is `to()` and
`half()`.
"""
