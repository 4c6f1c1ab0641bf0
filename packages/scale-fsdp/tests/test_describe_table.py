"""The description as a table that people read."""

import torch

from scale_fsdp.description import DescribedBuffer, DescribedUnit, Description, format_table, size_text

CPU = torch.device("cpu")
FULL, HALF = torch.float32, torch.bfloat16


def buffer(
    *names: str,
    numel: int,
    trains: bool = True,
    cut: tuple[str, ...] = (),
    copies: int = 1,
    compute: torch.device = CPU,
    kept: int = 0,
) -> DescribedBuffer:
    shard = -(-numel // 2)
    return DescribedBuffer(
        names, numel, shard, 2 * shard - numel, 2, copies, FULL, HALF, FULL, CPU, compute, trains,
        4 * shard, 2 * 2 * shard, kept, 4 * 2 * shard, 4 * shard * trains, cut,
    )  # fmt: skip


def test_it_reads_as_a_table():
    first = DescribedUnit(
        "embed", "Embedding", (buffer("embed.weight", numel=12345, cut=("embed.weight",)),), False, (), ("",)
    )
    second = DescribedUnit(
        "body", "Block", (buffer("a", "b", numel=2000, trains=False), buffer("c", numel=10)), True, (), ("",)
    )
    root = DescribedUnit("", "Model", (), True, ("embed",), ())
    description = Description(
        "Model", (root, first, second), 28_712, 57_000, 24_712, 49_384, 24_712, {"backward": ("", "body", "embed")}
    )
    assert format_table(description) == str(description)
    assert str(description).splitlines() == [
        "Model: 3 units, 4 parameters, 14,355 elements on 2 ranks",
        "parameters() yields this rank's shards of them; scale_core.shard.full_shape(param), full_numel(param) and",
        "num_parameters(model) count full parameters",
        "unit   class      parameters  elements  shard  padding  shards in  computes  reduces  lives on",
        "root   Model               0         0      0        0                                shares with embed",
        "embed  Embedding           1    12,345  6,173        1  float32    bfloat16  float32  cpu; "
        "stays gathered after its forward",
        "body   Block               2     2,000  1,000        0  float32    bfloat16  -        cpu; frozen",
        "                           1        10      5        0  float32    bfloat16  float32  cpu",
        "",
        "memory on this rank",
        "shards     28.0 KiB  always",
        "gathered   55.7 KiB  at most, in a forward or backward",
        "gradients  24.1 KiB  of the shards",
        "           48.2 KiB  at most beside them, of one unit before it is reduced",
        "optimizer  24.1 KiB  for each state of an elementwise one: 48.3 KiB with Adam",
        "",
        "cut at elements, since rows would pad too much",
        "  embed.weight",
        "",
        "order of use, backward",
        "  root, body, embed",
    ]


def test_what_lives_at_several_places_says_so():
    spread = buffer("weight", numel=2048, copies=3, compute=torch.device("cuda", 1), kept=1024)
    lines = str(
        Description("Model", (DescribedUnit("", "Model", (spread,), True, (), ()),), 0, 0, 0, 0, 0, {})
    ).splitlines()
    assert lines[0].endswith("on 6 ranks")
    assert lines[4].endswith("cpu, computes on cuda:1; 3 copies, each on 2 ranks; 1.0 KiB stay after its forward")


def test_sizes_are_written_in_the_unit_that_suits_them():
    sizes = [0, 1023, 1024, 1536, 5 * 2**20, 7 * 2**30, 3000 * 2**40]
    assert [size_text(size) for size in sizes] == [
        "0 B", "1,023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "7.0 GiB", "3,000.0 TiB",
    ]  # fmt: skip


def test_long_lists_are_broken_between_names():
    names = tuple(f"layers.{number}.weight" for number in range(20))
    unit = DescribedUnit("", "Model", (buffer(*names, numel=40, cut=names),), True, (), ())
    lines = str(Description("Model", (unit,), 0, 0, 0, 0, 0, {})).splitlines()
    lines = lines[lines.index("cut at elements, since rows would pad too much") + 1 :]
    assert max(map(len, lines)) <= 102 and len(lines) > 1
    assert " ".join(line.strip() for line in lines) == ", ".join(names)
