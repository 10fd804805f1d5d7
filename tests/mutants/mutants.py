"""Planted faults: the suite must notice one wrong line of zshard.

list.json has 60 of them, 20 each in C, Python and the binding, drawn by a fixed seed from the lines that
the suite executed on the day of the draw. results.json says which run found each, and when.

    python tests/mutants/mutants.py run            plant each, run the tests near it until the first failure
    python tests/mutants/mutants.py run 3 17       these two
    python tests/mutants/mutants.py together       plant all that live, run the suite once, show what fails
    python tests/mutants/mutants.py run 3 -- tests/optim/test_clip.py  is it 3 that this test finds?
    python tests/mutants/mutants.py plant 17       leave it planted, to look at it; `git checkout` lifts it

If nothing fails with all of them planted, each alone lives. Words after `--` are pytest's.

The checkout must have no changes: a planted fault is lifted by git. To draw again, build with
CFLAGS=--coverage LDFLAGS=--coverage, run the suite under `coverage run` (its `patch = subprocess, _exit`), and

    python tests/mutants/mutants.py draw build/coverage.json build/objects-* > tests/mutants/list.json
"""

from __future__ import annotations

import ast
import datetime
import json
import random
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SEED = 20261128
EACH = 20
KINDS = {  # by the folders of their files
    "c": re.compile(r"csrc/(?!python/|shim/).*\.c$"),
    "binding": re.compile(r"csrc/(python/.*\.c|shim/.*\.cpp)$"),
    "python": re.compile(r"zshard/.*\.py$"),
}


# The replacements that a fault makes. Each match in a line is a separate fault.
def swaps(*pairs: tuple[str, str]) -> list[tuple[str, str]]:
    """Each text for the other."""
    both = [each for a, b in pairs for each in ((a, b), (b, a))]
    return [(rf"\b{a}\b" if a.isalpha() else re.escape(a), b) for a, b in both]


BOTH = [
    (r"(?<=[^=!<>])==(?!=)", "!="),
    (r"!=", "=="),
    *swaps((" < ", " <= "), (" > ", " >= "), (" + ", " - ")),
    (r"(?<![\w.])0(?![\w.])", "1"),
    (r"(?<![\w.])1(?![\w.])", "2"),
]
OPERATORS = {
    ".c": [
        *BOTH,
        *swaps(("&&", "||"), ("true", "false")),
        (r"\bif \((.*)\)(?= \{$)", r"if (!(\1))"),
        (r"^(\s+)[\w>.-]+\(.*\);$", r"\1;"),  # a call without its value
        (r"^(\s+)\S[^=]* [-+|]?= .*;$", r"\1;"),  # an assignment to a name declared elsewhere
    ],
    ".py": [
        *BOTH,
        *swaps((" and ", " or "), (" is None", " is not None"), ("True", "False")),
        (r"\bif (?!not )(.*):$", r"if not (\1):"),
        (r"\bnot ", ""),
        (r"^(\s+)(?!raise|super)[\w.]+\(.*\)$", r"\1pass"),
        (r"^(\s+)[\w.]+ [-+|]?= .*$", r"\1pass"),
        (r"^(\s+)return (?!None$).+$", r"\1return None"),
    ],
}
OPERATORS[".cpp"] = OPERATORS[".c"]
QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")


# --- drawing --------------------------------------------------------------------------------------


def draw(coverage: Path, objects: Path) -> list[dict[str, Any]]:
    """Draw EACH faults of each kind: first a line, then its fault."""
    executed = {**lines_of_python(coverage), **lines_of_c(objects)}
    random_ = random.Random(SEED)
    drawn = []
    for kind, files in KINDS.items():
        lines = [
            (file, n) for file in sorted(executed) if files.match(file) for n in executed[file]
        ]
        random_.shuffle(lines)
        taken: list[dict[str, Any]] = []
        for file, number in lines:
            if len(taken) == EACH:
                break
            faults = [new for new in faults_of(ROOT / file, number) if compiles(file, number, new)]
            if faults:
                old = (ROOT / file).read_text().splitlines()[number - 1]
                new = random_.choice(faults)
                taken.append({"kind": kind, "file": file, "line": number, "old": old, "new": new})
        drawn += taken
    return [{"id": number, **each} for number, each in enumerate(drawn, 1)]


def lines_of_python(report: Path) -> dict[str, list[int]]:
    """Return the executed lines of each file within functions, from `coverage json`.

    Lines that an import executes do not count.
    """
    found = {}
    for file, facts in json.loads(report.read_text())["files"].items():
        tree = ast.parse((ROOT / file).read_text())
        inside: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                inside |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        found[file] = sorted(inside & set(facts["executed_lines"]))
    return found


def lines_of_c(objects: Path) -> dict[str, list[int]]:
    """Return the executed lines of each file, from gcov's counts next to the objects."""
    found: dict[str, list[int]] = {}
    for counts in sorted(objects.glob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", str(counts)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for facts in json.loads(done.stdout)["files"]:
            if facts["file"].startswith("csrc/"):
                lines = {each["line_number"] for each in facts["lines"] if each["count"]}
                found[facts["file"]] = sorted(lines | set(found.get(facts["file"], [])))
    return found


def faults_of(file: Path, number: int) -> list[str]:
    """Return the faulty forms of a line, each wrong in one place outside strings and comments."""
    line = file.read_text().splitlines()[number - 1]
    comment = "#" if file.suffix == ".py" else "//"
    if line.lstrip().startswith((comment, '"', "assert", "*")):
        return []
    masked = QUOTED.sub(lambda text: "\0" * len(text[0]), line)
    code = masked.split(comment)[0].rstrip() if comment in masked else masked
    faulty = []
    for pattern, replacement in OPERATORS[file.suffix]:
        for match in re.finditer(pattern, code):
            # expanded from the real text: a mask keeps the places of hidden text
            real = re.compile(pattern).match(line[: len(code)], match.start())
            new = match.expand(replacement) if real is None else real.expand(replacement)
            if "\0" not in new:
                faulty.append(line[: match.start()] + new + line[match.end() :])
    return [each for each in dict.fromkeys(faulty) if each != line]


def compiles(file: str, number: int, new: str) -> bool:
    """Return whether the file with its line `number` replaced is valid."""
    lines = (ROOT / file).read_text().splitlines(keepends=True)
    lines[number - 1] = new + "\n"
    if file.endswith(".py"):
        try:
            ast.parse("".join(lines))
        except SyntaxError:
            return False
        return True
    if file.endswith(".cpp"):  # torch's headers: a minute each; the build says
        return True
    include = ["-iquote", "csrc", f"-isystem{sysconfig.get_path('include')}"]
    command = ["cc", "-std=c11", "-fsyntax-only", *include, f"-I{Path(file).parent}", "-xc", "-"]
    text = "".join(lines)
    return subprocess.run(command, cwd=ROOT, input=text, text=True, stderr=-3).returncode == 0


# --- planting -------------------------------------------------------------------------------------


def plant(fault: dict[str, Any]) -> None:
    """Replace the fault's line, which may have moved since the draw. Raises LookupError."""
    path = ROOT / fault["file"]
    lines = path.read_text().splitlines()
    places = [number for number, line in enumerate(lines, 1) if line == fault["old"]]
    if not places:
        raise LookupError(f"{fault['file']} has no line {fault['old']!r} any more")
    nearest = min(places, key=lambda number: abs(number - fault["line"]))
    lines[nearest - 1] = fault["new"]
    path.write_text("\n".join(lines) + "\n")


def run(faults: list[dict[str, Any]], words: list[str]) -> str:
    """Plant faults, build, run pytest with `words`, and lift them. Return the first test that fails."""
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", "zshard", "csrc")
    if dirty:
        sys.exit(f"error: a fault is lifted by `git checkout`, and there are changes:\n{dirty}")
    try:
        for fault in faults:
            plant(fault)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        if subprocess.run(build, cwd=ROOT).returncode:
            return "by the compiler"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2400)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if len(faults) > 1:
            print(done.stdout[-20000:])
        return failed[0] if failed else "" if done.returncode in (0, 5) else "by a crash"
    except subprocess.TimeoutExpired:
        return "by a hang"
    finally:
        git("checkout", "--", *{fault["file"] for fault in faults})


def near(file: str) -> list[str]:
    """Return the tests that a fault in `file` most likely breaks: folders, and two files on ranks."""
    usual = {"ckpt": "checkpoint", "norms": "optim", "clip": "optim", "unit": "units"}
    usual |= {"plan": "units", "state": "state_dict", "pager": "files", "comm": "core"}
    words = [usual.get(word, word) for word in re.split(r"[/_.]", file)]
    folders = [each for each in sorted((ROOT / "tests").iterdir()) if each.name in words]
    files = [ROOT / "tests/training/test_parity.py", ROOT / "tests/units/test_plan.py"]
    return [str(each.relative_to(ROOT)) for each in (*folders, *files)]


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main(word: str, arguments: list[str]) -> None:
    """Run one of the words of this file's first lines."""
    if word == "draw":
        print(json.dumps(draw(Path(arguments[0]), Path(arguments[1])), indent=1))
        return
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ids, words = arguments[:split], arguments[split + 1 :]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    faults = json.loads((HERE / "list.json").read_text())
    if ids:
        faults = [fault for fault in faults if str(fault["id"]) in ids]
    if word == "plant":
        for fault in faults:
            plant(fault)
    elif word == "together":
        run([each for each in faults if not any(r["found"] for r in known[str(each["id"])])], words)
    else:
        for fault in faults:
            where = [] if any("tests" in word for word in words) else near(fault["file"])
            found = run([fault], ["-x", *words, *where])
            record = {"found": found, "commit": git("rev-parse", "--short", "HEAD").strip()}
            record |= {"words": words, "date": datetime.date.today().isoformat()}
            known.setdefault(str(fault["id"]), []).append(record)
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
            print(fault["id"], fault["file"], found or "LIVES", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
