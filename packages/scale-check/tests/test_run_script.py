"""`scale-check run` on scripts as people write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked_servers import forked_servers, script_folder  # noqa: F401

from scale_check.cli import main
from scale_check.comparison import compare
from scale_check.recording import Key, Phase, Recorder, Recording, with_joined_calls
from scale_check.script.rank import exact_norms, without_dropout
from scale_check.summary import Recorded, float_values
from scale_core import compat

pytestmark = pytest.mark.usefixtures("forked_servers")

DDP = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
bug = sys.argv[1] if len(sys.argv) > 1 else ""
model = net if bug == "not averaged" else DistributedDataParallel(net)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
sampler = torch.utils.data.RandomSampler(data) if bug == "same samples" else DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if bug == "frozen" and dist.get_rank() == 1:
            net[3].bias.grad.zero_()
        if "clipped" in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
"""
FSDP2 = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
norm = nn.BatchNorm1d(16) if "bn" in sys.argv else nn.LayerNorm(16)
net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
for module in (net[0], net[3]):
    fully_shard(module)
fully_shard(net)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for x, y in loader:
    nn.functional.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
WITHOUT_LOADER = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
data = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(5))


def get_batch():
    places = torch.randint(len(data) - 17, (4,))
    return torch.stack([data[i : i + 16] for i in places]), torch.stack([data[i + 1 : i + 17] for i in places])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)

    def forward(self, tokens, targets):
        logits = self.head(self.block(self.embed(tokens)))
        return logits, nn.functional.cross_entropy(logits.view(-1, 50), targets.view(-1))


torch.manual_seed(7)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(1337 + rank)
for _ in range(10):
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        _, loss = model(*get_batch())
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


# Micro-batches are divided among the ranks, as in nanoGPT.
_DIVIDED = """
accumulation = 4 // dist.get_world_size()
divisor = 4 if "wrong" in sys.argv else accumulation
for _ in range(10):"""
DIVIDED = (
    WITHOUT_LOADER.replace("import torch", "import sys, torch", 1)
    .replace("\nfor _ in range(10):", _DIVIDED)
    .replace("range(2)", "range(accumulation)")
    .replace("micro == 1", "micro == accumulation - 1")
    .replace("loss / 2", "loss / divisor")
)


WITH_SCHEDULE = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
net, loss = nn.Sequential(nn.Linear(8, 16), nn.Dropout2d(0.5), nn.Linear(16, 3)), nn.MSELoss()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(16, 2, 8))
validation = DataLoader(data, batch_size=8)
if "rank 0 alone" in sys.argv and dist.get_rank() == 0:
    next(iter(validation))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
for epoch in range(3):
    for (x,) in loader:
        output = model(x)
        loss(output, torch.zeros_like(output)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""

# torchdata's loader, which torchtitan has, is a subclass that does not use the `__iter__` of its base class.
LOADER_OF_ITS_OWN = DDP.replace(
    """
dist.init_process_group""",
    """
class Loader(DataLoader):
    def __iter__(self):
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[index] for index in indices])

dist.init_process_group""",
).replace("loader = DataLoader(", "loader = Loader(")
# A loader, and micro-batches that are divided among the ranks, as with torchtitan's `global_batch_size`.
DIVIDED_WITH_LOADER = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accumulation = 4 // dist.get_world_size()
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(loader) // accumulation)
divisor = 4 if "wrong" in sys.argv else accumulation
for number, (x, y) in enumerate(loader, 1):
    (nn.functional.cross_entropy(model(x), y) / divisor).backward()
    if number % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""
# Each batch is as long as its longest sample, as those of transformers' collators; the other rank has other lengths.
OF_MANY_LENGTHS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(1)
samples = [(torch.randint(1, 30, (2 + number,)), number % 3) for number in range(32)]


def collate(samples):
    length = max(len(tokens) for tokens, _ in samples)
    tokens = torch.full((len(samples), length), 30)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    for row, (ids, _) in enumerate(samples):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return {"input_ids": tokens, "attention_mask": mask, "label": torch.tensor([label for _, label in samples])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 3)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, input_ids, attention_mask, label):
        hidden = self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden[:, 0])
        loss = nn.functional.cross_entropy(logits, label)
        if "other loss" in sys.argv and dist.get_rank() == 1:
            loss = loss * 1.01
        return loss


model = DistributedDataParallel(Model())
loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples), collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Gradients are clipped by the norm of three million elements, which depends on who has them if it is summed in float32.
LARGE_FSDP2 = FSDP2.replace(
    "norm, nn.ReLU(), nn.Linear(16, 3)", "norm, nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 2**19), nn.Linear(2**19, 3)"
)
# Norms of each rank's own gradients, which are averaged after that.
LOCAL_NORMS = DDP.replace("DistributedDataParallel(net)", "net").replace(
    "        optimizer.step()",
    """
        norms = [param.grad.norm() for param in net.parameters()]
        for param in net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()""",
)
# All ranks read the same batches, and each takes its part of them.
PARTS_OF_A_BATCH = DDP.replace("DistributedSampler(data)", "None").replace(
    "    for x, y in loader:",
    """    for x, y in loader:
        x, y = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in (x, y))""",
)
# Its weights are float32, and it computes in bfloat16 without autocast.
CASTING = DDP.replace(
    "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))",
    """
class CastedLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()

net = nn.Sequential(CastedLinear(8, 64), nn.ReLU(), nn.Dropout(0.1), CastedLinear(64, 3))
""",
)
LEARNING_RATE_OF_THE_RANKS = DDP.replace("lr=1e-2", "lr=1e-2 * dist.get_world_size()")


SCRIPTS = {
    "ddp": DDP,
    "fsdp2": FSDP2,
    "without_loader": WITHOUT_LOADER,
    "divided": DIVIDED,
    "schedule": WITH_SCHEDULE,
    "loader": LOADER_OF_ITS_OWN,
    "divided_loader": DIVIDED_WITH_LOADER,
    "lengths": OF_MANY_LENGTHS,
    "large_fsdp2": LARGE_FSDP2,
    "local_norms": LOCAL_NORMS,
    "parts": PARTS_OF_A_BATCH,
    "casting": CASTING,
    "learning_rate": LEARNING_RATE_OF_THE_RANKS,
}

RIGHT = SCRIPTS.keys() - {"learning_rate"}


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    for name, text in SCRIPTS.items():
        Path(tmp_path, f"{name}.py").write_text(text)


@pytest.mark.parametrize("script", sorted(f"{name}.py" for name in RIGHT))
def test_right_scripts_are_found_right(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "--steps", "5" if script == "schedule.py" else "2", script])
    if "fsdp2" in script and compat.torch_version() < (2, 11):  # FSDP2 of torch 2.8 sums over gloo.
        assert (code, "All gradients of this step are 2 times" in capsys.readouterr().out) == (1, True)
    else:
        assert (code, "tensors are equal but for rounding" in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ddp.py", "not averaged"], "step 1: gradient of "),
        (["fsdp2.py", "bn"], "step 1: output of 1 differs on ranks 0, 1"),
        (["ddp.py", "frozen", "clipped"], "step 1: gradient before clipping of 3.bias differs on rank 1"),
        (["casting.py", "frozen"], "step 1: gradient of 3.bias differs on rank 1"),
        (["divided.py", "wrong"], "step 1: gradient before clipping of "),
        (["divided_loader.py", "wrong"], "step 1: gradient of "),
        (["lengths.py", "other loss"], "step 1: output of the model"),
        (["ddp.py", "same samples"], "step 1: samples of the model are the same on ranks 0, 1: "),
        (["learning_rate.py"], "step 1: optimizer option lr of group 0 differs on rank 0: one process has 0.01"),
    ],
)
def test_wrong_scripts_are_found_wrong_where_they_are(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--steps", "1", *arguments]) == 1
    assert capsys.readouterr().out.startswith(told)


def test_the_report_is_json_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--steps", "1", "--json", "ddp.py", "frozen"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["first"]["name"], found["first"]["ranks"]) == ("different", "3.bias", [1])
    assert found["first"]["text"].startswith("step 1: gradient of 3.bias differs on rank 1")


def test_a_script_that_fails_is_code_2_with_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import torch\nraise KeyError('no such option')\n")
    assert main(["run", "broken.py"]) == 2
    told = capsys.readouterr().err
    assert "ended with code 1. It said last:" in told and "KeyError: 'no such option'" in told


def test_a_loader_that_one_rank_reads_is_code_2_and_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--steps", "1", "schedule.py", "rank 0 alone"]) == 2
    assert "some ranks read a DataLoader that others don't" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_noticed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["run", "package.train"])
    assert raised.value.code == 2
    assert "package.train: no such file; of a module, write -m package.train" in capsys.readouterr().err


def test_a_script_that_trains_nothing_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nothing.py").write_text("print('hello')\n")
    assert main(["run", "nothing.py"]) == 2
    assert "no module ran with gradients; is it a training script?" in capsys.readouterr().err


def test_noise_of_the_training_loop_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("noisy.py").write_text(DDP.replace("model(x)", "model(x + torch.rand_like(x))"))
    assert main(["run", "--steps", "1", "noisy.py"]) == 2
    assert "draws random numbers between its DataLoader and its model" in capsys.readouterr().err


def test_an_optimizer_that_never_sees_a_gradient_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("idle.py").write_text(DDP.replace("model.parameters(), lr", "[torch.zeros(2)], lr"))
    assert main(["run", "--steps", "1", "idle.py"]) == 2
    assert "the optimizer's steps see no gradient and change no weight" in capsys.readouterr().err


# bf16 weights with copies in float32, as Megatron's optimizer has; so small a step is lost in bf16.
COPIES = (
    DDP.replace("nn.Linear(16, 3))", "nn.Linear(16, 3)).bfloat16()")
    .replace("torch.randn(64, 8)", "torch.randn(64, 8).bfloat16()")
    .replace(
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)",
        """
params = list(model.parameters())
copies = [param.detach().float() for param in params]
if bug == "flat":
    copies = [torch.cat([copy.flatten() for copy in copies] + [torch.zeros(5)])]
if bug == "divided":
    world, rank = dist.get_world_size(), dist.get_rank()
    params_of_ranks = [params[len(params) * i // world : len(params) * (i + 1) // world] for i in range(world)]
    params = params_of_ranks[rank]
    copies = [param.detach().float() for param in params]
if bug == "unrelated":
    copies = [torch.ones(2)]
optimizer = torch.optim.AdamW(copies, lr=1e-9)


def copy_gradients():
    grads = [param.grad.float() for param in params]
    if bug == "flat":
        grads = [torch.cat([grad.flatten() for grad in grads] + [torch.zeros(5)])]
    for copy, grad in zip(copies, grads):
        copy.grad = grad if bug != "unrelated" else torch.ones_like(copy)


def copy_weights():
    if bug in ("", "frozen", "divided"):
        for param, copy in zip(params, copies):
            param.data.copy_(copy)
    if bug == "divided":
        for source, of_rank in enumerate(params_of_ranks):
            for param in of_rank:
                dist.broadcast(param.data, source)
""",
    )
    .replace("optimizer.zero_grad()", "model.zero_grad()")
    .replace("        optimizer.step()", "        copy_gradients()\n        optimizer.step()\n        copy_weights()")
)


@pytest.mark.parametrize(
    ("bug", "code", "told"),
    [
        ("", 0, "tensors are equal"),
        ("flat", 0, "tensors are equal"),
        ("frozen", 1, "step 1: optimizer state of 3.bias: gradient of its copy differs on rank 1"),
        ("unrelated", 2, "the optimizer's steps see no gradient and change no weight"),
    ],
)
def test_copies_in_float32_train_though_no_weight_changes(
    bug: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("copies.py").write_text(COPIES)
    assert main(["run", "--steps", "1", "copies.py", *([bug] if bug else [])]) == code
    assert told in "".join(capsys.readouterr())


def test_copies_with_equal_values_have_no_names_of_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank steps on copies of one half of the parameters, and both halves have a norm, whose weights are ones."""
    norms = "nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()"
    Path("halves.py").write_text(COPIES.replace("nn.ReLU()", norms).replace("lr=1e-9", "lr=1e-3"))
    assert main(["run", "--steps", "2", "halves.py", "divided"]) == 0
    assert "tensors are equal" in capsys.readouterr().out


# The last layer has one output, so rank 1 has no element of its bias.
COPIES_OF_SHARDS = (
    FSDP2.replace("nn.Linear(16, 3))", "nn.Linear(16, 1)).bfloat16()")
    .replace("torch.randn(64, 8), torch.randint(0, 3, (64,))", "torch.randn(64, 8).bfloat16(), torch.ones(64, 1)")
    .replace(
        "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)",
        """
params = list(net.parameters())
copies = [param.detach().float() for param in params]
optimizer = torch.optim.AdamW(copies, lr=1e-2)
""",
    )
    .replace("nn.functional.cross_entropy(net(x), y)", "(net(x) - y).square().mean()")
    .replace(
        "    nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n    optimizer.step()\n    optimizer.zero_grad()",
        """
    for param, copy in zip(params, copies):
        copy.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        for param, copy in zip(params, copies):
            param.copy_(copy)
    net.zero_grad()
""",
    )
)


def test_copies_of_shards_are_compared_on_ranks_without_an_element(capsys: pytest.CaptureFixture[str]) -> None:
    Path("shards.py").write_text(COPIES_OF_SHARDS)
    assert main(["run", "--steps", "2", "shards.py"]) == 0
    assert "tensors are equal" in capsys.readouterr().out


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_code_2(use_orig_params: bool, capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = f"FullyShardedDataParallel(net, device_id=torch.device('cpu'), use_orig_params={use_orig_params})"
    text = DDP.replace("torch.nn.parallel import DistributedDataParallel", "torch.distributed.fsdp import *")
    Path("fsdp1.py").write_text(text.replace("DistributedDataParallel(net)", wrapped))
    assert main(["run", "--steps", "1", "fsdp1.py"]) == 2
    assert "fsdp1.py: the model is wrapped by torch's FullyShardedDataParallel (FSDP1)" in capsys.readouterr().err


def test_a_script_that_does_not_end_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    assert main(["run", "--limit-seconds", "5", "endless.py"]) == 2
    assert "still ran after 5 s" in capsys.readouterr().err


@pytest.mark.parametrize("bug", ["", "frozen"])
def test_a_large_tensor_is_kept_only_as_the_first_that_differs(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The second weight has 18,000 elements.
    large = DDP.replace("16", "3000").replace("3000, 3)", "3000, 6)").replace("64", "16")
    Path("large.py").write_text(large.replace("net[3].bias.grad", "net[3].weight.grad[2, 7]"))
    assert main(["run", "--steps", "1", "large.py", bug]) == bool(bug)
    output = capsys.readouterr().out
    expected = (
        "step 1: gradient of 3.weight differs on rank 1: at [2, 7] one process has " if bug else "tensors are equal"
    )
    assert expected in output and "a sum of" not in output


def test_the_model_that_is_trained_has_no_name_whoever_runs_before_it() -> None:
    frozen, teacher, student = torch.nn.Tanh(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer, recorder = torch.optim.SGD(student.parameters(), lr=0.1), Recorder()
    with recorder.hooks():
        for _ in range(2):
            with torch.no_grad():
                target = teacher(torch.ones(1, 2))
            (student(frozen(torch.ones(1, 2))) - target).sum().backward()
            optimizer.step()
    names = {key.name for key in recorder.recording.keys_of(Phase.OUTPUT)}
    weights = {(key.step, key.name) for key in recorder.recording.keys_of(Phase.START)}
    assert names == {"", "Tanh"}
    assert {(1, "weight"), (2, "weight"), (2, "Linear.weight")} <= weights and (1, "Linear.weight") not in weights


def test_weights_at_the_start_of_a_step_are_recorded_where_the_model_runs() -> None:
    model, recorder = torch.nn.Linear(2, 2), Recorder()
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.1), Key(2, Phase.START, "weight")
    with recorder.hooks():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.nn.Identity()(torch.ones(1))  # Only this rank may run it, and gathering weights takes all ranks.
        assert start not in recorder.recording.tensors
        model(torch.ones(1, 2))
    assert start in recorder.recording.tensors


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_average_that_one_rank_evaluates_is_no_difference(everywhere: bool) -> None:
    def recording(rank: int) -> Recording:
        model, average, recorder = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Recorder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for param in (*model.parameters(), *average.parameters()):
            torch.nn.init.ones_(param)
        torch.nn.init.constant_(average.weight, rank)
        with recorder.hooks():
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    if everywhere or not rank:
                        average(torch.ones(1, 2))
        return recorder.recording

    report = compare(recording(0), [recording(0), recording(1)], {})
    assert (report.first is not None) == everywhere
    assert report.first is None or (report.first.name, report.first.ranks) == ("Linear.weight", (1,))


def test_joined_calls_keep_what_else_was_recorded() -> None:
    outputs: dict[Key, Recorded] = {Key(1, Phase.OUTPUT, "", number): torch.ones(1, 2) for number in range(2)}
    recording = Recording(outputs, num_forwards={1: 2}, draws_of_loop=True, has_sharded_outputs=True)
    joined = with_joined_calls(recording, 2)
    assert joined.tensors.keys() == {Key(1, Phase.OUTPUT, "")}
    assert joined.draws_of_loop and joined.has_sharded_outputs


def test_gradients_before_clipping_are_looked_up_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5))), Recorder()
    num_lookups = 0
    named_params = Recorder._named_params

    def counting(self: Recorder, *models: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        nonlocal num_lookups
        num_lookups += 1
        return named_params(self, *models)

    params = dict(model.named_parameters())
    with recorder.hooks(), exact_norms(recorder.add_before_clipping):
        model(torch.ones(1, 2)).sum().backward()
        monkeypatch.setattr(Recorder, "_named_params", counting)
        for param in reversed(params.values()):
            torch.linalg.vector_norm(param)
            torch.linalg.vector_norm(param.grad)
    assert num_lookups == 1
    recorded = recorder.recording.tensors
    for name, param in params.items():
        assert param.grad is not None
        assert torch.equal(float_values(recorded[Key(1, Phase.UNCLIPPED, name)]), float_values(param.grad))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("is_packed", [False, True])
def test_recurrent_networks_have_no_dropout(kind: Callable[..., torch.nn.Module], is_packed: bool) -> None:
    network = kind(2, 3, num_layers=2, dropout=0.5)
    batch = torch.ones(4, 1, 2)
    inputs = torch.nn.utils.rnn.pack_padded_sequence(batch, [4]) if is_packed else batch
    with without_dropout():
        states = [network(inputs)[1] for _ in range(2)]
    network.eval()
    states.append(network(inputs)[1])
    leaves = [torch.utils._pytree.tree_leaves(state) for state in states]
    assert all(torch.equal(*pair) for other in leaves[1:] for pair in zip(leaves[0], other, strict=True))


def test_a_compiled_norm_needs_no_break_of_its_graph_in_any_step() -> None:
    model, recorder = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.hooks(), exact_norms(recorder.add_before_clipping):
        norm = torch.compile(lambda x: torch.linalg.vector_norm(x), backend="eager", fullgraph=True)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            assert norm(torch.tensor([3.0, 4.0])) == 5.0
            for param in model.parameters():
                norm(param.grad)
            optimizer.step()
            optimizer.zero_grad()


def test_norms_of_large_tensors_are_exact_to_the_last_place() -> None:
    grad = torch.randn(2**20, generator=torch.Generator().manual_seed(5))
    with exact_norms():
        norms = [torch.linalg.vector_norm(grad), torch.nn.utils.get_total_norm([grad])]
        assert torch.linalg.vector_norm(grad.double()).dtype is torch.float64
    for norm in norms:
        torch.testing.assert_close(norm, grad.double().norm().float(), rtol=2.0**-23, atol=0)
