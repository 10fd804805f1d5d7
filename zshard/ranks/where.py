"""The script's current line as text, for errors and for ranks that wait long.

It is looked up only when an error is made, or when a peer asks. Nothing decides by it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from zshard import _core

_NOT_THE_SCRIPT = frozenset(("torch", "zshard", *sys.stdlib_module_names))
_FILE, _FUNCTION, _UNIT = 96, 48, 64  # bytes of each; the core has room for 320 (script.h)


def here() -> str:
    """Return the line of this thread's script; on a thread of torch's, of the main thread's."""
    return _line_of(sys._getframe()) or script()


def script(thread: int = 0) -> str:
    """Return the line of the script on that thread, or else on the main thread, as
    "train.py:41 in train(), in backward, step 12; last unit 'blocks.3'"."""
    frames = sys._current_frames()
    try:
        for each in (thread, threading.main_thread().ident or 0):
            if line := _line_of(frames.get(each)):
                return line
        return "outside of its script" + _progress()
    finally:
        frames.clear()  # with this function's own frame in it, it would keep all of them alive


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost line that is neither torch's, zshard's nor the standard library's; ""
    if there is none."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_THE_SCRIPT:
            return _place_of(frame) + _progress()
        frame = frame.f_back
    return ""


def _place_of(frame: FrameType) -> str:
    code = frame.f_code
    file = _cut("/".join(code.co_filename.split("/")[-2:]), _FILE)
    function = "" if code.co_name == "<module>" else f" in {_cut(code.co_qualname, _FUNCTION)}()"
    return f"{file}:{frame.f_lineno}{function}"


def _progress() -> str:
    call, run, steps, unit = _core.position()
    doing = call or run
    text = f", in {doing}" if doing else ""
    if steps or run or unit:
        text += f", step {steps}"
    return f"{text}; last unit '{_cut(unit, _UNIT)}'" if unit else text


def _cut(text: str, size: int) -> str:
    """Return at most the last `size` bytes of a text in UTF-8."""
    data = text.encode("utf-8", "backslashreplace")  # undecodable bytes of a file's name
    kept = data if len(data) <= size else b"..." + data[3 - size :]
    return kept.decode("utf-8", "ignore")
