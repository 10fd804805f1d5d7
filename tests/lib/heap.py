"""The bytes that malloc has allocated, exactly."""

import ctypes


class _MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")  # the 8th is uordblks


def heap_bytes():
    """Return the bytes that malloc has allocated and not freed, in all arenas; 0 if libc does not
    report them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return info.h + info.b  # in arenas, and blocks that malloc mapped
