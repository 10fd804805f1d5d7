"""What a release is made by: workflows run scripts of this repository, an index has each wheel under its torch, versions
agree, and the Dockerfile builds.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from test_packaging import run, tracked

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
INDEX = ROOT / "tools" / "wheel_index.py"


# --- workflows ------------------------------------------------------------------------------------


def run_lines(node: Any) -> Iterator[str]:
    """The lines of all `run:` in a workflow."""
    if isinstance(node, dict):
        yield from (line for line in str(node.get("run", "")).splitlines() if line.strip())
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from run_lines(each)


def test_workflows_run_scripts_and_words_of_the_makefile() -> None:
    """So that each step can be run on any machine."""
    yaml = pytest.importorskip("yaml")
    words = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [line for path in WORKFLOWS for line in run_lines(yaml.safe_load(path.read_text()))]
    assert {"make lint", ".ci/wheel", ".ci/release publish"} <= set(lines)
    for line in lines:
        command, *rest = line.split()
        if command == "make":
            assert rest[0] in words, line
        else:
            assert command.startswith(".ci/") and os.access(ROOT / command, os.X_OK), line


def test_versions_of_python_and_torch_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    least = project["project"]["requires-python"].removeprefix(">=")
    assert "target-version" not in project["tool"]["ruff"]  # so ruff reads requires-python
    assert project["tool"]["mypy"]["python_version"] == least
    assert f"sys.version_info < ({least.replace('.', ', ')})" in (ROOT / "Makefile").read_text()
    docker = (ROOT / "Dockerfile").read_text()
    assert f"FROM python:{least}-" in docker
    torch = re.search(r"^TORCH \?= (torch==(.*))$", (ROOT / "Makefile").read_text(), re.M)
    assert torch is not None and f"ARG TORCH={torch[1]}\n" in docker
    assert f"TORCH=${{2:-{torch[2]}}}" in (ROOT / ".ci" / "wheel").read_text()
    named = [line.rpartition(" ")[2] for line in project["project"]["classifiers"] if "3." in line]
    built = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/release.yml").read_text())
    assert named[0] == least and built is not None
    assert built[1].split(", ") == [f"cp{each.replace('.', '')}" for each in named]


# --- version, CHANGELOG and tag -------------------------------------------------------------------


def test_release_is_refused_unless_version_changelog_and_tag_agree(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "zshard").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    log = "# Changelog\n\n## Unreleased\n{}\n## 1.2.0 - 2027-01-31\n\n- Good.\n\n## 1.1.0 - 2027-01-01\n"

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        assert run("git", *who, *words, cwd=tmp_path).returncode == 0, words

    def said(changelog: str, version: str = "1.2.0", **env: str) -> str:
        (tmp_path / "zshard" / "_version.py").write_text(f'__version__ = "{version}"\n')
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        git("add", "-A")
        git("commit", "--allow-empty", "-qm", "a commit")
        return run(".ci/release", cwd=tmp_path, **{"GITHUB_REF_TYPE": "", **env}).stdout

    git("init", "-q")
    assert "CHANGELOG.md has no section '## 1.3.0 - Y" in said(log.format(""), "1.3.0")
    assert "entries under Unreleased: move them to 1.2.0" in said(log.format("\n- More.\n"))
    assert "ready: git tag -a v1.2.0 -m 'zshard 1.2.0' && git push" in said(log.format(""))
    pushed = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v1.1.0"}
    assert "the tag is v1.1.0, the version 1.2.0" in said(log.format(""), **pushed)
    git("tag", "v1.2.0")
    assert run(".ci/release", cwd=tmp_path).stdout == "ready: git push origin main v1.2.0\n"
    assert "the tag v1.2.0 is of another commit" in said(log.format(""))
    (tmp_path / "zshard" / "_version.py").write_text('__version__ = "1.2.0" \n')
    assert "no section '##  - Y" in run(".ci/release", cwd=tmp_path).stdout

    (tmp_path / "gh").write_text('#!/bin/sh\necho "$@"; cat build/notes.md\n')
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a.whl").touch()
    git("checkout", "-q", ".")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run(".ci/release", "publish", cwd=tmp_path, PATH=path)
    assert done.stdout.startswith("release create v1.2.0 dist/a.whl --title zshard 1.2.0 ")
    assert done.stdout.endswith("\n\n- Good.\n\n")


# --- the index of wheels --------------------------------------------------------------------------

TAIL = "cp311-cp311-manylinux_2_28_x86_64.whl"
GH = """#!/bin/sh
case "$2" in
list) echo v0.1.0; echo v0.2.0 ;;
download) mkdir -p build/releases; echo "$3" > "build/releases/zshard-${3#v}+torch2.13-%s" ;;
esac
"""


def test_index_has_each_wheel_under_its_torch(tmp_path: Path) -> None:
    pytest.importorskip("packaging")
    for version in ("0.1.0+torch2.13", "0.2.0+torch2.13", "0.1.0+torch2.14"):
        (tmp_path / f"zshard-{version}-{TAIL}").write_bytes(version.encode())
    wheels = sorted(tmp_path.glob("*.whl"))
    done = run(sys.executable, INDEX, tmp_path / "index", *wheels, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("", 0)
    page = (tmp_path / "index/torch2.13/zshard/index.html").read_text()
    links = re.findall(r'<a href="(\S+)#sha256=\w{64}">(\S+)</a>', page)
    names = [f"zshard-0.{minor}.0+torch2.13-{TAIL}" for minor in (1, 2)]
    assert links == [(name.replace("+", "%2B"), name) for name in names]
    assert all((tmp_path / "index/torch2.13/zshard" / name).exists() for name in names)
    assert '<a href="zshard/">' in (tmp_path / "index/torch2.14/index.html").read_text()

    for name, text in (
        (f"zshard-0.1.0-{TAIL}", "is not a wheel of zshard for one torch"),
        (f"other-0.1.0+torch2.13-{TAIL}", "is not a wheel of zshard for one torch"),
        ("zshard-0.1.0+torch2.13-cp311-cp311-linux_x86_64.whl", "has no manylinux tag"),
        ("zshard.whl", "Invalid wheel filename"),
    ):
        done = run(sys.executable, INDEX, tmp_path / "index", name, cwd=tmp_path)
        assert text in done.stdout and done.returncode == 1 and "Traceback" not in done.stdout


def test_site_has_the_wheels_of_all_releases(tmp_path: Path) -> None:
    pytest.importorskip("packaging")
    for name in (".ci/site", "tools/wheel_index.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "bin").mkdir()
    for name, text in (("make", "#!/bin/sh\necho $*\n"), ("gh", GH % TAIL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for repository, found in (("", []), ("a/zshard", ["0.1.0", "0.2.0"])):
        done = run(".ci/site", cwd=tmp_path, PATH=path, GITHUB_REPOSITORY=repository)
        assert (done.stdout, done.returncode) == ("docs\n", 0)
        wheels = sorted(tmp_path.glob("build/site/wheels/torch2.13/zshard/*.whl"))
        assert [path.name for path in wheels] == [f"zshard-{v}+torch2.13-{TAIL}" for v in found]


# --- the Dockerfile -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_dockerfile_builds_in_a_fresh_folder(tmp_path: Path) -> None:
    """Its RUN lines, on the files that `COPY . .` copies, and a short demo as its CMD. What apt-get would do is simulated."""
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in tracked():
        if not any(fnmatch(name, f"{each}*") for each in ignored):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    packages, *commands = re.findall(r"^RUN (.*)$", text, re.M)
    if shutil.which("apt-get") is not None:
        simulated = packages.replace("update && apt-get install", "install --simulate")
        commands.insert(0, simulated.partition(" && rm")[0])
    assert "COPY . ." in text and 'CMD ["make", "demo"]' in text
    args = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.M))
    for command in (*commands, "make demo ARGS=--quick"):
        done = run("sh", "-c", command, cwd=tmp_path, PIP_RETRIES="1", **args)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
