"""Optimizer offload: state on the host, and its update there, during the backward pass.

Begin with `optimizer`, the public class; `placement` says which elements go, `transfer` copies, `host_update` steps.
"""
