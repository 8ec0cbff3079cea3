"""Programs that are compiled behind, and what stands in for them meanwhile."""

import concurrent.futures
import contextlib
import functools
import gc
import threading
import time
import types

import pytest

from jaxscale.inference import EngineConfig, Overloaded
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.make import freeze_gc_heap
from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.program_table import ProgramTable
from jaxscale.inference.engine.scheduling.scheduler_output import KEY_BLOCK
from pallas_kernels.varlen_attention import paged
from tests.inference.engine.test_engine import PROMPTS, SETTINGS


class Jitted:
    """A function that is compiled once it may be."""

    def __init__(self, go_on, error=None):
        self.go_on, self.error = go_on, error

    def trace(self):
        return self

    def lower(self):
        return self

    def compile(self):
        assert self.go_on.wait(600)
        if self.error is not None:
            raise self.error
        return print


KEYS = [
    ("update",),
    *(("sample", bucket) for bucket in (2, 128, 256)),
    *(("decode", bucket, steps) for bucket in (2, 128, 256) for steps in (1, 4)),
    ("speculate", 2, 1),
    *(("forward", bucket) for bucket in (2, 128, 256)),
    *(("prefill", tokens, 512, scored) for tokens in (64, 256) for scored in (0, 1)),
]


def table(keys=(), adapted=False):
    made = ProgramTable([2, 128, 256], [(64, 512), (256, 512)], adapted=adapted)
    made.update(dict.fromkeys(keys, print))
    return made


def test_programs_have_room_for_keys_in_the_blocks_that_attention_gathers():
    assert KEY_BLOCK == paged.KEY_BLOCK


def test_few_are_waited_for_and_do_everything(caplog):
    now, later = threading.Event(), threading.Event()
    made = table()
    first, behind = made.order([(key, None, ()) for key in KEYS])
    assert {key for key, *_ in first} == {
        ("update",),
        ("sample", 128),
        ("decode", 128, 1),
        ("forward", 128),
        ("prefill", 256, 512, False),
    }
    # Steps of one token and prompts, before what is asked for less.
    order = [key for key, *_ in behind]
    assert order.index(("decode", 2, 1)) < order.index(("decode", 2, 4))
    assert order[-1] == ("speculate", 2, 1)
    now.set()
    broken = Jitted(later, RuntimeError("no memory"))
    made.compile(
        [(key, Jitted(now), ()) for key, *_ in first],
        [
            (key, broken if key == ("sample", 2) else Jitted(later), ())
            for key, *_ in behind
        ],
        scope=contextlib.nullcontext,
        cache=None,
        placement="",
        progress=None,
    )
    assert not made.whole and made.num_compiled == (5, len(KEYS))
    assert made.max_rows == 128 and not made.scores_prompts
    assert made.decode(2, 1, 0, adapted=False) == ("decode", 128, 1)
    assert made.forward(2, adapted=False) == ("forward", 128)
    assert made.prefill(3, 9, scored=False, adapted=False)[1] == 256
    later.set()
    end = time.monotonic() + 120
    while made.num_compiled[0] < len(KEYS) - 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert made.max_rows == 256 and made.scores_prompts and not made.whole
    assert made.decode(2, 4, 0, adapted=False) == ("decode", 2, 4)
    # As many rows as a program has that samples from them.
    assert made.forward(2, adapted=False) == ("forward", 128)
    assert made.prefill(3, 9, scored=False, adapted=False)[1] == 64
    assert "no memory" in caplog.text


def test_what_is_waited_for_is_compiled_by_itself():
    """All is traced and lowered in its order, and the others compile after it."""
    made, done = table(), []
    together, lowered = threading.Barrier(2), threading.Event()

    class Noted(Jitted):
        def __init__(self, key):
            self.key = key

        def trace(self):
            done.append(("trace", self.key))
            return self

        def lower(self):
            done.append(("lower", self.key))
            if self.key == "d":
                lowered.set()
            return self

        def compile(self):
            if self.key in "ab":
                together.wait(600)
                assert lowered.wait(600)
            done.append(("compile", self.key))
            return print

    programs = [((key,), Noted(key), ()) for key in "abcd"]
    options = {"scope": contextlib.nullcontext, "cache": None, "placement": ""}
    made.compile(programs[:2], programs[2:], progress=None, **options)
    end = time.monotonic() + 120
    while not made.whole and time.monotonic() < end:
        time.sleep(0.01)
    python = [each for each in done if each[0] != "compile"]
    assert python == [(step, key) for key in "abcd" for step in ("trace", "lower")]
    compiled = [key for step, key in done if step == "compile"]
    assert set(compiled[:2]) == {"a", "b"} and set(compiled[2:]) == {"c", "d"}


def test_what_is_behind_is_traced_once_the_weights_are_there():
    """Reading them needs Python's lock too."""
    made, begun, traced = table(), threading.Event(), []

    class Weights(threading.Event):
        def wait(self, timeout=None):
            begun.set()
            return super().wait(timeout)

    class Noted(Jitted):
        def __init__(self, key):
            super().__init__(begun)
            self.key = key

        def trace(self):
            traced.append((self.key, weights.is_set()))
            if self.key == "b":
                begun.set()
            return self

    weights = Weights()
    a, b = ((((key,), Noted(key), ()),) for key in "ab")
    options = {"scope": contextlib.nullcontext, "cache": None, "placement": ""}
    made.compile(a, b, progress=None, weights=weights, **options)
    assert traced == [("a", False)] and not made.whole
    weights.set()
    end = time.monotonic() + 120
    while not made.whole and time.monotonic() < end:
        time.sleep(0.01)
    assert traced == [("a", False), ("b", True)]


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_nothing_is_compiled_behind_what_fails(error):
    made, now, begun = table(), threading.Event(), []
    pools = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            pools.append(self)

    class Behind(Jitted):
        def compile(self):
            begun.append(self)

    def progress():
        raise error

    now.set()
    raises = error if isinstance(error, RuntimeError) else None
    options = {"scope": contextlib.nullcontext, "cache": None, "placement": ""}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
        made.compile(
            [(("a",), Jitted(now, raises), ())],
            [((name,), Behind(now), ()) for name in "bcd"],
            progress=progress,
            **options,
        )
    for pool in pools:
        pool.shutdown()
    assert not begun


def test_a_broken_file_of_the_cache_does_not_wait_for_what_is_behind():
    made, done, busy = table(), [], threading.Event()

    class Cache(ProgramCache):
        def __init__(self):
            pass

        def name(self, traced, where):
            return traced.key

        def __contains__(self, name):
            return name == "a"

        def load(self, name):
            assert busy.wait(600)

        def store(self, name, found):
            pass

    class Noted(Jitted):
        def __init__(self, key):
            self.key = key

        def trace(self):
            if self.key == "b":
                busy.set()
                end = time.monotonic() + 120
                while not made_again() and time.monotonic() < end:
                    time.sleep(0.001)
            done.append(("trace", self.key))
            return self

        def lower(self):
            done.append(("lower", self.key))
            return self

        def compile(self):
            return print

    pools = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            pools.append(self)

    def made_again():
        """Whether the one thread has been asked for one thing more."""
        return pools[0]._work_queue.qsize() > 3

    programs = [((key,), Noted(key), ()) for key in "abcde"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
        made.compile(
            programs[:1],
            programs[1:],
            scope=contextlib.nullcontext,
            cache=Cache(),
            placement="",
            progress=None,
        )
    for pool in reversed(pools):
        pool.shutdown()
    order = [each for each in done if each[1] == "a" or each[0] == "trace"]
    assert order.index(("lower", "a")) < order.index(("trace", "c"))
    assert made.whole


def test_nothing_is_told_after_a_stop():
    made, told, now = table(), [], threading.Event()
    now.set()
    programs = [(key, Jitted(now), ()) for key in KEYS]

    def progress():
        told.append(len(told))

    made.stop()
    options = {"scope": contextlib.nullcontext, "cache": None, "placement": ""}
    made.compile(programs, [], progress=progress, **options)
    assert not made and not told


def test_programs_with_adapters_do_what_others_do():
    keys = [("decode_lora", 128, 1), ("forward_lora", 128), ("sample", 128)]
    made = table(keys, adapted=True)
    for adapted in (False, True):
        assert made.decode(2, 1, 0, adapted=adapted) == ("decode_lora", 128, 1)
    assert made.max_rows == 128
    made["decode", 128, 1] = print
    assert made.decode(2, 1, 0, adapted=False) == ("decode", 128, 1)


def test_a_mixed_batch_takes_the_smallest_program_that_is_there():
    sizes = [(128, 2304, 64), (128, 2304, 128), (256, 2304, 64)]
    made = table([("mixed", *each) for each in sizes])
    assert made.mixed(100, 2304, 32) == ("mixed", 128, 2304, 64)
    assert made.mixed(100, 200, 96) == ("mixed", 128, 2304, 128)
    assert made.mixed(129, 200, 8) == ("mixed", 256, 2304, 64)
    for many in ((257, 2304, 2), (129, 200, 96), (1, 2305, 2)):
        assert made.mixed(*many) is None
    assert table().mixed(1, 1, 1) is None


@pytest.mark.parametrize(
    ("options", "buckets", "on_cpu", "expected"),
    [
        ({}, [2, 64, 96, 128], False, [(128, 64), (128, 128), (256, 64), (256, 128)]),
        ({}, [2, 8], False, [(128, 8), (256, 8)]),
        ({}, [8], False, []),
        ({}, [2, 4], False, []),
        ({"mixed_batches": True}, [8], True, [(16, 8), (64, 8), (256, 8)]),
        ({"mixed_batches": True, "prefill_tokens": (512,)}, [8], False, [(512, 8)]),
        ({"mixed_batches": False}, [2, 64], False, []),
        ({}, [2, 64], True, []),
        ({"drafts": 2, "mixed_batches": True}, [2, 64], False, []),
    ],
)
def test_sizes_of_mixed_batches(options, buckets, on_cpu, expected):
    assert [*EngineConfig(**options).mixed(buckets, on_cpu=on_cpu)] == expected


def test_the_heap_is_frozen_once_all_is_compiled(monkeypatch):
    calls = []
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    made = table()
    made._total = 2

    class Compiled(Engine):
        def __init__(self):
            self.runner = types.SimpleNamespace(table=made)
            self.after_step = []

    freeze_gc_heap(engine := Compiled())
    for keys, frozen in ((0, 1), (1, 1), (2, 2), (2, 2)):
        made.update(dict.fromkeys(KEYS[:keys], print))
        for call in engine.after_step:
            call()
        assert calls == ["collect", *["freeze"] * frozen]


@pytest.fixture
def few(llama, monkeypatch):
    """A runner with the first programs only."""
    whole = llama.runner.table
    made = ProgramTable(whole._buckets, whole._prefills, adapted=False)
    first, _ = made.order((key, None, ()) for key in whole)
    made.update({key: whole[key] for key, *_ in first})
    made._total = len(whole)
    monkeypatch.setattr(llama.runner, "table", made)
    return whole, made


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_do_not_see_which_programs_are_there(llama, few, name):
    whole, made = few
    results = []
    for _ in range(2):
        run = llama.run()
        run.add("beside", PROMPTS["page"], max_tokens=20)
        run.add(name, PROMPTS["long"], max_tokens=12, **SETTINGS[name])
        run.finish()
        results.append(run.result(name))
        made.update(whole)
    assert results[0] == results[1]


def test_log_probabilities_of_prompts_wait_for_their_program(llama, few):
    whole, made = few
    run = llama.run()
    with pytest.raises(Overloaded, match="are being compiled"):
        run.add("a", PROMPTS["page"], max_tokens=2, prompt_logprobs=1)
    made.update(whole)
    run.add("a", PROMPTS["page"], max_tokens=2, prompt_logprobs=1)
    run.finish()
    assert run.result("a")[2] == "length"
