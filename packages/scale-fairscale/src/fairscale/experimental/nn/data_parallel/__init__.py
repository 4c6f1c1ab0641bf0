"""Local SGD with slow momentum. Begin with `slowmo.py`."""

from fairscale.experimental.nn.data_parallel.slowmo import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

__all__ = ["SlowMoBaseAlgorithm", "SlowMoDistributedDataParallel"]
