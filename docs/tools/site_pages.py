"""A hook of mkdocs (mkdocs.yml): the parts of `make docs`'s site that are not in docs/.

- Pages of other folders (README.md, examples/README.md, benchmarks/...), the API from docstrings,
  the messages from the sources, and the calculator's data from the planner.
- Links between all of these. In the repository they are relative to its root; a link to a file
  that is no page leads to the repository (`repo_url`), or becomes plain text.
- Redirects from the pages' former places (addresses.py).
- Each page as Markdown, training.md next to training/, and llms.txt, which lists them.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import addresses  # noqa: E402
import api_page  # noqa: E402
import calculator_data  # noqa: E402
import message_page  # noqa: E402

RESULTS = "benchmarks/results"
PAGES = addresses.PAGES | {
    f"{RESULTS}/{path.name}": f"{RESULTS}/{path.name}" for path in (ROOT / RESULTS).glob("*.md")
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE_OR_LINK = re.compile(rf"```.*?```|{LINK.pattern}|`[^`\n]*`", re.DOTALL)

texts: dict[str, str] = {}  # page of the site -> its Markdown, once it is read
sections: dict[str, list[str]] = {}  # heading of llms.txt -> its pages


def on_files(files: Files, config: Any) -> Files:
    """Add the parts that are not in docs/: pages, and the calculator's data."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "api.md", content=api_page.page()))
    files.append(File.generated(config, "messages.md", content=message_page.page()))
    files.append(File.generated(config, "calculator_data.js", content=calculator_data.script()))
    files.append(File.generated(config, "moved.js", content=addresses.script()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make links of the repository links of the site."""
    uri = page.file.src_uri
    page.meta["search"] = {"exclude": uri.startswith(RESULTS)}
    folder = posixpath.dirname(SOURCES.get(uri, f"docs/{uri}"))

    def moved(link: re.Match[str]) -> str:
        image, text, to = link.groups(default="")  # code has no groups
        path, hash_, anchor = to.partition("#")
        if not path or re.match(r"\w+:", to):
            return link.group()
        there = posixpath.normpath(posixpath.join(folder, path))
        target = PAGES.get(there, there.removeprefix("docs/"))
        if (there in PAGES or there.startswith("docs/")) and files.get_file_from_path(target):
            near = posixpath.relpath(target, posixpath.dirname(uri) or ".")
            return f"{image}[{text}]({near}{hash_}{anchor})"
        if not (ROOT / there).exists():
            return link.group()  # mkdocs reports it
        return f"[{text}]({config.repo_url}/blob/main/{there})" if config.repo_url else text

    texts[uri] = CODE_OR_LINK.sub(moved, markdown)
    return texts[uri]


def summary_of(text: str) -> str:
    """The first sentence of a page below its heading."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    plain = [each for each in map(str.strip, paragraphs) if re.match(r"[\w`*\[(]", each)]
    words = LINK.sub(r"\2", " ".join(plain[0].split())) if plain else ""
    return re.split(r"(?<=[.:]) ", words)[0]


def on_nav(nav: Any, config: Any, files: Files) -> None:
    """Note the sections of llms.txt: those of the navigation, then the other pages."""
    for item in nav.items:
        sections[item.title] = [page.file.src_uri for page in item.children]
    listed = {uri for uris in sections.values() for uri in uris}
    rest = {file.src_uri for file in files.documentation_pages()} - listed
    sections["Optional"] = sorted(rest)  # the name that llms.txt has for it


def on_post_build(config: Any) -> None:
    """Write redirects, each page as Markdown, and the list of pages for language models."""
    site = Path(config.site_dir)
    for name, text in addresses.stubs().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, uris in sections.items():
        lines += ["", f"## {section}", ""]
        for uri in uris:
            text = texts[uri]
            (site / uri).parent.mkdir(parents=True, exist_ok=True)
            (site / uri).write_text(text)
            title = next(iter(re.findall(r"^# (.*)$", text, re.MULTILINE)), uri)
            lines.append(f"- [{title}]({config.site_url}{uri}): {summary_of(text)}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
