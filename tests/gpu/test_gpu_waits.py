"""What the rest of a process may do while a rank with a GPU waits for others: Ctrl-C.

On a GPU torch runs a backward on a thread of its own, and the main thread waits for it
in torch, where Python sees no signal. So here a thread runs it too, and the main thread waits in a
mutex of C's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import stand_ins
import torch
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

LATE = 1.2  # seconds


def make_model(transport: Any) -> Any:
    """Its backward gathers nothing: for the stand-in's compute stream the calling thread would wait."""
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"strategy": "shard_grad_op", "transport": transport, "timeout": 30.0}
    return FSDP(layers, auto_wrap_policy=policy, **options)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def run_beside(call: Any) -> None:
    """Has a thread run it while this one waits in C, where signals interrupt nothing."""
    libc = ctypes.CDLL(None)
    lock, unlock = libc.pthread_mutex_lock, libc.pthread_mutex_unlock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)

    def work() -> None:
        call()
        unlock(mutex)

    threading.Thread(target=work).start()
    lock(mutex)


def press_in_backward(env: dict[str, str], own_handler: bool) -> dict[str, Any]:
    """What comes of Ctrl-C on rank 0, whose backward waits for rank 1."""
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    model = make_model("auto")
    loss = model(torch.ones(2, 8)).sum()
    said: dict[str, Any] = {"backward": "", "main": "", "handled": 0}
    if os.environ["RANK"] == "1":
        time.sleep(LATE)

    def backward() -> None:
        begin = time.monotonic()
        try:
            loss.backward()
        except Exception as error:
            said["backward"] = f"{type(error).__name__}: {error}"
        said["seconds"] = time.monotonic() - begin

    def handle(*_: Any) -> None:
        said["handled"] += 1

    if own_handler:
        signal.signal(signal.SIGINT, handle)
    if os.environ["RANK"] == "0":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        run_beside(backward)
        time.sleep(0.01)  # Python has a turn to raise it
    except KeyboardInterrupt:
        said["main"] = "KeyboardInterrupt"
    return said


def test_ctrl_c_interrupts_a_backward_on_another_thread() -> None:
    env = stand_ins.environment("nccl")
    pressed = fork_ranks(press_in_backward, 2, env, False, check=True)
    said, other = (each.value for each in pressed)
    assert "interrupted while waiting for another rank" in said["backward"]
    assert said["main"] == "KeyboardInterrupt" and said["seconds"] < LATE
    assert "PeerError" in other["backward"] and "rank 0" in other["backward"]


def test_ctrl_c_with_a_handler_of_the_script() -> None:
    env = stand_ins.environment("nccl")
    for each in fork_ranks(press_in_backward, 2, env, True, check=True):
        assert each.value["backward"] == "" and each.value["main"] == ""
    assert each.value["handled"] == 0  # rank 1
