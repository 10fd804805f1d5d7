"""JSON with comments and trailing commas, which DeepSpeed's configs may have.

Both become blanks, so a parser's errors name the right line and column.
"""

from __future__ import annotations

import re

_COMMENT = r"//[^\n]*|#[^\n]*|/\*.*?\*/"
_TOKEN = re.compile(
    rf'"(?:[^"\\\n]|\\.)*"|{_COMMENT}|(?<![\[{{,]),(?=(?:\s|{_COMMENT})*[}}\]])',
    re.DOTALL,
)


def without_comments(text: str) -> str:
    """Return a text of the same length in which comments and trailing commas are blanks."""
    return _TOKEN.sub(_blank, text)


def _blank(token: re.Match[str]) -> str:
    is_string = token[0].startswith('"')
    return token[0] if is_string else re.sub(r"[^\n]", " ", token[0])
