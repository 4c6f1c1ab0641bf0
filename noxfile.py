# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]"]
# ///
"""Every command of the house, one session each, so that people and machines type the same words.

`nox` alone runs what a change must pass; `nox -l` lists the rest, such as `ordered`, which runs tests of ranks over a
transport with NCCL's rules. The environments are made by uv, which links torch from its cache instead of copying it: a
fresh one takes seconds. torch and our packages are always named in one install command, so that one resolution picks
them together and nothing replaces torch afterwards.
"""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2026.10.20"  # the first that we know to run sessions beside each other
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["house", "lint", "typecheck", "docs", "build", "integration", "tests"]

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
TORCH_DEFAULT = "2.13.0"
TORCH_VERSIONS = [version.strip() for version in os.environ.get("SCALE_TORCH", TORCH_DEFAULT).split(",")]
OPTIMIZERS = ["pytorch-optimizer>=4.1,<4.2", "einops>=0.8"]
# Programs of others that stand on ours: what each needs beside a package's own edges, and the tests that it has.
TRAINER = "packages/scale-train/tests/test_transformers_trainer.py"
CLIENTS: dict[str, tuple[str, list[str], list[str]]] = {
    "transformers": ("scale-train", [], ["tests/clients/test_clients_families.py", TRAINER]),
    "peft": ("scale-train", [], ["tests/clients/test_clients_adapters.py"]),
    "bitsandbytes": ("scale-train", ["bitsandbytes>=0.50"], ["tests/clients/test_clients_bitsandbytes.py"]),
    "torchao": ("scale-train", ["torchao>=0.18"], ["tests/clients/test_clients_torchao.py"]),
    "tools": ("scale-train", ["torchmetrics>=1.9", "torchdata>=0.11"], ["tests/clients/test_clients_tools.py"]),
    "loggers": ("scale-train", ["tensorboard>=2.18", "wandb>=0.17"], ["tests/clients/test_clients_loggers.py"]),
    "trl": ("scale-train", ["trl>=1.16"], [TRAINER]),
    "optimizers": (
        "scale-train",
        [*OPTIMIZERS, "timm>=1.0.20", "schedulefree>=1.4", "prodigyopt>=1.1", "adam-mini>=1.1", "heavyball>=3.2"],
        ["tests/clients/test_clients_optimizers.py"],
    ),
    "models": (
        "scale-train",
        ["diffusers>=0.36", "monai>=1.5", "x-transformers>=2.11", "vector-quantize-pytorch>=1.27"],
        ["tests/clients/test_clients_libraries.py"],
    ),
    "lightning": ("scale-lightning", [], ["packages/scale-lightning/tests"]),
}
# What `ordered` runs: what happens when ranks differ, fail or come late, and a step of each technique.
ORDERED: dict[str, list[str]] = {
    "scale-core": [
        *("test_contract.py", "test_desync_report.py", "test_exchange.py", "test_collectives.py", "test_work.py"),
        *("test_equal_values.py", "test_optimizer_steps.py", "test_all_ranks.py", "test_subgroup.py"),
    ],
    "scale-fsdp": [
        *("test_fsdp_contracts.py", "test_fsdp_recovery.py", "test_skipped_backward.py", "test_step_interrupts.py"),
        *("test_calls_compared_at_end.py", "test_backward_observers.py", "test_step.py", "test_precision.py"),
    ],
    "scale-oss": [
        *("test_oss.py", "test_reducer.py", "test_one_rank_alone.py"),
        *("test_oss_transparency.py", "test_sharded_data_parallel.py"),
    ],
    "scale-pipe": ["test_distributed_training.py"],
    "scale-tp": ["test_comm.py", "test_failed_pass.py", "test_divergence_hooks.py"],
    "scale-moe": ["."],
    "scale-adascale": ["."],
}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # ranks share the cores of one machine: a thread each
# Ranks wait for each other, so that one test at a time leaves cores idle: each core runs tests of its own.
IN_PARALLEL = ["-n", str(max(2, os.cpu_count() or 1)), "--dist", "worksteal"]

# Where this is set, each of the hundreds of processes that tests start compiles torch again: 2 to 7 s of CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# uv reads none of pip's settings. What this machine tells pip about where packages come from holds for uv as well.
for pip_name, uv_name, separator in (
    ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", " "),
    ("PIP_CERT", "SSL_CERT_FILE", " "),
):
    if pip_name in os.environ:
        os.environ.setdefault(uv_name, separator.join(os.environ[pip_name].split()))


@cache
def read_project(package: str) -> dict[str, Any]:
    """Returns the parsed pyproject.toml of a package, by the name of its distribution."""
    return nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")


def edges(package: str, *, for_tests: bool = False) -> list[str]:
    """Returns the package and all of ours that it needs, as declared and nothing more, in a stable order.

    For its tests also those of ours in its `test` group, with which it is tested and which it does not import.
    """
    group = nox.project.dependency_groups(read_project(package), "test") if for_tests else ()
    found = [package, *(name for name in group if name in PACKAGES)]
    for name in found:  # grows while it is read: what the edges need comes after them
        names = (re.split(r"[\[<>=!~; ]", line)[0] for line in read_project(name)["project"]["dependencies"])
        found += [name for name in names if name in PACKAGES and name not in found]
    return found


def editable(packages: Iterable[str]) -> list[str]:
    """Returns the arguments that install packages from the checkout."""
    return [word for package in packages for word in ("-e", f"./packages/{package}")]


def test_group(packages: Iterable[str]) -> list[str]:
    """Returns what the tests of these packages need from third parties."""
    return sorted(
        {name for package in packages for name in nox.project.dependency_groups(read_project(package), "test")}
        - set(PACKAGES)
    )


def share_bytecode(session: nox.Session, *, keep: bool) -> None:
    """Takes what Python has compiled of third parties from environments before this one, or keeps it for those after.

    A fresh environment would compile torch again, in each of the processes that begin at once. Python itself sees to it
    that what belongs to another version of a file is not used: it compares the file's time and size.
    """
    for site in Path(session.virtualenv.location).resolve().glob("lib/python*/site-packages"):
        cache = ROOT / ".nox" / "bytecode" / site.parent.name
        source, target = (site, cache) if keep else (cache, site)
        for compiled in source.rglob("__pycache__/*.pyc"):
            place = target / compiled.relative_to(source)
            if not place.exists() and (keep or place.parent.parent.exists()):
                place.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):  # by a session beside this one
                    os.link(compiled, place)


def install_everything(session: nox.Session, *tools: str) -> None:
    """Installs torch, all packages and tools in one resolution."""
    session.install(f"torch=={TORCH_DEFAULT}", *editable(PACKAGES), *tools)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small GPT on real text with two ranks; other options: `nox -s quickstart -- --ranks 4`."""
    session.install(f"torch=={TORCH_DEFAULT}", *editable(edges("scale-train")))
    session.run("scale-train", "lm", *(session.posargs or ["--ranks", "2", "--device", "cpu"]))


@nox.session(reuse_venv=False)
@nox.parametrize("torch", [nox.param(version, id=version) for version in TORCH_VERSIONS])
@nox.parametrize("package", [nox.param(name, id=name, tags=[name]) for name in PACKAGES])
def tests(session: nox.Session, package: str, torch: str) -> None:
    """Test one package where nothing but its declared edges is installed; `nox -t scale-fsdp` for one package."""
    home = f"packages/{package}"
    ours = editable(edges(package, for_tests=True))
    session.install(f"torch=={torch}", *ours, *test_group([package]), "pytest-xdist>=3.6")
    share_bytecode(session, keep=False)
    where = session.posargs or [f"{home}/tests", f"{home}/README.md", f"{home}/src"]
    session.run(
        "pytest",
        *IN_PARALLEL,
        "--durations=12",
        "--doctest-modules",
        "--doctest-glob=README.md",
        *where,
        env=ONE_THREAD,
    )
    share_bytecode(session, keep=True)


@nox.session(reuse_venv=False)
def integration(session: nox.Session) -> None:
    """Test the packages together: compositions, clients, faults, fuzz, programs of the documentation."""
    session.install(
        f"torch=={TORCH_DEFAULT}",
        *editable(edges("scale-train", for_tests=True)),
        *test_group(["scale-train"]),
        "pytest-xdist>=3.6",
    )
    share_bytecode(session, keep=False)
    where = session.posargs or [f"tests/{name}" for name in ("compositions", "clients", "faults", "fuzz", "docs")]
    session.run("pytest", *IN_PARALLEL, "--durations=12", *where, env=ONE_THREAD)
    share_bytecode(session, keep=True)


@nox.session
@nox.parametrize("client", [nox.param(name, id=name) for name in CLIENTS])
def clients(session: nox.Session, client: str) -> None:
    """Test one program that stands on ours, all cases of it: `nox -s "clients(transformers)"`."""
    package, needs, tests_of_client = CLIENTS[client]
    ours = editable(edges(package, for_tests=True))
    session.install(f"torch=={TORCH_DEFAULT}", *ours, *test_group([package]), *needs)
    session.run("pytest", "-m", "soak or not soak", *(session.posargs or tests_of_client), env=ONE_THREAD)


@nox.session(allow_parallel=True)
def house(session: nox.Session) -> None:
    """Check what holds between the packages: versions, edges, floors, imports, public names."""
    install_everything(session, "pytest>=8", "pytest-xdist>=3.6")
    session.run(
        "pytest",
        *IN_PARALLEL,
        "tests/test_house.py",
        "tests/test_docs.py",
        "tests/test_language.py",
        *session.posargs,
        env=ONE_THREAD,
    )
    share_bytecode(session, keep=True)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style and format; `nox -s lint -- --fix` fixes what can be fixed."""
    session.install("ruff>=0.17,<0.18")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(allow_parallel=True)
def typecheck(session: nox.Session) -> None:
    """Check the types of each package by itself, strictly."""
    install_everything(session, "mypy>=2.4,<2.5", "nox", *test_group(PACKAGES))
    for package in PACKAGES:
        session.run("mypy", f"packages/{package}/src")
    session.run(
        "mypy",
        "noxfile.py",
        "conftest.py",
        *(f"tests/test_{name}.py" for name in ("house", "docs", "language", "site")),
    )


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Build the site, with warnings as errors, and ask its search; `nox -s docs -- serve` shows it while you write."""
    session.install("mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1,<2", "ruff")  # the last formats signatures
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))
    if not session.posargs:
        session.install("pytest>=8", "lunr>=0.8")
        session.run("pytest", "tests/test_site.py")


@nox.session
def screenshots(session: nox.Session) -> None:
    """Look at pages of the built site, on a desk and on a phone, into docs-screenshots; needs a Chromium."""
    session.run("python", "tools/screenshots.py", *session.posargs)


@nox.session(allow_parallel=True)
def build(session: nox.Session) -> None:
    """Build and check every distribution, resolve the docs' install lines, and run scale-fsdp from its wheel alone."""
    session.install("twine", "pytest>=8", "uv")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        session.run("uv", "build", "--quiet", "--out-dir", str(dist), f"packages/{package}")
    files = sorted(str(path) for path in dist.iterdir() if path.name != ".gitignore")  # uv writes one
    if len(files) != 2 * len(PACKAGES):
        session.error(f"expected an sdist and a wheel of {len(PACKAGES)} packages, got {len(files)} files in {dist}")
    session.run("twine", "check", "--strict", *files)
    session.run("pytest", "tests/test_docs.py", "-k", "resolved", env={"SCALE_DIST": str(dist)})

    alone = Path(session.create_tmp()).resolve() / "alone"
    # As an option, --find-links would take the place of what this machine sets. And a version that stays while its
    # content changes must not come from a cache.
    links = ",".join(filter(None, [os.environ.get("UV_FIND_LINKS"), str(dist)]))
    fresh = ["--refresh-package", "scale-core", "--refresh-package", "scale-fsdp"]
    session.run("uv", "venv", "--clear", "--quiet", str(alone))
    python = str(alone / "bin" / "python")
    torch = f"torch=={TORCH_DEFAULT}"
    install = ["uv", "pip", "install", "--python", python, *fresh, torch, "scale-fsdp"]
    session.run(*install, env={"UV_FIND_LINKS": links})
    with session.chdir(alone):
        session.run(python, "-m", "doctest", str(ROOT / "packages/scale-fsdp/README.md"), external=True, env=ONE_THREAD)


# Each with what to install for it where its own requirements are not taken.
FAIRSCALE_CLIENTS = {
    "tango": ["ai2-tango==1.3.2"],
    "transformers": ["transformers==4.26.1"],
    "lightning": ["pytorch-lightning==1.9.5"],
    "classy_vision": ["classy-vision==0.7.0"],
    "stoke": ["stoke==0.2.1", "attrs"],
    "espnet": ["espnet==202511", "humanfriendly", "typeguard", "librosa", "soundfile", "pyyaml", "torch-complex"],
}


@nox.session(python="3.11")
@nox.parametrize("client", [nox.param(name, id=name) for name in (*FAIRSCALE_CLIENTS, "fairseq")])
def fairscale_clients(session: nox.Session, client: str) -> None:
    """Run programs that are written for FairScale, unmodified: `nox -s "fairscale_clients(tango)"` for one of them."""
    ours = [f"torch=={TORCH_DEFAULT}", "pytest>=8", "numpy<2", "setuptools<81", *editable(edges("scale-fairscale"))]
    if client == "fairseq":  # Only an old pip takes the metadata of omegaconf 2.0.6; fairseq is built without torch.
        session.install(*ours, "pip==23.2.1", "sacrebleu==2.3.1", "regex", "tqdm", "bitarray", "cffi")
        pip = ("python", "-m", "pip", "install", "--quiet")
        session.run(*pip, "hydra-core==1.0.7", "omegaconf==2.0.6")
        session.run(*pip, "--no-deps", "fairseq==0.12.2")
    else:
        requirement, *needs = FAIRSCALE_CLIENTS[client]
        session.install(*ours, *(needs or [requirement]))
        if needs:  # It asks for FairScale, for DeepSpeed, or for much that its trainer doesn't use.
            session.install("--no-deps", requirement)
    pytest = ("pytest", "-p", "no:hydra_pytest", "packages/scale-fairscale/tests/clients", "-k", client)
    session.run(*pytest, *session.posargs, env={"FAIRSCALE_CLIENT": client})  # hydra's plugin needs an old Python


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Run every benchmark and tool in its smallest form; `nox -s benchmarks -- data_parallel --turns 5` runs one."""
    tools = ["matplotlib>=3.8", "scikit-learn>=1.5", *OPTIMIZERS]  # adascale_digits and optimizers need these
    install_everything(session, *test_group(PACKAGES), *tools)
    if session.posargs:
        name, *arguments = session.posargs
        session.run("python", f"benchmarks/{name}.py", *arguments)
        return
    for script in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")]):
        if '__name__ == "__main__"' in script.read_text(encoding="utf-8"):
            session.run("python", str(script.relative_to(ROOT)), "--smoke")


@nox.session
def examples(session: nox.Session) -> None:
    """Run every program of docs/examples, and the code of guides and READMEs that the default run leaves out."""
    install_everything(session, *test_group(PACKAGES))
    session.run(
        "pytest",
        "-m",
        "soak or not soak",
        "tests/test_docs.py",
        "tests/docs",
        *session.posargs,
        env=ONE_THREAD,
    )


@nox.session
def soak(session: nox.Session) -> None:
    """Run the full matrices of which `tests` takes pairs."""
    install_everything(session, *test_group(PACKAGES))
    session.run("pytest", "-m", "soak", *(session.posargs or ["packages", "tests"]), env=ONE_THREAD)


@nox.session
def ordered(session: nox.Session) -> None:
    """Run tests of ranks on CPUs over a transport with NCCL's rules; `nox -s ordered -- FILE` runs one file."""
    install_everything(session, *test_group(PACKAGES), "pytest-xdist>=3.6")
    files = [f"packages/{package}/tests/{name}" for package, names in ORDERED.items() for name in names]
    session.run(
        "pytest", *IN_PARALLEL, *(session.posargs or files), env={**ONE_THREAD, "SCALE_TEST_BACKEND": "ordered"}
    )


if __name__ == "__main__":
    nox.main()
