"""`DistributedPipe`, a pipeline over several processes: each rank holds some stages, and runs its program.

Begin with `pipe`; a step goes on in `step` and `runtime`, then in `stage` (computes) and `p2p` (sends, receives).

The names of torch.distributed.pipelining, and ours:

    forward_one_chunk, backward_one_chunk        `Stage.forward`, `Stage.backward`
    stage_backward_input, stage_backward_weight  `SplitBackward`, and `Stage.weight_gradients`
    get_fwd_recv_ops, get_fwd_send_ops (P2POp)   `P2PChannel.post_receive`, `P2PChannel.send`
    _PipelineScheduleRuntime                     `PassRuntime`
"""
