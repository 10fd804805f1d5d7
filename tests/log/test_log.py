"""The log: ZSHARD_LOG, Python's logger "zshard", and the core's records (csrc/base/log.h)."""

from __future__ import annotations

import contextlib
import logging
import logging.config
import os
import re
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from groups import hosts_of
from nursery import fork_ranks, forked_python
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, _core
from zshard._built import note_on
from zshard.ranks.groups import resolve_groups

LATE = 1.3  # seconds that rank 1 sleeps: a slow wait for rank 0
INFO, DEBUG = {"ZSHARD_LOG": "info"}, {"ZSHARD_LOG": "debug"}


def layers(count=3, width=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def sharded(**options):
    model = FSDP(layers(), **{"auto_wrap_policy": {nn.Linear}, "timeout": 33, **options})
    return model, zshard.AdamW(model.parameters())


def step(model, optimizer, late=False):
    if late and dist.get_rank() == 1:
        time.sleep(LATE)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Lines(logging.Handler):
    """Keeps the messages, and hands them to `then` if it is there."""

    def __init__(self, then=None):
        super().__init__()
        self.lines, self.then = [], then

    def emit(self, record):
        self.lines.append(record.getMessage())
        if self.then:
            self.then(record)

    def has(self, pattern):
        return any(re.search(pattern, line) for line in self.lines)


def listen(level="INFO", then=None):
    """Have the script's own handler listen, before FSDP()."""
    logger, handler = logging.getLogger("zshard"), Lines(then)
    logger.setLevel(level)
    logger.addHandler(handler)
    return handler


def whole_run(folder, transport="auto", per_host=0):
    """A script: steps, one of them late, a save, a load."""
    resolve_groups(None, None, zshard.ShardingStrategy.FULL_SHARD)
    with hosts_of(*[per_host] * (2 // per_host)) if per_host else contextlib.nullcontext() as group:
        model, optimizer = sharded(transport=transport, process_group=group)
        step(model, optimizer)
        step(model, optimizer, late=True)
        zshard.save(folder / "saved", model, optimizer)
        zshard.save(folder / "later", model, optimizer, asynchronous=True).wait()
        zshard.load(folder / "saved", model, optimizer)


def stderrs(*args, env):
    return [each.stderr for each in fork_ranks(whole_run, 2, *args, env=env, check=True)]


COMMON = (
    r"rank 0: transport {kind} between 2 ranks: .*; timeout 33 s",
    r"rank 0: memory to allocate: [\d.]+ MiB.*; left: [\d.]+ MiB, ",
    r"rank 0: zshard \S+, torch \S+, .*loops for \w+, .* host ",
    r"rank 0: plan of Sequential: 4 units, over 2 ranks by {kind}, timeout 33 s",
    r"rank 0:   3 x '0' to '2': 2 parameters, [\d,]+ bytes, [\d,]+ on this rank, full_shard",
    r"rank 0: memory of a step as planned, MiB: .*buckets",
    r"rank 0: the first step of AdamW ended [\d.]+ s after FSDP\(\)",
    r"rank 0: save of '\S+/saved': [\d,]+ bytes by this rank in [\d.]+ s",
    r"rank 0: save of '\S+/later': [\d,]+ bytes",
    r"rank 0: load of '\S+/saved': [\d,]+ bytes by this rank in [\d.]+ s",
)
OF_TRANSPORT = {
    "shm": (r"rank 0: wait for rank 1 to begin forward of 'Sequential': 1\.\d s",),
    "c10d": (r"rank 0: wait for all ranks \(all-gathering .* of unit '\d'\): 1\.\d s",),
    "hosts": (
        r"rank 0: transport shm refused: the ranks are on 2 hosts",
        r"rank 0: wait for all ranks \(",
    ),
}


@pytest.mark.parametrize(("kind", "per_host"), [("shm", 0), ("c10d", 0), ("hosts", 1)])
def test_facts_of_a_run(tmp_path, kind, per_host):
    first, second = stderrs(tmp_path, kind if kind == "c10d" else "auto", per_host, env=INFO)
    for pattern in (*COMMON, *OF_TRANSPORT[kind]):
        pattern = rf"^\d{{4}}-\d\d-\d\d .* zshard INFO {pattern.replace('{kind}', kind)}"
        assert re.search(pattern, first, re.MULTILINE), (pattern, first)
    assert "rank 1: the first step of AdamW" in second and "rank 1: plan" not in second
    assert "DEBUG" not in first and "wait for" not in second


def test_debug_has_the_events_of_a_step(tmp_path):
    first, second = stderrs(tmp_path, "c10d", 0, env=DEBUG)
    for text in (first, second):
        for name in "012":
            assert re.search(rf"DEBUG rank \d: \S+ \({name}\): [\d.]+ ms", text), text
        assert "DEBUG rank" in text and "optimizer.step: " in text and "backward (0): " in text
    assert "DEBUG rank 1: plan of Sequential" in second


def quiet_run(folder):
    whole_run(folder)
    assert "zshard.extras.log" not in sys.modules
    assert _core.log_records() == [] and not logging.getLogger("zshard").handlers


def test_nothing_by_default(tmp_path):
    for each in fork_ranks(quiet_run, 2, tmp_path, check=True):
        assert "rank" not in each.stderr and each.stdout == ""


@on_ranks(2, fresh=True)
def test_the_scripts_own_configuration(tmp_path):
    file = tmp_path / f"{os.environ['RANK']}.log"
    handler = {"class": "logging.FileHandler", "filename": str(file), "formatter": "own"}
    logging.config.dictConfig(
        {
            "version": 1,
            "formatters": {"own": {"format": "%(levelname)s|%(thread)d|%(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"zshard": {"level": "DEBUG", "handlers": ["file"]}},
        }
    )
    model, optimizer = sharded()
    step(model, optimizer)
    step(model, optimizer)  # the first one ends after its records are passed on
    text = file.read_text()
    assert re.search(rf"^DEBUG\|\d+\|rank {dist.get_rank()}: optimizer\.step: ", text, re.MULTILINE)
    assert re.search(r"^(INFO|DEBUG)\|\d+\|rank \d: plan of Sequential", text, re.MULTILINE)
    assert len(logging.getLogger("zshard").handlers) == 1


@on_ranks(2, fresh=True, env=INFO)
def test_a_root_handler_replaces_zshards_own():
    root = Lines()
    logging.getLogger().addHandler(root)
    sharded()
    assert root.has("plan of") or dist.get_rank()
    assert logging.getLogger("zshard").handlers == []


@pytest.mark.parametrize("value", ["warning", "INFO", "1"])
def test_other_values_are_errors(value):
    result = fork_ranks(sharded, 1, env={"ZSHARD_LOG": value})[0]
    assert f"ZSHARD_LOG must be 'info' or 'debug', got '{value}'" in result.stderr


@on_ranks(2, fresh=True)
def test_levels_change_while_it_trains():
    heard = listen("DEBUG")
    model, optimizer = sharded()
    counts = []
    for level in ("DEBUG", "INFO", logging.CRITICAL, "DEBUG", "DEBUG"):
        logging.getLogger("zshard").setLevel(level)
        step(model, optimizer)
        heard.lines.clear()
        step(model, optimizer)
        counts.append(len(heard.lines))
    assert [count > 5 for count in counts] == [True, False, False, True, True]
    logging.getLogger("zshard").disabled = True
    heard.lines.clear()
    step(model, optimizer)
    step(model, optimizer)
    assert heard.lines == [] and _core.log_records() == []


@on_ranks(2, fresh=True)
def test_lost_records_are_counted():
    heard = listen("DEBUG")
    model, _ = sharded()
    heard.lines.clear()
    with torch.no_grad():
        for _ in range(1500):
            model(torch.ones(2, 8))
    _core.log_records() if dist.get_rank() else zshard._logger.drain()
    assert heard.has(r"rank 0: the log has lost \d+ records") or dist.get_rank()


@on_ranks(2, fresh=True)
def test_an_error_drains():
    heard = listen()
    model, _ = sharded()
    if dist.get_rank() == 1:
        time.sleep(LATE)
        os._exit(0)
    seen = []
    zshard.ranks.stalls._watch.ending.set()  # its thread would drain as well
    with pytest.raises(zshard.PeerError):
        try:
            model(torch.ones(2, 8))
        finally:
            seen.extend(heard.lines)
    assert re.search("wait for rank 1 to begin forward", "\n".join(seen))


@on_ranks(1, fresh=True)
def test_ctrl_c_while_an_error_drains():
    def interrupt(record):
        raise KeyboardInterrupt

    heard = listen("DEBUG", interrupt)
    _core.log_level(logging.DEBUG)
    _core.trace_add("zshard::call", time.monotonic_ns())
    with pytest.raises(KeyboardInterrupt):
        _core.Comm.alone("nowhere")
    heard.then = None


def waits_long():
    _core.report_after(1.0)
    heard = listen()
    model, optimizer = sharded()
    if dist.get_rank() == 1:
        time.sleep(2 * LATE)
        assert not heard.has("has been waiting")
    elif dist.get_rank() == 0:
        heard.then = lambda record: seen.append((time.monotonic(), record.getMessage()))
    seen = []
    step(model, optimizer)
    now = time.monotonic()
    texts = [text for at, text in seen if now - at > 0.5]  # while it was waiting
    assert dist.get_rank() or any("has been waiting 1 s for other ranks" in t for t in texts), seen


def test_a_wait_that_lasts_is_logged_meanwhile():
    fork_ranks(waits_long, 2, check=True)


@on_ranks(2, fresh=True)
def test_beside_a_trace_and_of_two_models():
    heard = listen("DEBUG")
    with zshard.profile() as traced:
        for _ in range(2):
            model, optimizer = sharded()
            step(model, optimizer)
    assert sum("plan of Sequential" in line for line in heard.lines) == 2
    assert sum("the first step of" in line for line in heard.lines) == 2
    assert heard.has(r"optimizer\.step: [\d.]+ ms") and not heard.has("shards=")
    assert any("optimizer.step" in name for each in traced.ranks for name, *_ in each.ranges)


@on_ranks(2, fresh=True)
def test_handlers_that_raise_or_call_zshard(tmp_path):
    def fail(record):
        raise OSError("the disk is full")

    heard = listen("DEBUG", fail)
    model, optimizer = sharded()
    step(model, optimizer)
    assert len(heard.lines) > 5
    with mock.patch.object(logging, "_logRecordFactory", lambda *_, **__: 1 / 0):
        step(model, optimizer)  # its factory of records raises as well
    heard.then = lambda record: (
        zshard.save(tmp_path / "b", model, overwrite=True)
        if "save of" in record.getMessage()
        else None
    )
    logging.getLogger("zshard").setLevel("DEBUG")
    zshard.save(tmp_path / "a", model)  # its line saves once more, silently
    assert sum("save of" in line for line in heard.lines) == 1
    assert (tmp_path / "b").exists()


@on_ranks(2, fresh=True, env=DEBUG)
def test_stderr_may_be_closed():
    sys.stderr.close()
    model, optimizer = sharded()
    step(model, optimizer)


@on_ranks(2, fresh=True)
def test_forked_children_start_without_records():
    listen("DEBUG")
    model, _ = sharded()
    model(torch.ones(2, 8))
    pid = os.fork()
    if pid == 0:
        os._exit(len(_core.log_records()))
    assert os.waitpid(pid, 0)[1] == 0
    assert len(_core.log_records()) > 0


@on_ranks(2, fresh=True)
def test_plans_of_many_units_are_short():
    heard = listen()
    FSDP(layers(400), auto_wrap_policy={nn.Linear})
    assert len(heard.lines) < 8
    heard.lines.clear()
    wide = nn.ModuleDict({f"é{i}": nn.Linear(i, 2048) for i in range(1, 100)})
    FSDP(wide, auto_wrap_policy={nn.Linear})
    assert len(heard.lines) < 28
    assert dist.get_rank() or (
        heard.has(r"'é\d+': 2 parameters") and heard.has(r"of \d+ other kinds")
    )


@on_ranks(1, fresh=True)
def test_fallbacks():
    heard = listen()
    parts = torch.zeros(4, 4).t()[:, ::2], torch.ones(4)
    params = [nn.Parameter(part) for part in parts]
    model = FSDP(nn.Linear(4, 4))
    optimizer = zshard.AdamW([*params, *model.parameters()])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert heard.has(r"AdamW steps 1 of \d+ parameters by torch")


def raises_undecoded():
    sharded()
    raise OSError("cannot open caf\udce9")


def test_names_that_are_not_utf8():
    for each in fork_ranks(raises_undecoded, 2, env=INFO):
        assert "an exception ends this rank: OSError: cannot open caf?" in each.stderr
        assert "UnicodeEncodeError" not in each.stderr


def raises_where_a_handler_is_slow():
    model, optimizer = sharded()
    if dist.get_rank() == 1:
        listen(then=lambda _: time.sleep(3 * LATE))
        raise ValueError("bad data")
    began = time.monotonic()
    with pytest.raises(zshard.PeerError, match="bad data"):
        step(model, optimizer)
    assert time.monotonic() - began < 2 * LATE


def test_peers_learn_of_an_exception_before_handlers():
    assert fork_ranks(raises_where_a_handler_is_slow, 2)[0].returncode == 0


def dies():
    model, optimizer = sharded()
    step(model, optimizer)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    step(model, optimizer)


def test_the_exception_that_ends_a_rank_is_in_the_log():
    first, _ = fork_ranks(dies, 2, env=INFO)
    assert re.search(r"INFO rank 0: an exception ends this rank: PeerError: rank 1", first.stderr)


def test_doctor_prints_json():
    done = forked_python("-m", "zshard", "doctor", "--json", env={"ZSHARD_TIMEOUT": "7"})
    import json

    found = json.loads(done.stdout)
    assert found["environment"]["ZSHARD_TIMEOUT"] == "7" and found["zshard"] == zshard.__version__
    assert found["built"]["torch"] == note_on(_core.__file__).read_text().split()[0]
    assert found["built"]["variant"] in ("release", "debug", "sanitize") and found["shm"] is True
    text = forked_python("-m", "zshard", "doctor").stdout
    assert found["cpus"] in text and found["loops"] in text and found["folder"] in text
