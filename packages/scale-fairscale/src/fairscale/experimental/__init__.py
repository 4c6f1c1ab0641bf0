"""What FairScale called experimental. Begin with `nn/offload.py`."""
