"""README.md and docs/: code runs, links lead somewhere, claims have tests, first pages stay short.

All Python blocks of a page, in their order, are one script, run by two ranks.
(docs/quick_start.md: test_quick_start.py. docs/gpus.md needs a GPU. docs/lightning.md and
accelerate.md need the trainers: tests/trainers. A block with zshard.Keep needs a keeper:
tests/keeping/test_kept_runs.py.)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from named import problem_with
from nursery import fork_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import addresses  # noqa: E402

PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
PAGES += [
    *sorted((ROOT / "docs").glob("*.md")),
    *DESIGN,
    *sorted((ROOT / "docs" / "contributing").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
]
GENERATED = ("docs/api.md", "docs/messages.md")  # on the site only (docs/tools/site_pages.py)
RUN_ELSEWHERE = {"ARCHITECTURE", "CONTRIBUTING", "quick_start", "gpus"}
RUN_ELSEWHERE |= {"lightning", "accelerate"}
SOURCES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".py", ".pyi", ".md", ".yml", ".js"}
FOLDERS = ("csrc", "cuda", "zshard", "tests", "benchmarks", "tools", "docs/tools")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", text, re.S)
    return [block for block in found if "zshard.Keep(" not in block]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """The relative links of `text`, which is that of `page`, that lead nowhere."""
    found = []
    for link in LINK.findall(without_code(text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        there = target.exists() and (
            not anchor or anchor in anchors(target.read_text() if path else text)
        )
        if not there:
            found.append(link)
    return found


WITH_CODE = [page for page in PAGES if page.stem not in RUN_ELSEWHERE and blocks(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_of_each_page_runs_on_two_ranks(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    there = f"import os\n\nos.chdir({str(tmp_path)!r})"  # files that the page writes are ours
    script.write_text("\n\n".join([there, *blocks(page.read_text())]))
    fork_ranks(script, 2, timeout=120, check=True)


def test_links_resolve() -> None:
    links = {str(page.relative_to(ROOT)): broken(page, page.read_text()) for page in PAGES}
    assert {name: wrong for name, wrong in links.items() if wrong} == {}
    text = "# A heading: two\n[a](no.md) [b](#a-heading-two) [c](#three) ![d](README.md#no) `[e](no)`\n"
    assert broken(ROOT / "README.md", text) == ["no.md", "#three", "README.md#no"]


def leads_nowhere(name: str, anchor: str) -> bool:
    """Whether a page, by its path in the repository, or its heading is missing."""
    if name in GENERATED:
        return False
    page = ROOT / name
    return not page.exists() or (anchor != "" and anchor not in anchors(page.read_text()))


def test_pages_named_outside_the_pages_exist() -> None:
    """In the texts of errors, docstrings, comments, results and workflows: docs/page.md, with or without #anchor."""
    named = re.compile(r"(?<![\w:-])docs/[\w/]+\.md(?:#[\w-]+)?")
    folders = (*FOLDERS, "examples", ".github", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    texts = {path: path.read_text(errors="ignore") for path in [*paths, *ROOT.glob("*.*")]
             if path.suffix in SOURCES and path != Path(__file__)}  # fmt: skip
    assert len(texts) > 900
    links = {
        (str(path.relative_to(ROOT)), link)
        for path, text in texts.items()
        for link in named.findall(text)
    }
    assert [*sorted(x for x in links if leads_nowhere(*x[1].partition("#")[::2]))] == []


def test_old_pages_and_headings_lead_to_new_ones() -> None:
    """docs/moved.txt names each page that was ever published."""
    moved = addresses.table()
    assert len([old for old in moved if "#" not in old]) >= 58
    wrong = []
    for old, new in moved.items():
        path, _, anchor = new.partition("#")
        if leads_nowhere(str((ROOT / "docs" / path).resolve().relative_to(ROOT)), anchor):
            wrong.append(f"{old} leads to {new}, which does not exist")
        page, _, heading = old.partition("#")
        there = (ROOT / "docs" / page).exists()
        if old != new and there and not leads_nowhere(f"docs/{page}", heading):
            wrong.append(f"{old} exists, but leads to {new}")
        if page not in moved:
            wrong.append(f"{old} has a line, but its page has none")
    assert wrong == []


def test_moved_pages_have_addresses() -> None:
    moved = addresses.table(
        "# a comment\na.md#b ../README.md\nc.md c.md\nd.md ../examples/README.md#e\n"
    )
    assert addresses.redirects(moved) == {"a/#b": "", "d/": "examples/#e"}


# What readers stumble over, and what to write instead.
WORDS = {
    r"to the (?:last )?bit\b": "bit for bit, bitwise identical",
    r"\bbites?\b": "pitfalls",
    r", too[.,;:]": "put it first, or leave it out",
    r"\bnobody\b": "name the subject: no rank, a script",
    r"\bfakes? of\b": "a simulated backend; not run on hardware",
    r"^#+ (?:What|Which|Whatever|Where|Who) ": "a task or a noun as heading",
}
MANUAL = [
    page for page in PAGES if page.parent.name in ("docs", "examples") or page.name == "README.md"
]


def test_words_of_pages() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {match[0]!r}: write {better}"
        for page in MANUAL
        for pattern, better in WORDS.items()
        for match in re.finditer(pattern, without_code(page.read_text()), re.M)
    ]
    assert found == []


def torn_tables(text: str) -> list[str]:
    """The first lines of what looks like a table but has no header."""
    blocks = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.S))
    tables = [block.strip().splitlines() for block in blocks if block.lstrip().startswith("|")]
    return [rows[0] for rows in tables if not re.fullmatch(r"(\| *:?-+:? *)+\|", (*rows, "")[1])]


def test_tables_have_a_header() -> None:
    assert [(page.name, row) for page in PAGES for row in torn_tables(page.read_text())] == []
    assert torn_tables("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n") == ["| 3 | 4 |"]


def test_pages_install_from_a_clone() -> None:
    """zshard is not on PyPI, as docs/install.md says."""
    named = r"pip install (?:-\S+ )*['\"]?zshard"
    assert [page.name for page in PAGES if re.search(named, page.read_text())] == ["install.md"]
    assert "Nothing has been published yet" in (ROOT / "docs" / "install.md").read_text()


def test_first_pages_are_short() -> None:
    for name, lines in (("README.md", 100), ("ARCHITECTURE.md", 200), ("CONTRIBUTING.md", 120)):
        assert len((ROOT / name).read_text().splitlines()) <= lines, name
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_design_pages_have_one_form() -> None:
    for page in DESIGN:
        text = page.read_text()
        headings = ["Purpose", "Invariant", "Protocol", "Failure", "Tests"]
        assert re.findall(r"^## (.*)$", text, re.M) == headings, page.name
        assert len(text.splitlines()) <= 120, page.name


def test_files_named_by_design_pages_exist() -> None:
    """By their last parts, as `schedule/reads.c`, or by the full path."""
    there = {f"/{p.relative_to(ROOT)}" for d in FOLDERS for p in (ROOT / d).rglob("*.*")}
    for page in (ROOT / "ARCHITECTURE.md", *DESIGN):
        named = re.findall(r"`([\w./]+\.(?:c|h|cpp|py))`", page.read_text())
        missing = [n for n in named if not any(path.endswith(f"/{n}") for path in there)]
        assert named and missing == [], page.name


def test_gpu_rules_each_have_a_test() -> None:
    page = (ROOT / "docs" / "contributing" / "gpu_rules.md").read_text()
    rules = page.partition("\n## Contexts")[2]
    assert len(re.findall(r"^\*\*", rules, re.MULTILINE)) == rules.count("- Test: `tests/")
    assert rules.count("- Check: ") == rules.count("- Test: ")
    named = re.findall(r"`(tests/\w+/test_\w+\.py(?:::\w+)?)`", page)
    assert [problem for problem in map(problem_with, named) if problem] == []


# --- docs/features.md and the tests of its claims, which docs/contributing/feature_tests.md names ---

COLUMNS = ["feature", "zshard", "DDP", "FSDP1", "FSDP2", "DeepSpeed"]


def rows_of(text: str, columns: list[str]) -> list[list[str]]:
    """The rows of all tables with these columns, in their order."""
    rows, inside = [], False
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("| ").split("|")] if line[:1] == "|" else []
        inside = row == columns or (inside and bool(row))
        if inside and row != columns and not row[0].startswith("---"):
            rows.append(row)
    return rows


def test_each_feature_has_a_test() -> None:
    table = rows_of((ROOT / "docs" / "features.md").read_text(), COLUMNS)
    page = (ROOT / "docs" / "contributing" / "feature_tests.md").read_text()
    tests = {feature: test for feature, test in rows_of(page, ["feature", "test"])}
    assert len(table) >= 80 and all(len(row) == len(COLUMNS) and all(row) for row in table)
    features = [row[0] for row in table]
    assert len({*features}) == len(features) and {*tests} <= {*features}
    without = {row[0] for row in table if row[1] in ("no", "-")}  # zshard's cell
    assert {*features} - {*tests} <= without
    assert [problem for test in tests.values() if (problem := problem_with(test))] == []
