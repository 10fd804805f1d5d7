"""What fails while a model on a disk trains: memory for buffers, writes, reads.

Each case is a process of its own, as limits and losses are a process's.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MANY = 1 << 20  # bytes

ALONE = """
    import resource, sys, torch, zshard

    def written():
        return int(open("/proc/self/io").read().split()[3])  # wchar

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 1))

    def wrap(**options):
        model = zshard.FSDP(make(), **options)
        return model, zshard.AdamW(model.parameters(), 1e-2)

    def grads(model):
        model(torch.ones(1, 2048)).sum().backward()

    torch.set_num_threads(1)
    model, optimizer = wrap(offload=zshard.Offload(directory=sys.argv[1], cache=1 << 20))
    for _ in range(2):
        grads(model)
        optimizer.step()
        optimizer.zero_grad()
    assert written() > 1 << 20
    grads(model)
    before = written()
"""


def run_alone(folder, code):
    code = textwrap.dedent(ALONE) + textwrap.dedent(code)
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_no_memory_for_a_buffer(tmp_path):
    """The step then works on the mapping."""
    done = run_alone(
        tmp_path,
        """
        data = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + (4 << 20), resource.RLIM_INFINITY))
        optimizer.step()
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        print(written() - before)
        plain, plain_optimizer = wrap()
        for _ in range(3):
            plain_optimizer.zero_grad()
            grads(plain)
            plain_optimizer.step()
        for a, b in zip(model.parameters(), plain.parameters()):
            assert torch.equal(a, b)
    """,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MANY, done.stdout  # the second unit's buffers are small


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_unwritable_disk(tmp_path, in_backward):
    """A file that rejects further writes acts like an I/O error: the step reports it, and so does
    every later call."""
    step = "grads(model)" if in_backward else "optimizer.step()"
    done = run_alone(
        tmp_path,
        f"""
        optimizer.step()
        optimizer.zero_grad()
        if {in_backward}:
            model.optimizer_in_backward(optimizer)
        else:
            grads(model)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for _ in range(2):
            try:
                {step}
            except OSError as error:
                print(error)
    """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restart from a checkpoint") == 2, done.stdout + done.stderr


def test_another_model_after_an_unwritable_disk(tmp_path):
    """What was lost ended with its model: the next one, in a better place, is as new."""
    done = run_alone(
        tmp_path,
        """
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            optimizer.step()
        except OSError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        del model, optimizer
        model, optimizer = wrap(offload=zshard.Offload(directory=sys.argv[1], cache=1 << 20))
        grads(model)
        optimizer.step()
    """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restart from a checkpoint") == 1, done.stdout


def test_unreadable_disk(tmp_path):
    """Every read of what the disk has lost is an error, not the first one alone: to touch it would
    end the process."""
    done = run_alone(
        tmp_path,
        """
        import contextlib, os

        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "/zshard-" in os.readlink("/proc/self/fd/" + fd):
                    os.ftruncate(int(fd), 4096)
        for _ in range(3):
            try:
                model(torch.ones(1, 2048))
            except OSError as error:
                print(error)
    """,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.count("cannot read back") == 3, done.stdout + done.stderr
