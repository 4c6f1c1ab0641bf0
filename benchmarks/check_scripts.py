"""What `scale-check run` says of training scripts that others wrote, and what it costs.

    python benchmarks/check_scripts.py --sources DIR           # all scripts, 3 turns
    python benchmarks/check_scripts.py --sources DIR nanoGPT   # those whose names contain a word
    python benchmarks/check_scripts.py --sources DIR --date DATE   # also writes results/DATE-check_scripts.*
    python benchmarks/check_scripts.py --smoke                 # a loop of a few lines, which needs no sources

Each script runs on two ranks over gloo, with one thread each: under torchrun, and under `scale-check run`, for the same
three steps. *Time* is from the start of the command to its end, and *CPU* the time of all its processes; both include
imports. The figures are medians over the turns. The last column is what the check says of the script with one planted
error, after one step.

You fetch the scripts: `DIR` has clones of `karpathy/nanoGPT`, `pytorch/torchtitan`, `huggingface/accelerate` and
`huggingface/transformers`. Install `torchtitan==0.2.2`, `torchdata`, `triton`, `transformers`, `accelerate`, `datasets`
and `evaluate`, with the release of transformers that its example belongs to. Everything else is random, and small:

- nanoGPT's `train.py`: the data, and a GPT of 4 layers, 128 wide. Three lines that name a CUDA device are changed.
- torchtitan's trainer: `llama3` as `debugmodel`, with the test data and the tokenizer of its repository, under FSDP2. A
  starter gives it the functions of a device that `torch.cpu` lacks, and has FSDP2 sum where gloo can't multiply. It
  begins from torchtitan's seed checkpoint.
- Accelerate's `nlp_example.py`: model, tokenizer, data set and metric lie in the folder under the names that it loads.
  The second row leaves the schedule out of `prepare`, because a prepared one steps once for each rank.
- transformers' `run_clm.py`: its options name a local text, a local tokenizer and the size of the model. The metric
  lies in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Table, save

STEPS = 3
HEADS = ("script", "alone", "checked", "time", "CPU", "verdict", "planted", "with it")


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        name: Of its row.
        path: Where it is in the sources.
        prepare: Writes all it needs into a folder, but for the script.
        arguments: Of the script.
        edits: What is changed in it: pairs of a text and its replacement.
        planted: The error that is planted, in words.
        bug: The edits that plant it.
    """

    name: str
    path: str
    prepare: Callable[[Path, Path], None]
    arguments: str
    edits: tuple[tuple[str, str], ...] = ()
    planted: str = ""
    bug: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Cost:
    """Seconds of a command, and CPU seconds of all its processes."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Row:
    """A script under torchrun, and under the check."""

    script: str
    alone: Cost
    checked: Cost
    verdict: str
    planted: str
    with_bug: str

    def cells(self) -> list[str]:
        return [
            self.script,
            f"{self.alone.seconds:.1f} s",
            f"{self.checked.seconds:.1f} s",
            f"{self.checked.seconds / self.alone.seconds:.1f}",
            f"{self.checked.cpu_seconds / self.alone.cpu_seconds:.1f}",
            self.verdict,
            self.planted,
            self.with_bug,
        ]


LOOP = """import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

TITAN_STARTER = """import os
import torch, torch._utils
torch._utils._get_available_device_type = lambda: "cpu"
os.environ["LOCAL_RANK"] = "0"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: type("Properties", (), {"total_memory": 2**34})
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *args: None
from torch.distributed.fsdp import FSDPModule
set_factor = FSDPModule.set_gradient_divide_factor
def set_factor_and_sum(self, factor):
    set_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)
FSDPModule.set_gradient_divide_factor = set_factor_and_sum
from torchtitan.train import Trainer, main
main(Trainer)
"""
TITAN_ARGUMENTS = (
    "--model.name llama3 --model.flavor debugmodel --training.dataset c4_test --training.seq_len 128 "
    "--training.local_batch_size 4 --training.steps 3 --model.hf_assets_path ./tests/assets/tokenizer "
    "--training.mixed_precision_param float32 --checkpoint.enable --checkpoint.load_step 0"
)
TITAN_BUG = """import torchtitan.models.llama3.infra.parallelize as parallelize
parallelize.disable_fsdp_gradient_division = lambda model: None
main(Trainer)"""

METRIC = """import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""
WORDS = ["".join(random.Random(number).choices("abcdefghij", k=2 + number % 6)) for number in range(500)]


def sentence(seed: int) -> str:
    """A random sentence."""
    generator = random.Random(seed)
    return " ".join(generator.choices(WORDS, k=generator.randrange(4, 12)))


def prepare_nothing(folder: Path, sources: Path) -> None:
    """The loop makes its own data."""


def prepare_nanogpt(folder: Path, sources: Path) -> None:
    """Copies what `train.py` reads, and draws random data."""
    for name in ("model.py", "configurator.py", "config"):
        path = sources / "nanoGPT" / name
        shutil.copytree(path, folder / name) if path.is_dir() else shutil.copy(path, folder)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    for name in ("train.bin", "val.bin"):
        tokens = torch.randint(65, (100_000,), generator=generator, dtype=torch.int16)
        (data / name).write_bytes(tokens.numpy().tobytes())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def prepare_titan(folder: Path, sources: Path) -> None:
    """Copies torchtitan's test data, and has it write the checkpoint that it begins from."""
    shutil.copytree(sources / "torchtitan" / "tests" / "assets", folder / "tests" / "assets")
    (folder / "seed.py").write_text(TITAN_STARTER)
    command = [*torchrun(1), "seed.py", *TITAN_ARGUMENTS.split()[:-2], "--checkpoint.create_seed_checkpoint"]
    run(command, folder)


def prepare_accelerate(folder: Path, sources: Path) -> None:
    """Writes a small BERT, pairs of sentences and a metric under the names that the example loads."""
    write_model(folder / "bert-base-cased")
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    files = ""
    for split, count in (("train", 32), ("validation", 64), ("test", 64)):
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
        with (data / f"{split}.jsonl").open("w") as file:
            for index in range(count):
                pair = {"sentence1": sentence(index), "sentence2": sentence(index + index % 3)}
                file.write(json.dumps({**pair, "label": int(index % 3 == 0), "idx": index}) + "\n")
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    write_metric(folder, "glue")


def prepare_transformers(folder: Path, sources: Path) -> None:
    """Writes a tokenizer, a text and a metric."""
    write_model(folder / "tokenizer")
    (folder / "train.txt").write_text("\n".join(map(sentence, range(3000))))
    write_metric(folder, "accuracy")


def write_model(folder: Path) -> None:
    """Writes a tokenizer of random words, and a random BERT of 4 layers, 128 wide."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*special, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names: dict[str, Any] = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=False))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    new_tokenizer: Any = PreTrainedTokenizerFast
    fast = new_tokenizer(tokenizer_object=tokenizer, model_max_length=512, model_input_names=inputs, **names)
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def write_metric(folder: Path, name: str) -> None:
    """Writes a metric where `evaluate.load` finds it first."""
    (folder / name).mkdir()
    (folder / name / f"{name}.py").write_text(METRIC)


CUDA_LINES = (
    ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
    ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
)
PREPARED = "model, optimizer, train_dataloader, eval_dataloader, lr_scheduler"
WITHOUT_SCHEDULE = ((PREPARED, PREPARED.removesuffix(", lr_scheduler")),)
WITHOUT_MODEL = ((PREPARED.removesuffix(", lr_scheduler"), "optimizer, train_dataloader, eval_dataloader"),)
WITHOUT_GRADIENT = """bias = model.transformer.h[0].mlp.c_fc.bias
        bias.register_hook(lambda grad: grad * (training_args.process_index == 0))
        """
SCRIPTS = (
    Script(
        "nanoGPT",
        "nanoGPT/train.py",
        prepare_nanogpt,
        "config/train_shakespeare_char.py --device=cpu --compile=False --backend=gloo --eval_iters=2 --log_interval=1 "
        "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters=2000 --dropout=0.1 "
        f"--gradient_accumulation_steps=4 --max_iters={STEPS - 1}",
        CUDA_LINES,
        "no micro-batch is reduced",
        (("= (micro_step == gradient_accumulation_steps - 1)", "= False"),),
    ),
    Script(
        "torchtitan 0.2.2, FSDP2",
        "",
        prepare_titan,
        TITAN_ARGUMENTS,
        (),
        "FSDP2 divides gradients once more",
        (("main(Trainer)", TITAN_BUG),),
    ),
    Script("Accelerate", "accelerate/examples/nlp_example.py", prepare_accelerate, "--cpu"),
    Script(
        "Accelerate, schedule not prepared",
        "accelerate/examples/nlp_example.py",
        prepare_accelerate,
        "--cpu",
        WITHOUT_SCHEDULE,
        "the model is not prepared",
        WITHOUT_MODEL,
    ),
    Script(
        "transformers",
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        prepare_transformers,
        "--model_type gpt2 --config_overrides n_embd=128,n_layer=4,n_head=4,n_positions=128 --tokenizer_name tokenizer "
        "--train_file train.txt --do_train --do_eval --max_eval_samples 8 --output_dir output --use_cpu True "
        f"--ddp_backend gloo --block_size 128 --per_device_train_batch_size 4 --max_steps {STEPS} "
        "--report_to none --save_strategy no",
        (),
        "rank 1 has no gradient of a bias",
        (("train_result = trainer.train(", WITHOUT_GRADIENT + "train_result = trainer.train("),),
    ),
)
SMOKE = Script("a loop", "", prepare_nothing, "")


def torchrun(num_ranks: int) -> list[str]:
    """The command before a script."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def run(command: Sequence[str], folder: Path, codes: Sequence[int] = (0,)) -> tuple[Cost, str]:
    """Runs a command in a folder and returns its cost, and what it printed last on stdout."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"), "1")
    environment = {**os.environ, **offline, "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    shutil.rmtree(folder / "output", ignore_errors=True)  # The Trainer refuses one that is not empty.
    before, start = _cpu_seconds(), time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    cost = Cost(time.monotonic() - start, _cpu_seconds() - before)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return cost, (done.stdout.splitlines() or [""])[-1]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def edited(text: str, edits: Sequence[tuple[str, str]]) -> str:
    """The script with some of its text replaced."""
    for old, new in edits:
        if old not in text:
            raise ValueError(f"the script has no longer {old!r}: use the release that this benchmark was written for")
        text = text.replace(old, new)
    return text


def measure(script: Script, sources: Path, turns: int) -> Row:
    """Runs a script under torchrun and under the check, in turn, and once with its bug."""
    with tempfile.TemporaryDirectory(prefix="check-scripts-") as temp_dir:
        folder = Path(temp_dir)
        script.prepare(folder, sources)
        starter = LOOP if script is SMOKE else TITAN_STARTER
        text = edited((sources / script.path).read_text() if script.path else starter, script.edits)
        (folder / "train.py").write_text(text)
        (folder / "wrong.py").write_text(edited(text, script.bug))
        arguments = script.arguments.split()
        check = [sys.executable, "-m", "scale_check.cli", "run", "--json", "--steps"]
        alone, checked = [], []
        verdict = ""
        for _ in range(turns):
            alone.append(run([*torchrun(2), "train.py", *arguments], folder)[0])
            cost, printed = run([*check, str(STEPS), "train.py", *arguments], folder, (0, 1))
            verdict = verdict_of(printed)
            checked.append(cost)
        printed = run([*check, "1", "wrong.py", *arguments], folder, (0, 1))[1] if script.bug else ""
        with_bug = verdict_of(printed) if script.bug else ""
    return Row(script.name, middle(alone), middle(checked), verdict, script.planted, with_bug)


def middle(costs: Sequence[Cost]) -> Cost:
    """The medians of some costs."""
    return Cost(median(cost.seconds for cost in costs), median(cost.cpu_seconds for cost in costs))


def verdict_of(printed: str) -> str:
    """A report as JSON in a few words."""
    with suppress(ValueError):
        report = json.loads(printed)
        first = report["first"]
        if first is not None:
            return f"step {first['step']}: {first['phase']} {first['name']}"
        return f"right: {report['num_compared']} tensors, at most {report['largest_ratio']:.1f} times the rounding"
    raise RuntimeError(f"the check has no report: {printed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only scripts whose names contain one of these")
    parser.add_argument("--sources", type=Path, help="the folder with the clones")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a loop of a few lines, once")
    parser.add_argument("--date", help="save the results under this date")
    arguments = parser.parse_args()
    if not arguments.smoke and arguments.sources is None:
        parser.error("expected --sources, a folder with clones of the repositories that --help names")
    if arguments.smoke:
        print(Table("A loop", HEADS, [measure(SMOKE, Path(), 1).cells()]).markdown())
        return
    rows: list[Row] = []
    for script in SCRIPTS:
        if not arguments.words or any(word in script.name for word in arguments.words):
            rows.append(measure(script, arguments.sources.resolve(), arguments.turns))
            print(" | ".join(rows[-1].cells()), flush=True)
    table = Table(f"Three steps on two ranks, {arguments.turns} turns", HEADS, [row.cells() for row in rows])
    print(table.markdown())
    if arguments.date:
        save("check_scripts", arguments.date, __doc__ or "", [table], [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
