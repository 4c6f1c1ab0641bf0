"""What every rank does in a run: build model and optimizer, train, report, save and load.

Begin with `train`, a run from its options to its summary; `trainer` is one step, `parallelize` what shards the model.
"""
