"""`SlowMoDistributedDataParallel` by the path of FairScale's own module of it."""

from fairscale.experimental.nn.data_parallel.slowmo import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

__all__ = ["SlowMoBaseAlgorithm", "SlowMoDistributedDataParallel"]
