"""The Hopper kernel of paged attention, interpreted and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.paged_attention.stand_ins  # noqa: F401
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.paged_attention import PagedAttentionConfig, paged_attention
from pallas_kernels.paged_attention.config import default_split
from pallas_kernels.paged_attention.inputs import FP8
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.paged_attention.cases import (
    Case,
    bits,
    check,
    check_lost_pages,
)


P = jax.sharding.PartitionSpec
BASE = Case(dtype=jnp.bfloat16, head_dim=64, page=16)
kernel = functools.partial(paged_attention, implementation="mosaic_gpu")


def case(*lengths, **changes):
    return dataclasses.replace(BASE, lengths=lengths, **changes)


def cut(split=64, **fields):
    return PagedAttentionConfig(split=split, **fields)


def interpreted(config=None, *, num_sms=2, detect_races=False):
    """The kernel in the interpreter; teams are threads, blocks run in turn."""

    def run(**arguments):
        device = dataclasses.replace(H200, num_sms=num_sms)
        with use_device(device), interpret_mosaic_gpu(detect_races=detect_races):
            return jax.tree.map(np.asarray, kernel(**arguments, config=config))

    return run


CASES = {
    "three splits, one, none": (case(150, 0, 63), cut(slots=3)),
    "more splits than are added at a time": (case(1100, heads=(1, 1)), cut()),
    "queries of a group, H 128": (
        case(70, 40, heads=(8, 1), queries=2, head_dim=128),
        cut(teams=1),
    ),
    "drafts": (case(62, 130, queries=3, num_new=(3, 2)), cut(128)),
    "window": (case(150, 20, 300, queries=2, window=50), cut()),
    "window of one": (case(64, 20, window=1, heads=(1, 1)), cut()),
    "softcap, pages of 64": (
        case(100, 3, page=64, softcap=1.5, scale=0.4, heads=(2, 2)),
        cut(),
    ),
    "H 256, pages of 128": (case(100, heads=(1, 1), head_dim=256, page=128), cut()),
    "dead rows": (case(100, 20, 7, num_new=(0, 1, 0)), None),
    "all rows dead": (case(40, 2, num_new=(0, 0)), None),
    "past the table": (case(62, 70, 78, queries=4, width=5), cut()),
    "fp8": (
        case(100, 3, queries=2, num_new=(2, 1), head_dim=128, page=64, pages_dtype=FP8),
        cut(),
    ),
    "fp8, three teams": (
        case(290, 3, head_dim=128, page=64, pages_dtype=FP8),
        cut(teams=3),
    ),
    "fp8, window, softcap, H 256": (
        case(
            150,
            20,
            window=70,
            softcap=2.0,
            heads=(2, 1),
            head_dim=256,
            page=128,
            pages_dtype=FP8,
            dtype=jnp.float16,
        ),
        cut(128),
    ),
    "fp16, pages of 32": (case(90, page=32, dtype=jnp.float16, heads=(3, 1)), cut()),
}


@pytest.mark.parametrize(("step", "config"), CASES.values(), ids=CASES)
def test_interpreted_kernel(step, config):
    check(step, interpreted(config))


def test_splits_are_as_long_as_rows_and_heads_allow():
    split = functools.partial(default_split, page=64, num_sms=132)
    assert [split(rows, 8) for rows in (1, 4, 8, 12, 16, 128)] == (
        [512, 512, 1024, 1024, 2048, 2048]
    )
    assert split(32, 8, page=16) == 1024


def test_bits_of_a_row_do_not_depend_on_its_neighbors():
    """Splits are longer the more rows there are, real or not."""
    step = case(
        700, 1100, 30, num_new=(1, 1, 1), heads=(1, 1), head_dim=128, page=64,
        pages_dtype=FP8,
    )  # fmt: skip
    arrays = step.arrays()
    lengths, num_new = np.array([700, 0, 0], np.int32), np.array([1, 0, 0], np.int32)
    alone = arrays | {"lengths": lengths, "num_new": num_new}
    for num_sms in (7, 8):  # splits of 1,024 and 512 tokens
        run = interpreted(num_sms=num_sms)
        first, other = (bits(run(**x)[0])[0] for x in (arrays, alone))
        assert (first == other).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_no_races(fp8):
    """One split a row: what splits leave for one another is ordered by a counter."""
    step = case(50, 20, 33, queries=2, num_new=(2, 0, 1), heads=(2, 1))
    if fp8:
        step = dataclasses.replace(step, head_dim=128, page=64, pages_dtype=FP8)
    check(step, interpreted(cut(slots=3), num_sms=1, detect_races=True))


def test_random_steps():
    rng = np.random.default_rng(0)
    for seed in range(4):
        kv_heads, queries, rows = (int(n) for n in rng.integers(1, 4, 3))
        step = case(
            *(int(n) for n in rng.integers(0, 140, rows)),
            queries=queries,
            num_new=tuple(int(n) for n in rng.integers(0, queries + 1, rows)),
            heads=(kv_heads * int(rng.integers(1, 4)), kv_heads),
            page=int(rng.choice([8, 16, 64])),
            window=int(rng.integers(1, 90)) if seed % 2 else None,
            seed=seed,
        )
        check(step, interpreted(cut(int(rng.choice([64, 128])))))


def test_tokens_without_a_page():
    check_lost_pages(interpreted(cut()))


def test_a_row_depends_on_itself_alone():
    """Bit for bit: on no neighbor, on no page id, on no poison."""
    arrays = case(130, 20, 66).arrays()
    run = interpreted(cut())
    out, _ = run(**arrays)
    alone = arrays | {
        name: arrays[name][:1] for name in ("q", "kv", "table", "lengths")
    }
    np.testing.assert_array_equal(run(**alone)[0], out[:1])
    order = np.random.default_rng(1).permutation(arrays["pages"].shape[1])
    moved = arrays | {
        "pages": jnp.nan_to_num(arrays["pages"][:, np.argsort(order)], nan=7.0),
        "table": order[np.clip(arrays["table"], 0, len(order) - 1)].astype(np.int32),
    }
    np.testing.assert_array_equal(run(**moved)[0], out)


def test_a_batch_is_refused():
    step = case(20, heads=(1, 1)).arrays()
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), step)
    with use_device(H200), pytest.raises(NotImplementedError, match="into one call"):
        jax.vmap(lambda arrays: kernel(**arrays))(stacked)


@pytest.mark.parametrize("checked", [False, True])
def test_heads_in_a_shard_map(checked):
    step = case(70, 20, heads=(4, 2))
    arrays = jax.tree.map(jnp.asarray, step.arrays())
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = P(None, None, None, "tensor")
    specs = {"q": P(None, None, "tensor"), "kv": heads, "pages": heads}
    specs = {name: specs.get(name, P()) for name in arrays}
    run = jax.shard_map(
        lambda arrays: kernel(**arrays, config=cut()),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs["q"], heads),
        check_vma=checked,
    )

    def sharded(**arguments):
        with use_device(dataclasses.replace(H200, num_sms=1)), interpret_mosaic_gpu():
            return jax.tree.map(np.asarray, jax.jit(run)(arguments))

    check(step, lambda **_: sharded(**arrays))


def test_what_the_kernel_cannot_do_goes_to_xla():
    steps = {
        "head dim 32": case(5, head_dim=32),
        "types float32": case(5, dtype=jnp.float32),
        "pages of 4 tokens": case(5, page=4),
        "fp8 pages of 16 tokens": case(5, page=16, pages_dtype=FP8),
        "64 together": case(5, heads=(33, 1), queries=2),
    }
    with use_device(H200):
        for message, step in steps.items():
            with pytest.raises(Unsupported, match=message):
                kernel(**step.arrays())
            check(step)
        with pytest.raises(Unsupported, match="shared memory"):
            kernel(**case(5).arrays(), config=cut(slots=99))
    with pytest.raises(Unsupported, match="paged_attention: the Mosaic GPU kernel"):
        kernel(**case(5).arrays())


def test_many_rows_and_queries_lower():
    step = case(*range(70), queries=16, heads=(4, 1))
    with use_device(H200):
        arrays = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step.arrays()))
        lower_for_cuda(lambda arrays: kernel(**arrays), arrays, kernels=1)


def test_pages_are_changed_in_place_by_a_loop():
    """A step after the other, in a scan over layers, as the portable one does it."""
    step = case(60, 3, heads=(2, 1), layers=2)
    arrays = jax.tree.map(jnp.asarray, step.arrays())
    arrays["pages"] = jnp.nan_to_num(arrays["pages"], nan=0.5)

    def run(op, arrays):
        def layer(carry, number):
            q, pages = carry
            return op(**arrays | {"q": q, "pages": pages, "layer": number}), None

        carry = arrays["q"], arrays["pages"]
        return jax.lax.scan(layer, carry, jnp.arange(2, dtype=jnp.int32))[0]

    with use_device(dataclasses.replace(H200, num_sms=1)), interpret_mosaic_gpu():
        out, pages = jax.tree.map(
            np.asarray, jax.jit(functools.partial(run, kernel))(arrays)
        )
    portable = functools.partial(paged_attention, implementation="xla")
    wanted, wanted_pages = run(portable, arrays)
    np.testing.assert_allclose(
        out.astype(np.float32), np.asarray(wanted, np.float32), atol=3e-2
    )
    np.testing.assert_array_equal(bits(pages), bits(wanted_pages))
