"""The configuration: the same options from a command line, a TOML file and Python, and all mistakes told at once."""

import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from scale_tools.plan.options import PlanOptions, plan_help_text
from scale_train import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions, train
from scale_train.cli import main, parse
from scale_train.commands import installed_commands
from scale_train.configuration.checks import LIMITS
from scale_train.configuration.command_line import with_checked_types
from scale_train.configuration.fields import option_fields
from scale_train.configuration.help import help_text, overview
from scale_train.configuration.problems import OptionsError
from scale_train.configuration.reference import reference
from scale_train.configuration.resolve import MAX_RANKS_PER_CORE  # noqa: F401  torch is loaded here, and not by what is tested
from scale_train.configuration.toml_file import read_toml, to_toml, value_of
from scale_train.errors import InputError

EVERYTHING_CHANGED = Options(
    data=DataOptions(
        text=(Path("a b"), Path('c"\\d\n')), sequence=64, batch=6, held_out_tokens=0, text_field="body",
        tokenizer="byte", token_cache=Path("cache"),
    ),
    model=ModelOptions(size="small", layers=3, width=64, heads=4, untied_embeddings=True, dropout=0.1, loss_chunk=9),
    parallel=ParallelOptions(
        ranks=3, parallel="oss", device="cpu", precision="bf16", accumulate=2, sync_each_micro_batch=False,
        checkpoint_activations="budget:2GiB", tensor_parallel=2, sequence_parallel=True, overlap_pieces=2,
        context_parallel=2, context_attention="ulysses", stages=4, schedule="zb_v", chunks=3, data_parallel="fsdp",
        reshard_after_forward=False,
    ),
    optimizer=OptimizerOptions(
        steps=7, lr=1e-30, warmup=0, weight_decay=0.25, clip=1.5, optimizer_kernel="foreach", adascale=True,
        adascale_scale=3.5,
    ),
    run=RunOptions(
        seed=2**62, out=Path("~/ümlaut"), resume=Path("r"), save_every=0, async_save=True, evaluate_every=0,
        log_every=3, log_format="json",
        prompt='"quoted" \t\x7f\x01 ☃', sample_length=0,
        peak_flops=1e12, log_to=("wandb", "tensorboard"),
    ),
)  # fmt: skip
# What contradicts some of the above.
THE_REST_CHANGED = Options(
    model=ModelOptions(model=Path("llama.json")),
    parallel=ParallelOptions(offload_activations=True, cpu_offload=True),
    run=RunOptions(export=Path("e")),
)
MIXTURE = Options(
    model=ModelOptions(experts=8, top_k=3, shared_experts=2, capacity_factor=1.25, aux_loss_coef=0.0),
    parallel=ParallelOptions(expert_parallel=4),
)
ALL_CHANGED = (EVERYTHING_CHANGED, THE_REST_CHANGED, MIXTURE)

REFERENCE = Path(__file__).parents[3] / "docs" / "configuration.md"
NUMERIC = [field for field in option_fields().values() if field.type in (int, float)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def problems_of(*words: str) -> tuple[str, ...]:
    with pytest.raises(OptionsError) as told:
        parse(["lm", *words])
    return told.value.problems


def test_every_option_is_changed_in_what_is_printed():
    for field in option_fields().values():
        values = {value_of(options, field) for options in ALL_CHANGED}
        assert values != {field.default}, field.key


@pytest.mark.parametrize("options", [Options(), *ALL_CHANGED])
def test_the_printed_file_repeats_the_run(options, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Loggers need not be installed.
    Path("llama.json").write_text('{"model_type": "llama"}')
    Path("run.toml").write_text(to_toml(options), encoding="utf-8")
    assert parse(["lm", "--config", "run.toml"]) == options
    assert main(["lm", "--config", "run.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == to_toml(options)


def test_a_flag_overrides_the_file_in_both_directions():
    Path("run.toml").write_text("[optimizer]\nlr = 1\nadascale = true\n[model]\nlayers = 2\n")
    options = parse(["lm", "--config", "run.toml", "--adascale", "false", "--layers", "3", "--lr=2e-3"])
    assert (options.optimizer.lr, options.optimizer.adascale, options.model.layers) == (2e-3, False, 3)
    in_file = parse(["lm", "--config", "run.toml"])
    assert (in_file.optimizer.lr, in_file.optimizer.adascale) == (1.0, True)
    assert isinstance(in_file.optimizer.lr, float)


def test_all_mistakes_are_told_at_once_with_the_nearest_name(capsys):
    Path("run.toml").write_text(
        "[optimiser]\nlr = 1\n[optimizer]\nlearning_rate = 1\nstesp = 2\nwarmup = 1.5\n"
        '[parallel]\nparallel = "fdsp"\nreshard_after_forward = 1\n[run]\nseed = true\n[data]\ntext = "a"\n'
    )
    words = ["--config", "run.toml", "--stpes", "3", "--lr", "fast", "--parallel", "dpd", "--batch", "0", "7"]
    words += ["--adascale-scale", "3", "--clip", "nan", "--prompt"]
    assert problems_of(*words) == (
        "run.toml: optimiser: no such table; the nearest is optimizer",
        "run.toml: optimizer.learning_rate: no such key; the nearest is optimizer.lr",
        "run.toml: optimizer.stesp: no such key; the nearest is optimizer.steps",
        "run.toml: optimizer.warmup = 1.5: expected a whole number",
        "run.toml: parallel.parallel = 'fdsp': expected fsdp, sharded-ddp, oss, ddp, pipe or none; the nearest is fsdp",
        "run.toml: parallel.reshard_after_forward = 1: expected true or false",
        "run.toml: run.seed = True: expected a whole number",
        "run.toml: data.text = 'a': expected a list, each a path",
        "--stpes: no such option; the nearest is --steps",
        "--lr fast: expected a number",
        "--parallel dpd: expected fsdp, sharded-ddp, oss, ddp, pipe or none; the nearest is ddp",
        "--batch: expected a whole number, got 0 7",
        "--prompt: expected a text, got nothing",
        "--clip nan: 0 or more is needed",
        "--adascale-scale 3 has no effect without --adascale",
    )
    assert main(["lm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("scale-train: 15 problems\n  run.toml: optimiser: no such table")
    assert err.count("\n") == 16


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[data\n", "--config run.toml: no TOML: Expected ']'"),
        ("lr = 1\n", "run.toml: lr: no such table; it belongs to the table [optimizer]"),
        ("[run]\nseed = 1\nseed = 2\n", "--config run.toml: no TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(content, told):
    Path("run.toml").write_text(content)
    assert problems_of("--config", "run.toml")[0].startswith(told)
    assert problems_of("--config", "nowhere.toml") == (
        "--config nowhere.toml: cannot be read (No such file or directory)",
    )


def test_a_flag_that_no_longer_exists_says_what_to_write():
    assert problems_of("--no-reshard-after-forward") == (
        "--no-reshard-after-forward: no such option; write --reshard-after-forward false",
    )
    assert problems_of("fast") == ("fast: expected options, as --steps 400",)


def test_a_text_that_is_no_unicode_is_in_no_file():
    with pytest.raises(OptionsError, match=r"--prompt .* TOML holds Unicode alone"):
        to_toml(replace(Options(), run=RunOptions(prompt="\udcff")))


def test_every_number_has_a_least_and_a_most():
    assert {field.name for field in NUMERIC} == {*LIMITS, "lr", "dropout"} - {"vocabulary"}  # of plan


@pytest.mark.parametrize(
    "flag", [field for field in option_fields().values() if field.type in (int, float)], ids=lambda field: field.name
)
def test_numbers_that_cannot_be_meant_are_refused(flag):
    for number in ("-1", "1" + "0" * 30, "nan", "inf"):
        if flag.name == "lr" and number.startswith("1"):
            continue  # A learning rate of any size diverges, which is told in time.
        problem, *_ = [each for each in problems_of(flag.flag, number) if each.startswith(f"{flag.flag} ")]
        assert "needed" in problem or "at most" in problem or "expected" in problem


def test_no_word_is_dropped():
    Path("a").write_text("")
    for words, told in (
        ("--text a --text b", "--text: given twice; name all after one"),
        ("--steps 1 --steps=2", "--steps: given twice; leave one out"),
        ("--out=", "--out : expected a path"),
        ("--print-config yes", "--print-config: expected nothing after it, got yes"),
        (f"--seed {2**63}", f"--seed {2**63}: more than can be meant; at most {2**63 - 1}"),
        ("--config a b", "--config: expected one file, got a b"),
        ("--config a --config b", "--config: expected one file, got b"),
    ):
        assert problems_of(*words.split())[0] == told
    Path("run.toml").write_text('[run]\nlog_to = ["tensorboard"]\n[data]\ntext = ["a"]\n')
    options = parse(["lm", "--config", "run.toml", "--log-to", "--text"])
    assert options.run.log_to == () and options.data.text == ()
    assert parse(["lm", "--steps=2"]).optimizer.steps == 2


def test_no_flag_denies_what_its_text_says():
    assert [flag for flag in option_fields() if flag.startswith("--no-")] == []
    by_text = {flag: field.help for flag, field in option_fields().items()}
    assert all(len(text) > 10 for text in by_text.values())
    names = [field.name for field in option_fields().values()]
    assert len(names) == len(set(names)), "two tables have a key of one name, and so one flag"


def test_help_names_every_option_and_loads_no_torch():
    shown = help_text(80)
    assert all(f"  {flag}" in shown for flag in option_fields())
    of_plan = plan_help_text(80)
    assert all(f"  --{each.name.replace('_', '-')} " in of_plan for each in fields(PlanOptions))
    commands = installed_commands()
    of_all = overview(((name, command.summary) for name, command in commands.items()), 80)
    assert all(f"\n  {name} " in of_all for name in commands)
    for page in (shown, of_plan, of_all):
        assert max(map(len, page.splitlines())) <= 80 and "None" not in page
    program = (
        "import sys; from scale_train.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    for words, told in ((["--help"], "False 0"), (["--stpes", "3"], "False 2"), (["--print-config"], "False 0")):
        ended = subprocess.run(
            [sys.executable, "-c", program, "lm", *words], capture_output=True, text=True, timeout=600, check=True
        )
        assert ended.stdout.splitlines()[-1] == told


def test_a_printed_file_has_every_key():
    tables = tomllib.loads(to_toml(EVERYTHING_CHANGED))
    written = {f"{table}.{name}" for table, keys in tables.items() for name in keys}
    assert {field.key for field in option_fields().values()} - written == {"model.model", "run.export"}
    rest = tomllib.loads(to_toml(THE_REST_CHANGED))
    assert (rest["model"]["model"], rest["run"]["export"]) == ("llama.json", "e")
    assert list(tables) == [field.name for field in fields(Options)]


@pytest.mark.skipif(not REFERENCE.exists(), reason="the page is in the repository alone")
def test_the_reference_is_made_from_the_dataclasses():
    told = "python -m scale_train.configuration.reference > docs/configuration.md"
    assert REFERENCE.read_text(encoding="utf-8") == reference(), f"run {told}"


def test_python_trains_by_the_same_names_and_names_what_is_wrong():
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    given = Options(
        data=DataOptions(text=["text"], sequence=16, batch=4),
        model=ModelOptions(layers=1, width=16, heads=2),
        parallel=ParallelOptions(parallel="none", device="cpu"),
        optimizer=OptimizerOptions(steps=2, clip=1),
        run=RunOptions(out="run", log_format="plain", sample_length=0),
    )
    options = with_checked_types(given)
    assert options.data.text == (Path("text"),) and options.run.out == Path("run")
    assert with_checked_types(Options(model=ModelOptions(model="llama"))).model.model == Path("llama")
    summary = train(given)
    assert summary.steps == 2 and summary.held_out_bits_per_byte > 0
    kept = read_toml(Path("run/config.toml"))
    assert kept.problems == [] and parse(["lm", "--config", "run/config.toml"]) == replace(
        options, parallel=replace(options.parallel, ranks=1), run=replace(options.run, out=None)
    )
    wrong = replace(options, optimizer=OptimizerOptions(steps="2", lr=-1.0))
    with pytest.raises(InputError, match=r"optimizer\.steps='2': expected a whole number"):
        train(wrong)
    with pytest.raises(InputError, match=r"--lr -1\.0: a number above 0 is needed"):
        train(replace(options, optimizer=OptimizerOptions(lr=-1.0)))
