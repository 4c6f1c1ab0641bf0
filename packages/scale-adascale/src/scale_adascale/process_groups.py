"""Which ranks have other data, and which other parts of the model, where nobody has said so."""

from __future__ import annotations

from torch.optim import Optimizer

from scale_adascale.param_info import splits_of
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.microbatch_grads import announcing


def data_group_of(optimizer: Optimizer, given: GroupLike) -> Group:
    """Returns the ranks that have other data: as given, or all; only this one where all are stages of one pipeline.

    Raises:
        ValueError: Some of them are other ranks of the same pipeline.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    announced, data = announcing(params), group_of(given)
    pipeline = Group() if announced is None else announced.ranks
    if pipeline.size == 1:
        return data
    if given is None and set(data.ranks) == set(pipeline.ranks):
        return Group()
    if len(set(data.ranks) & set(pipeline.ranks)) > 1:
        raise ValueError(
            f"expected process_group to be the ranks that have the same stages as this one, for other data, got "
            f"{list(data.ranks)}, of which some have other stages of the pipeline over {list(pipeline.ranks)}: pass "
            "AdaScale(..., process_group=those of the replicas of this rank's stages, as mesh['replica'])"
        )
    return data


def model_group_of(optimizer: Optimizer, data: Group, given: GroupLike) -> Group:
    """Returns the ranks that have other parts of the model: as given, or as parameters or the stages of a pipeline say.

    A rank of a pipeline whose stages have no parameters has none to measure, and is not among them.

    Raises:
        ValueError: They are split over several such groups, and none was given that holds them all.
    """
    if given is not None:
        return group_of(given)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = splits_of(params, data)
    announced = announcing(params)
    if announced is not None and announced.with_parameters.size > 1:
        found[announced.with_parameters.ranks] = announced.with_parameters
    if len(found) > 1:
        raise ValueError(
            f"the model is divided over the ranks {' and '.join(str(list(ranks)) for ranks in found)}, beside those "
            f"with other data, {list(data.ranks)}: pass AdaScale(..., model_parallel_group=the group of all that have "
            "other parts of the model), and process_group for those with other data"
        )
    return next(iter(found.values()), Group())
