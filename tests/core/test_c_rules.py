"""The rules for C and C++ (CONTRIBUTING.md), checked on the sources of csrc/ and cuda/.

A rule is a function from a file's name and text to a list of complaints, so that one
function judges the real sources and the bad examples further down, which show that it can fail.
What a tool can judge is not here: clang-tidy knows the size of C's functions (.clang-tidy), the
compiler those without a header, the linker all symbols (tests/project/test_build.py).
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
    """What `pattern` finds in the code of `text`, each with the number of its first line."""
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
    """What is included with quotes is ours, by its path in csrc/: "unit/unit.h"."""
    ours = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
    return [f"includes {inc}, no header of ours" for inc in ours if inc not in HEADERS]


def folders_keep_their_order(name: str, text: str) -> list[str]:
    """A file includes its own folder's headers and those of the folders below it (MAY_INCLUDE)."""
    folder = FOLDER_OF.get(name)
    if folder is None:  # an example
        return []
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
    """At most 60 lines, of C++ and CUDA: C is clang-tidy's. Methods in a class are not looked at."""
    if name.endswith((".c", ".h")):
        return []
    sizes = [(line, body[0].count("\n") + 2) for line, body in found_in(BODY, text)]
    return [f"line {line}: {lines} lines" for line, lines in sizes if lines > MAX_FUNCTION_LINES]


def lines_are_short(name: str, text: str) -> list[str]:
    """At most 120 columns, comments too, which clang-format leaves as they are."""
    lines = enumerate(text.splitlines(), 1)
    return [f"line {number}: {len(line)} columns" for number, line in lines if len(line) > 120]


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
    """In headers, functions have a comment above (one may stand for lines without a gap), types one
    above, beside or inside. A class's members are its own affair."""
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


def declarations_stay_whole(name: str, text: str) -> list[str]:
    """A field's type and name stand on one line: a comment that does not fit beside them goes above."""
    split = r"^ +(?:const |unsigned |struct )*\w+\n +\*?\w+(?:\[\w+\])*; +/\*"
    found = re.finditer(split, text, re.MULTILINE)
    lines = [(text.count("\n", 0, m.start()) + 1, m[0].split()[0]) for m in found]
    return [f"line {line}: split" for line, word in lines if word not in ("else", "PyObject_HEAD")]


def nothing_is_left_to_do(name: str, text: str) -> list[str]:
    """No TODO and the like: what is missing is an issue, not a comment."""
    return [f"says {word}" for word in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)]


RULES: list[Rule] = [
    torch_stays_in_the_shim,
    python_stays_in_the_binding,
    cuda_stays_in_cuda,
    includes_name_their_folder,
    folders_keep_their_order,
    gil_regions_are_clean,
    functions_are_short,
    lines_are_short,
    files_are_short,
    files_say_what_they_are,
    headers_are_commented,
    declarations_stay_whole,
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


def namesakes(paths: list[Path]) -> list[str]:
    """Names that more than one file has."""
    counts = Counter(path.name for path in paths)
    return [name for name, count in counts.items() if count > 1]


def test_names_are_unique() -> None:
    """Objects have no folders: build/.../unit.c.o; nor do the names that tests give (c_sources.py)."""
    assert namesakes(FILES) == []
    assert namesakes([*FILES, ROOT / "csrc" / "elsewhere" / "unit.h"]) == ["unit.h"]


# --- the rules can fail --------------------------------------------------------------------------

LONG = "void f()\n{\n" + "    g();\n" * (MAX_FUNCTION_LINES - 2) + "}\n"
REGION = "static int f(void)\n{{\n    {}\n    go(); /* return */\n    {}\n    {}\n}}\n"
BEGIN, END = "Py_BEGIN_ALLOW_THREADS", "Py_END_ALLOW_THREADS"
MACRO = "static int f(void)\n{\n    ZS_PY_NOGIL(s, zs_go(PyLong_AsLong(x)));\n}\n"
GAP = "/* a */\nint zs_a(void);\n\nint zs_b(int x,\n         int y);\n"

BAD: list[tuple[Rule, str, str, str]] = [
    (torch_stays_in_the_shim, "unit.c", "#include <ATen/ATen.h>\n", "ATen/ATen.h"),
    (torch_stays_in_the_shim, "py_unit.c", '# include "torch/all.h"\n', "torch/all.h"),
    (python_stays_in_the_binding, "unit.c", "#include <Python.h>\n", "Python.h"),
    (python_stays_in_the_binding, "unit.h", '#include "python/py_util.h"\n', "python/py_util.h"),
    (cuda_stays_in_cuda, "unit.c", "#include <cuda_runtime.h>\n", "cuda_runtime.h"),
    (
        cuda_stays_in_cuda,
        "nccl_lib.c",
        '#include "nccl.h"\n#include "comm/nccl/nccl_lib.h"\n',
        "nccl.h",
    ),
    (includes_name_their_folder, "unit.c", '#include "unit/unit.h"\n#include "unit.h"\n', "unit.h"),
    (folders_keep_their_order, "comm.h", '#include "unit/unit.h"\n', "includes unit/unit.h"),
    (folders_keep_their_order, "backward.c", '#include "comm/shm/shm.h"\n', "comm/shm/shm.h"),
    (gil_regions_are_clean, "py_a.c", REGION.format(BEGIN, "PyErr_Clear();", END), "PyErr_Clear"),
    (gil_regions_are_clean, "py_a.c", REGION.format(BEGIN, "return 1;", END), "return leaves"),
    (gil_regions_are_clean, "py_a.c", REGION.format(BEGIN, BEGIN, END), "in one another"),
    (gil_regions_are_clean, "py_a.c", REGION.format(BEGIN, "", ""), "never ends"),
    (gil_regions_are_clean, "py_a.c", REGION.format("", "", END), "never began"),
    (gil_regions_are_clean, "py_a.c", MACRO, "PyLong_AsLong without the GIL"),
    (functions_are_short, "torch_a.cpp", LONG, "line 2: 61 lines"),
    (functions_are_short, "sum.cuh", "// a }\n" + LONG, "line 3: 61 lines"),
    (lines_are_short, "unit.c", "/* " + "x" * 118, "line 1: 121 columns"),
    (files_are_short, "unit.c", "\n" * (MAX_FILE_LINES + 1), "has 451 lines"),
    (files_say_what_they_are, "unit.c", "#include <stdio.h>\n", "does not open"),
    (files_say_what_they_are, "unit.c", "/* arena.c - memory. */\n", "does not open"),
    (headers_are_commented, "unit.h", GAP, "line 4: no comment above `int zs_b(int x, int y)`"),
    (headers_are_commented, "unit.h", "typedef struct zs_a {\n    int b;\n} zs_a;\n", "line 1"),
    (headers_are_commented, "a.hpp", 'extern "C" {\nint zs_a(void);\n}\n', "line 2"),
    (headers_are_commented, "unit.h", "static int zs_a(void)\n{\n    go(); // a\n}\n", "line 1"),
    (declarations_stay_whole, "unit.h", "{\n    zs_mem\n        *mem; /* long */\n}\n", "line 2"),
    (nothing_is_left_to_do, "unit.c", "/* TODO: later */\n", "TODO"),
]


@pytest.mark.parametrize(("rule", "name", "text", "complaint"), BAD)
def test_bad_example_breaks_the_rule(rule: Rule, name: str, text: str, complaint: str) -> None:
    complaints = rule(name, text)
    assert len(complaints) == 1 and complaint in complaints[0]


def test_every_rule_has_a_bad_example() -> None:
    assert {rule.__name__ for rule, *_ in BAD} == {rule.__name__ for rule in RULES}


GOOD_C = """\
/* py_unit.c - a "{" in a string, a '}' in a character, tables and types confuse nobody. */
#include <Python.h>
#define WRAP(name) static int name(void) { return 1; }

typedef struct pair {
    int (*call)(int a, int b);
    int c;
} pair;
static const char *text = "int pack(void) {", brace = '{';
static const pair table[] = {{.call = f, .c = 1}, {0}};
enum { ONE = 1 };

MACRO(avx2) static int g(pair p, int (*f)(void), int c, int d, int e, int h)
{
    int values[] = {1, 2};
    Py_BEGIN_ALLOW_THREADS
    zs_go(PyMem_RawMalloc(1));
    Py_END_ALLOW_THREADS
    return values[0];
}

PyMODINIT_FUNC PyInit__core(void)
{
    return NULL;
}
"""

GOOD_CPP = """\
// torch_shim.cpp - C++ in the shapes that the shim uses.
#include <ATen/ATen.h>
extern "C" {
#include "shim/tensor_py.h"
}
struct zs_tensor {
    explicit zs_tensor(at::Tensor strong) : tensor(std::move(strong)), b(1) {}
    ~zs_tensor() { go(); }
    at::Tensor tensor;
};
namespace {
template <typename Body> zs_status guarded(const char *where, Body body) noexcept
{
    return body([&] { return 1; });
}
class Hook final : public Base {
  public:
    bool operator()(std::map<int, int> x) const override { return true; }
};
} // namespace
void zs_free(zs_tensor *tensor)
{
    delete tensor;
}
"""

GOOD_H = """\
/* unit.h - what stands in headers. */
#ifndef ZS_UNIT_H
#define ZS_UNIT_H
typedef struct zs_unit zs_unit;
enum { ZS_MAX = 8 }; /* beside it */

/* A type. */
typedef struct zs_pair {
    void (*free)(struct zs_pair *); /* owned */
} zs_pair;

typedef struct zs_fields {
    _Alignas(64) int a; /* inside */
    int (*call)(int a);
} zs_fields;

/* Two functions
 * in one breath. */
zs_status zs_make(int a,
                  int b) __attribute__((format(printf, 1, 2)));
void zs_free(int a);

// Another.
static inline int zs_one(void)
{
    return 1;
}
_Static_assert(sizeof(zs_pair) == 8, "");
#endif
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_good_examples_keep_the_rule(rule: Rule) -> None:
    assert rule("py_unit.c", GOOD_C) == []
    assert rule("torch_shim.cpp", GOOD_CPP) == []
    assert rule("unit.h", GOOD_H) == []
