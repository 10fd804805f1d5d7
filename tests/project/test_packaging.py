"""What pip makes of this repository: how a build without torch fails, and what a wheel needs.

The wheel is made from a source distribution, as `python -m build` does it, with the objects of the
last build, in place: whatever the source distribution lacks makes them out of date, and its build
fails.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from test_build import FLAGS

import zshard
from zshard import _build_check
from zshard._built import digest, note_on

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
HOOKS = [f"{hook}_{kind}" for hook in ("get_requires_for_build", "build") for kind in ("wheel", "sdist", "editable")]  # fmt: skip


def run(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with none of the build's variables."""
    plain = {name: value for name, value in os.environ.items() if name not in FLAGS}
    return subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**plain, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


# --- builds that cannot be ------------------------------------------------------------------------


def hook(name: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Calls a hook of the backend as pip does, where nothing is installed but what is in `path`."""
    folders = [str(ROOT / "tools"), *map(str, path)]
    script = f"import sys; sys.path += {folders}; import build_backend as b; print(b.{name}('.'))"
    return run(sys.executable, "-I", "-S", "-c", script, cwd=folder)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_that_torch_is_missing(tmp_path: Path, name: str) -> None:
    done = hook(name, tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("error: zshard must be compiled against")
    assert "python -m build --no-isolation" in done.stdout and "Traceback" not in done.stdout


def test_missing_or_old_setuptools_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    assert "['setuptools>=77']" in hook("get_requires_for_build_wheel", tmp_path, tmp_path).stdout
    done = hook("build_wheel", tmp_path, tmp_path)
    assert done.returncode == 1 and "needs setuptools 77 or newer, and there is none" in done.stdout
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\n")
    done = hook("build_wheel", tmp_path, tmp_path)
    assert done.returncode == 1 and "and this is 65.5.0" in done.stdout
    assert "pip install 'setuptools>=77'" in done.stdout and "Traceback" not in done.stdout


# --- another torch --------------------------------------------------------------------------------


def test_another_torch_is_refused_before_the_extension_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.99.1+cu199'\n")
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(zshard.__file__).parent.parent)!r}]
try:
    import zshard
except ImportError as error:
    print(error)
    print(sorted(name for name in sys.modules if name.startswith("zshard.")))
"""
    said = run(sys.executable, "-c", script, cwd=tmp_path).stdout
    assert f"zshard was built with torch {torch.__version__}, but torch 2.99.1+cu199" in said
    assert f"pip install 'torch=={MINOR}.*'" in said and "make build" in said
    assert "'zshard._build_check'" not in said  # a module that raises is not kept


def test_another_patch_version_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (f"{MINOR}.99", f"{MINOR}.0a0+git1", f"{MINOR}.0+cu126"):
        monkeypatch.setattr(torch, "__version__", version)
        _build_check._check()


CORE = f"zshard/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
OTHERS = "zshard/_core.cpython-399-x86_64-linux-gnu.so"
NOT_BUILT = (
    f"zshard's extension is not built for Python {sys.version_info[0]}.{sys.version_info[1]}"
)
CHANGED = "the C sources in {} have changed since zshard's extension was built: build it again"


@pytest.mark.parametrize(
    ("there", "edited", "says"),
    [
        ({}, False, NOT_BUILT),
        ({OTHERS: "2.99.0+cpu {digest}"}, False, NOT_BUILT),  # of another Python
        ({CORE: None}, False, NOT_BUILT),  # by a build before notes
        ({CORE: "2.99.0+cpu {digest}"}, True, CHANGED),
        ({CORE: "2.99.0+cpu {digest}"}, False, None),
        ({CORE: "2.99.0+cpu"}, True, None),  # as installed: a folder csrc beside it is not ours
        # each Python has its own torch
        ({CORE: "2.99.0+cpu {digest}", OTHERS: "2.98.0+cpu {digest}"}, False, None),
    ],
)
def test_builds_that_a_clone_may_have(
    tmp_path: Path, there: dict[str, str | None], edited: bool, says: str | None
) -> None:
    """A clone with a torch 2.99.1; `there`: its extensions and the notes on them."""
    for name in ("csrc", "torch", "zshard"):
        (tmp_path / name).mkdir()
    for name in ("_built.py", "_build_check.py"):
        shutil.copy(ROOT / "zshard" / name, tmp_path / "zshard")
    (tmp_path / "zshard" / "__init__.py").write_text("from zshard import _build_check\n")
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.99.1+cpu'\n")
    (tmp_path / "csrc" / "one.c").write_text("int one;\n")
    for name, note in there.items():
        (tmp_path / name).write_text("")
        if note is not None:
            text = note.format(digest=digest(tmp_path))
            note_on(tmp_path / name).write_text(text)
    if edited:
        (tmp_path / "csrc" / "one.c").write_text("int two;\n")
    done = run(sys.executable, "-c", "import zshard; print('imported')", cwd=tmp_path)
    if says is None:
        assert done.stdout == "imported\n"
    else:
        assert f"ImportError: {says.format(tmp_path)}" in done.stdout
        assert "run `make build` or `pip install --no-build-isolation .`" in done.stdout


# --- the source distribution and its wheel --------------------------------------------------------

BUILT = ("build", "dist", "*.egg-info", "__pycache__", "*.so", "*.built", "runs")
BUILT += (".git", ".venv", ".*_cache", ".hypothesis")
BUILD = "import sys; sys.path.insert(0, 'tools'); import build_backend as b; b.build_{}({!r})"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution of this repository."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "clone", ignore=shutil.ignore_patterns(*BUILT))
    done = run(sys.executable, "-c", BUILD.format("sdist", str(folder)), cwd=folder / "clone")
    assert done.returncode == 0, done.stdout
    with tarfile.open(next(folder.glob("zshard-*.tar.gz"))) as file:
        file.extractall(folder, filter="data")
    return next(path for path in folder.glob("zshard-*") if path.is_dir())


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """A wheel of the source distribution."""
    objects = list((ROOT / "build").glob("objects-*-release"))
    if not objects:
        pytest.skip("no release build here")
    (source / "build").mkdir()
    for path in [*objects, *(ROOT / "build").glob("cuda")]:
        (source / "build" / path.name).symlink_to(path)
    script, local = BUILD.format("wheel", str(source.parent)), {"ZSHARD_LOCAL_VERSION": "1"}
    done = run(sys.executable, "-c", script, cwd=source, **local)
    assert done.returncode == 0, done.stdout
    return next(source.parent.glob("zshard-*.whl"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with that wheel, torch and what torch requires, but no more:
    neither NumPy nor setuptools, not even pip."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    needed = needed_by("torch", {"setuptools"})
    if not needed:
        pytest.skip("this torch was not installed as a package")
    for path in needed:
        (site / path.name).symlink_to(path)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return folder / "bin" / "python"


def needed_by(name: str, seen: set[str]) -> set[Path]:
    """What a distribution, and those that it requires, have in site-packages."""
    seen.add(name)
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # for another platform
        return set()
    tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
    paths = {Path(str(found.locate_file(top))).absolute() for top in tops}
    for line in found.requires or []:
        required = re.split(r"[^\w.-]", line)[0].lower()
        if "extra ==" not in line and required not in seen:
            paths |= needed_by(required, seen)
    return paths


def tracked() -> list[str]:
    """The files that a clone of this repository would have."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a clone")
    return sorted(name for name in listed.stdout.splitlines() if (ROOT / name).exists())


def test_pre_commit_has_the_versions_of_make_lint() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = re.findall(r"additional_dependencies: \[(.*)\]", text)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(pinned) == 3 and set(pinned) <= set(extras["optional-dependencies"]["lint"])


def test_source_distribution_has_all_files_of_the_repository(source: Path) -> None:
    missing = [name for name in tracked() if not (source / name).exists()]
    missing = [n for n in missing if not n.startswith(("benchmarks/results/", ".github/", ".ci/"))]
    assert not (source / "benchmarks" / "results").exists()
    assert missing == [".gitignore"]
    with tarfile.open(next(source.parent.glob("zshard-*.tar.gz"))) as file:
        assert [name for name in file.getnames() if name.endswith((".so", ".built"))] == []
    stated = Parser().parsestr((source / "PKG-INFO").read_text())
    assert (
        stated["Version"] == zshard.__version__
    )  # PyPI takes no other, and pip expects it of the build
    assert "torch>=2.11" in stated.get_all("Requires-Dist", [])


@pytest.mark.thorough
def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(file.read(metadata).decode())
        notes = [file.read(name).decode() for name in names if name.endswith(".built")]
    plain = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert plain == [f"torch=={MINOR}.*"]
    assert any(name.endswith("entry_points.txt") for name in names)
    assert notes == [f"{torch.__version__}\n"]
    assert told["Version"] == f"{zshard.__version__}+torch{MINOR}"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"zshard-{told['Version']}-{python}-{python}-linux")
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert metadata.replace("METADATA", "licenses/LICENSE") in names
    assert told["Description-Content-Type"] == "text/markdown"
    assert {"zshard/py.typed", "zshard/_core.pyi"} <= names
    assert {name.split("/")[0] for name in names} == {"zshard", metadata.split("/")[0]}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "zshard").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


TRAIN = """
import os, pathlib, sys, torch, zshard

torch.manual_seed(0)
model = zshard.FSDP(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
optimizer = zshard.AdamW(model.parameters(), lr=0.01)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()

step()
zshard.save(sys.argv[1], model, optimizer, extra={"rng": zshard.rng_state()})
saved = {name: value.clone() for name, value in model.state_dict().items()}
step()
zshard.set_rng_state(zshard.load(sys.argv[1], model, optimizer)["rng"])
loaded = model.state_dict()
same = all(torch.equal(saved[name], loaded[name]) for name in saved)
absent = [name for name in ("numpy", "setuptools") if name not in sys.modules]
told = pathlib.Path(f"told-{os.environ['RANK']}")
told.write_text(f"{same} {absent} {zshard.__file__}")
"""


@pytest.mark.thorough
def test_wheel_runs_with_nothing_but_torch(clean: Path, tmp_path: Path) -> None:
    for name in ("numpy", "setuptools"):
        assert run(clean, "-c", f"import {name}", cwd=tmp_path).returncode == 1
    (tmp_path / "train.py").write_text(TRAIN)
    launch = [clean, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*launch, "train.py", tmp_path / "saved", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    package = next(clean.parent.parent.glob("lib/python3*/site-packages/zshard/__init__.py"))
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told == f"True ['numpy', 'setuptools'] {package}"
