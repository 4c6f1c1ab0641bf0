"""The module that was `torchgpipe.balance` until torchgpipe 0.0.5: importing it says so, as torchgpipe did."""

raise ImportError("torchgpipe_balancing is torchgpipe.balance now: from torchgpipe.balance import balance_by_time")
