"""Every layout of eight devices against one device; the tests run a covering set.

    JAX_NUM_CPU_DEVICES=8 python -m tests.training.every_layout [--part 0/4]

Axes pipe x tensor x fsdp x data x context, ZeRO 1 to 3, 1, 2 and 4 chunks, blocks of
LLaMA, GPT-2 and GPT-J, whole and packed rows, layers that divide and that do not.
"""

import argparse
import itertools
import os
import sys
import time

import jax

from tests.training.layouts import Layout, errors


TOLERANCE = 1e-5
ZERO = ((3, False), (1, False), (2, False), (1, True), (2, True))
"""What is split during a step, and whether parameters are whole between steps."""


def layouts():
    """All of them: who communicates, what is computed again and windows go around."""
    others = itertools.cycle(
        itertools.product(
            ((), (5,), (5, None)), (None, "xla", "fused"), ("none", "attention", "full")
        )
    )
    for pipe, tensor, fsdp, data, context in itertools.product((1, 2, 4, 8), repeat=5):
        if pipe * tensor * fsdp * data * context != 8 or tensor > 2:  # two key heads
            continue
        choices = itertools.product(
            ZERO if fsdp > 1 else ZERO[:1],
            (1, 2, 4) if pipe > 1 else (1,),
            ("llama_tiny", "gpt2_tiny", "gptj_tiny"),
            (True, False),
            (0, 1),
        )
        for (zero, replicated), chunks, model, packed, more in choices:
            windows, parallel, remat = next(others)
            if more:  # no pattern but one fits
                windows = windows[:1]
            places = max(len(windows), 1)
            yield Layout(
                model=model,
                # One more than divide: a chunk has two places, and most one layer.
                layers=max(places * pipe * chunks, 2) + more,
                packed=packed,
                pipe=pipe,
                tensor=tensor,
                fsdp=fsdp,
                data=data,
                context=context,
                windows=windows,
                zero=zero,
                replicated=replicated,
                chunks=chunks,
                microbatches=max(pipe, 2),
                tensor_parallel=parallel if tensor > 1 else None,
                remat=remat,
            )


def main():
    """Run a part of them; the exit code counts those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="which part of how many")
    parser.add_argument("--context", type=int, default=1, help="the least of it")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    chosen = [x for x in layouts() if x.context >= arguments.context][part::parts]
    failed, worst, start = 0, 0.0, time.time()
    for i, layout in enumerate(chosen):
        found = errors(layout)
        name = max(found, key=lambda n: found[n])
        worst = max(worst, found[name])
        if not found[name] < TOLERANCE:
            failed += 1
            print(f"{layout}: {name} differs by {found[name]:.1e}", flush=True)
        if i % 20 == 19 or i + 1 == len(chosen):
            print(
                f"{i + 1} of {len(chosen)} layouts, {failed} differ, worst "
                f"{worst:.1e}, {time.time() - start:.0f} s",
                flush=True,
            )
        jax.clear_caches()
    return failed


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "64")
    sys.exit(main())
