"""What is where it is wanted stays itself; everything else is copied, in whatever it is nested."""

import torch

from scale_pipe.microbatch import copied_to

CPU, META = torch.device("cpu"), torch.device("meta")


def test_tensors_that_are_there_are_themselves() -> None:
    tree = {"x": (torch.ones(2), 3)}
    assert copied_to(CPU, tree) is tree


def test_all_others_are_copied_and_their_gradients_come_back() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    moved = copied_to(META, [x, {"again": x}, "word", torch.ones(1, device="meta")])
    assert moved[0].is_meta and moved[0].shape == (2, 3) and moved[0] is moved[1]["again"] and moved[2] == "word"
    assert moved[0].requires_grad and moved[0].grad_fn is not None
