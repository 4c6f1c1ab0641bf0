"""FairScale's asynchronous pipeline: its name imports, and refuses with what to write. Begin with `pipe`."""

from fairscale.experimental.nn.ampnet_pipe.pipe import AMPnetPipe

__all__ = ["AMPnetPipe"]
