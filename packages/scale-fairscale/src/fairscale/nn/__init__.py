"""Wrappers of modules by FairScale's names. Begin with `data_parallel/fully_sharded_data_parallel.py`."""
