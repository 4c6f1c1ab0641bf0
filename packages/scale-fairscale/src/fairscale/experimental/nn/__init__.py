"""Modules that FairScale called experimental. Begin with `offload.py`."""
