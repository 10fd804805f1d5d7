"""The rules for C and C++ (CONTRIBUTING.md), checked on the sources of csrc/ and cuda/.

A rule is a function from a file's name and text to a list of complaints. Rules that a tool checks
are not here: clang-tidy knows the size of C's functions (.clang-tidy), the compiler those without a
header, the linker all symbols (tests/project/test_build.py).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder in ("csrc", "cuda")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".h", ".cpp", ".hpp", ".cu", ".cuh")
)
FOLDER_OF = {  # name -> "unit", "comm/shm", ...; "cuda" for the kernels
    path.name: str(path.parent.relative_to(ROOT)).removeprefix("csrc/") for path in FILES
}
HEADERS = {  # "unit/unit.h", as files include it; the kernels' name no folder
    str(path.relative_to(ROOT)).removeprefix("csrc/").removeprefix("cuda/")
    for path in FILES
    if path.suffix in (".h", ".hpp", ".cuh")
}
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450

SEES_TORCH = ("torch_*.cpp", "torch_*.hpp")
SEES_PYTHON = ("py_*.c", "py_*.h", "*_py.h", *SEES_TORCH)

# Whose headers the files of a folder may include, besides their own folder's (ARCHITECTURE.md,
# Layers).
MAY_INCLUDE = {
    "base": "",
    "shim": "base",
    "checkpoint": "base",
    "pager": "base",
    "update": "base shim",
    "device": "base shim update",
    "optim": "base shim update device pager",
    "comm": "base shim device",
    "comm/shm": "base comm",
    "comm/c10d": "base shim device comm",
    "comm/hosts": "base shim device comm comm/c10d",
    "comm/nccl": "base shim device comm",
    "comm/gpu": "base shim device comm comm/nccl",
    "schedule": "base",
    "unit": "base shim device pager comm schedule",
    "reduce": "base shim device pager comm schedule unit",
    "engine": "base shim device comm schedule unit reduce",
    "python": "base shim update checkpoint pager device optim comm comm/gpu comm/nccl schedule unit "
    "reduce engine",
    "cuda": "base device update",
}

Rule = Callable[[str, str], list[str]]


# --- reading C: clang-format puts what counts at the start of a line ------------------------------

NOISE = re.compile(  # comments and literals
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""", re.DOTALL | re.VERBOSE
)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
BODY = re.compile(r"^\{ *$.*?^\}", re.DOTALL | re.MULTILINE)  # of a function, no method in a class
ITEM = re.compile(  # a declaration or definition outside functions and classes
    r"""^(?!extern[ ]*\{ | (inline[ ])?namespace\b) (?P<head>[A-Za-z_][^;{}]*)
    (?: ; | \{ (?: [^\n]*\} | [ ]*\n.*?^\} ) [^\n]*$ )""",
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)


def code_of(text: str) -> str:
    """`text` with comments, literals and preprocessor lines blanked; every line keeps its place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return PREPROCESSOR.sub(blank, NOISE.sub(blank, text))


def found_in(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Matches of `pattern` in the code of `text`, each with the number of its first line."""
    code = code_of(text)
    for match in pattern.finditer(code):
        yield code.count("\n", 0, match.start()) + 1, match


def includes_of(text: str) -> list[str]:
    """The names in a file's #include lines."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


# --- the rules -----------------------------------------------------------------------------------


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def torch_stays_in_the_shim(name: str, text: str) -> list[str]:
    """Only the shim, torch_*.cpp and .hpp, includes torch, ATen and c10."""
    if _is(name, SEES_TORCH):
        return []
    return [f"includes {inc}" for inc in includes_of(text) if re.match(r"(torch|ATen|c10)/", inc)]


def python_stays_in_the_binding(name: str, text: str) -> list[str]:
    """Only py_*.c, the headers for them and the shim include Python.h, directly or not."""
    if _is(name, SEES_PYTHON):
        return []
    found = [i for i in includes_of(text) if i == "Python.h" or _is(Path(i).name, SEES_PYTHON)]
    return [f"includes {inc}" for inc in found]


def cuda_stays_in_cuda(name: str, text: str) -> list[str]:
    """No header of NVIDIA's in csrc/: the core has to build where there is none."""
    if name.endswith((".cu", ".cuh")):
        return []
    return [f"includes {inc}" for inc in includes_of(text) if re.match(r"cuda|nccl", inc)]


def includes_name_their_folder(name: str, text: str) -> list[str]:
    """Files included with quotes are ours, by their path in csrc/: "unit/unit.h"."""
    ours = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
    return [f"includes {inc}, no header of ours" for inc in ours if inc not in HEADERS]


def folders_keep_their_order(name: str, text: str) -> list[str]:
    """A file includes its own folder's headers and those of the folders below it (MAY_INCLUDE)."""
    folder = FOLDER_OF[name]
    if folder not in MAY_INCLUDE:
        return [f"lies in {folder}, which has no entry in MAY_INCLUDE"]
    known = {folder, *MAY_INCLUDE[folder].split()}
    found = [inc for inc in includes_of(text) if inc in HEADERS]
    return [f"includes {inc}" for inc in found if FOLDER_OF[Path(inc).name] not in known]


def gil_regions_are_clean(name: str, text: str) -> list[str]:
    """Py_BEGIN/END_ALLOW_THREADS pair up in a function; no Python call, no way out in between."""
    complaints = []
    for line, body in found_in(BODY, text):
        inside, where = False, f"line {line}:"
        for word in re.findall(r"\b\w+\b", body[0]):
            if word == "Py_BEGIN_ALLOW_THREADS":
                complaints += [f"{where} two regions in one another"] if inside else []
                inside = True
            elif word == "Py_END_ALLOW_THREADS":
                complaints += [] if inside else [f"{where} a region ends that never began"]
                inside = False
            elif inside and re.match(r"_?Py(?!Mem_Raw)", word):
                complaints.append(f"{where} {word} without the GIL")
            elif inside and word in ("return", "goto"):
                complaints.append(f"{where} {word} leaves without taking the GIL back")
        complaints += [f"{where} a region never ends"] if inside else []
        for call in re.findall(r"\bZS_PY_NOGIL\(([^;]*);", body[0]):
            found = re.findall(r"\b_?Py(?!Mem_Raw)\w*", call)
            complaints += [f"{where} {word} without the GIL" for word in found]
    return complaints


def functions_are_short(name: str, text: str) -> list[str]:
    """At most 60 lines, of C++ and CUDA: C is clang-tidy's. Methods in a class are not checked."""
    if name.endswith((".c", ".h")):
        return []
    sizes = [(line, body[0].count("\n") + 2) for line, body in found_in(BODY, text)]
    return [f"line {line}: {lines} lines" for line, lines in sizes if lines > MAX_FUNCTION_LINES]


def files_are_short(name: str, text: str) -> list[str]:
    """At most 450 lines."""
    lines = len(text.splitlines())
    return [f"has {lines} lines, more than {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def files_say_what_they_are(name: str, text: str) -> list[str]:
    """A file opens with a comment that begins with its own name."""
    return (
        []
        if re.match(rf"(/\*|//)\s*{re.escape(name)}\b", text)
        else ["does not open with its purpose"]
    )


def headers_are_commented(name: str, text: str) -> list[str]:
    """In headers, functions have a comment above (one for all lines up to a gap), types one above,
    behind or inside. Members of classes are not checked."""
    if not name.endswith((".h", ".hpp", ".cuh")):
        return []
    lines = text.splitlines()
    complaints, covered = [], -1  # covered: the last line that a comment above speaks for
    for first, item in found_in(ITEM, text):
        last = first + item[0].count("\n")
        head = " ".join(item["head"].split())
        above = lines[first - 2].strip() if first > 1 else ""
        if above.endswith("*/") or above.startswith("//") or covered == first - 1:
            covered = last
        is_type = "{" in item[0] and "(" not in head and "=" not in head
        is_function = "(" in head and not re.match(r"_Static_assert|typedef", head)
        own = "\n".join(lines[first - 1 : last])
        silent = covered != last and not (is_type and re.search(r"/\*|//", own))
        if (is_type or is_function) and silent:
            complaints.append(f"line {first}: no comment above `{head[:60]}`")
    return complaints


def nothing_is_left_to_do(name: str, text: str) -> list[str]:
    """No TODO and the like: missing work is an issue, not a comment."""
    return [f"says {word}" for word in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)]


RULES: list[Rule] = [
    torch_stays_in_the_shim,
    python_stays_in_the_binding,
    cuda_stays_in_cuda,
    includes_name_their_folder,
    folders_keep_their_order,
    gil_regions_are_clean,
    functions_are_short,
    files_are_short,
    files_say_what_they_are,
    headers_are_commented,
    nothing_is_left_to_do,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    assert FILES, "no C sources found: has csrc/ moved?"
    complaints = [
        f"{path.relative_to(ROOT)} {complaint}"
        for path in FILES
        for complaint in rule(path.name, path.read_text())
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


def test_names_are_unique() -> None:
    """Objects have no folders: build/.../unit.c.o; nor do the names that tests give (c_sources.py)."""
    counts = Counter(path.name for path in FILES)
    assert [name for name, count in counts.items() if count > 1] == []
