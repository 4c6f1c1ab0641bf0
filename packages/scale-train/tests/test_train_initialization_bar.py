import io

import pytest
import torch
from rich.console import Console
from torch import nn

import scale_train
from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_fsdp import class_policy, fully_shard_modules
from scale_snapshot import load_pretrained, save_pretrained
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import OptimizerOptions, ParallelOptions
from scale_train.training.parallel.engine import make_engine
from scale_train.training.parallel.parallelize_gpt import parallel_dims
from scale_train.training.reports.reporters import initialization_bar

CPU = torch.device("cpu")


def build(meta: bool, **changes) -> GPT:
    torch.manual_seed(7)
    with torch.device("meta" if meta else "cpu"):
        return GPT(ModelConfig(**{"layers": 3, "width": 16, "heads": 2, **changes}))


def test_the_bar_counts_units_and_names_the_one_that_is_done():
    screen = io.StringIO()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    console = Console(file=screen, force_terminal=True, width=100)
    with initialization_bar(console=console) as progress:
        fully_shard_modules(model, class_policy(nn.Linear), progress=progress)
    assert "initializing" in screen.getvalue() and "3/3" in screen.getvalue() and "the rest" in screen.getvalue()


def test_where_no_terminal_is_it_is_one_line():
    screen = io.StringIO()
    with initialization_bar(console=Console(file=screen, width=100)) as progress:
        for done in (1, 2):
            progress(done, 2, f"blocks.[{done}]")
    lines = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert len(lines) == 1 and "2/2" in lines[0] and "blocks.[2]" in lines[0]


def test_the_other_ranks_show_nothing(capsys):
    with initialization_bar(shown=False) as progress:
        progress(1, 2, "a")
    assert capsys.readouterr() == ("", "")


def test_it_is_public():
    assert scale_train.initialization_bar.__module__ == "scale_train"


def test_weights_that_are_loaded_are_shown_in_bytes(tmp_path, capsys):
    model, screen = nn.Linear(100, 50, bias=False), io.StringIO()
    save_pretrained(model, tmp_path / "weights")
    with scale_train.loading_bar(console=Console(file=screen, force_terminal=True, width=100)) as progress:
        load_pretrained(model, tmp_path / "weights", progress=progress)
    assert "loading" in screen.getvalue() and "20.0/20.0 kB" in screen.getvalue()
    with scale_train.loading_bar(shown=False) as progress:
        load_pretrained(model, tmp_path / "weights", progress=progress)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("tied", [True, False])
def test_values_depend_on_the_seed_and_the_name_alone(tied):
    whole, later = build(False, tied=tied), build(True, tied=tied)
    later.to_empty(device="cpu")
    if tied:
        later.head.weight = later.embedding.weight  # `to_empty` unties.
    for module in reversed(list(later.modules())):
        later.init_weights(module)
    for (name, ours), theirs in zip(later.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    torch.manual_seed(8)
    assert not torch.equal(GPT(whole.config).embedding.weight, whole.embedding.weight)


def give_values_unit_by_unit() -> list[str]:
    found, told = [], []
    plain = build(False)
    options = ParallelOptions()
    dims = parallel_dims(options, (group_of() if torch.distributed.is_initialized() else Group()).size)
    engine = make_engine(
        build(True), options, OptimizerOptions(), dims, CPU, lambda done, total, name: told.append(name)
    )
    if told != ["blocks.0", "blocks.1", "blocks.2", ""]:
        found.append(f"told {told}")
    expected = plain.state_dict()
    found += [name for name, value in engine.raw_model.state_dict().items() if not torch.equal(value, expected[name])]
    return found


def test_a_model_on_meta_gets_the_values_of_a_whole_one():
    assert give_values_unit_by_unit() == []
    assert run_ranks(give_values_unit_by_unit, 2) == [[], []]
