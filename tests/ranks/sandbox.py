"""Deny one rank what containers and old kernels deny: system calls, capabilities, limits.

A seccomp filter, installed by the rank itself, answers a system call with an error as a sandbox
would; nothing in zshard or torch is replaced. It cannot be removed: use forked ranks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path

import pytest

# x86-64's numbers; the other architectures share those above 400.
CALLS = {"mmap": 9, "memfd_create": 319, "pidfd_open": 434}
NO_EXECUTION = 8  # MFD_NOEXEC_SEAL
SHARED = 1  # MAP_SHARED

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_CAPABILITIES = 0x20080522  # version 3

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's system calls")


def deny(call: str, error: str, bits: tuple[int, int] | None = None, without: bool = False) -> None:
    """Make `call` fail with `error`, permanently, on this thread and those that it will create.

    bits: (argument, bits): only if the argument has one of these bits; `without`: none of them.
    """
    answer = (_RETURN, 0, 0, _ERRNO | getattr(errno, error))
    allow = (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, 0)]
    if bits is None:
        steps += [(_JUMP_EQUAL, 0, 1, CALLS[call]), answer, allow]
    else:
        argument, mask = bits
        found = (_JUMP_SET, 1, 0, mask) if without else (_JUMP_SET, 0, 1, mask)
        steps += [(_JUMP_EQUAL, 0, 3, CALLS[call]), (_LOAD, 0, 0, 16 + 8 * argument)]
        steps += [found, answer, allow]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(head), 0, 0) != 0:
        pytest.skip(f"no seccomp filters here: {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """Leave this process as few capabilities as root has in a restricted container: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(head, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def limit_files(left: int) -> None:
    """Limit this process to so many more open files than it has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + left,) * 2)


def limit_addresses(left: int) -> None:
    """Limit this process to so many more bytes of address space than it has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + left,) * 2)
