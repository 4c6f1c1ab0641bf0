"""`DistributedPipe`, a pipeline over several processes: each rank holds some stages, and runs its program.

Begin with `pipe`; a step goes on in `step` and `runtime`, then in `stage` (computes) and `p2p` (sends, receives).
"""
