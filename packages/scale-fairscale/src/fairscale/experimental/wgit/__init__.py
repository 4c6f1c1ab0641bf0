"""A store of weights with git's commands, which is not offered. Begin with `Repo`."""

from fairscale._warnings import Refused


class Repo(Refused):
    """FairScale's repository of weights."""

    why = "a store of files has nothing to do with training, and it was never finished"
    instead = "scale_core.snapshot for versions of a run's state, or git-lfs or dvc for files"


class SignalSparsity(Refused):
    """FairScale's compression of tensors by their largest Fourier coefficients."""

    why = Repo.why
    instead = "torch.fft and torch.topk on the tensor"


__all__ = ["Repo", "SignalSparsity"]
