"""The training step of a sharded module: unshard, reshard, reduce, and abort on all ranks if one fails.

Begin with `step`, which torch and autograd call; then `root`, the order among units, and `unit`. `recovery`,
`nonfinite` and `checks` are entered where something is wrong or was asked for.

FSDP2's names, and ours:

    FSDPState                       the hooks in `step`
    FSDPStateContext                `UnitContext`; with FSDPCommContext and post_order, `Root`
    FSDPParamGroup                  `Unit`
      unshard, wait_for_unshard     `Unit.gather`, `Unit.wait_gathered`
      _prefetch_unshard             `Root.prefetched_units`
      foreach_all_gather            `FlatBuffer.gather`, and `PlainTransport.all_gather`
      foreach_reduce                `FlatBuffer.reduce`, and `PlainReduceScatter.reduce`
    FSDPParam                       `FlatBuffer`, which has several parameters
      sharded_param                 `FlatBuffer.sharded_params`: `model.parameters()` and the optimizer have these
      unsharded_accumulated_grad    `FlatGradient.accumulated`
      reduce_scatter_output         what `Reduction.results` returns
"""
