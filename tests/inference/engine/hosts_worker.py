"""A process of a job whose devices share a model; see `test_hosts`."""

import dataclasses
import json
import os
import sys

import jax
from flax import nnx

from jaxscale import inference
from jaxscale.models import Decoder, preset
from jaxscale.sharding import create, fsdp_tp, initialize, make_mesh


# A vocabulary that does not divide over the devices.
CONFIG = dataclasses.replace(preset("llama_tiny"), vocab_size=287, num_kv_heads=4)
SIZES = inference.EngineConfig(
    num_slots=4, buckets=(4,), prefill_tokens=(16,), page_size=8, max_len=64, steps=2
)
PROMPTS = [[1, 2, 3], list(range(40, 70)), [9], [200, 100]]
PARAMS = [
    inference.SamplingParams(temperature=0.0, max_tokens=8),
    inference.SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1),
    inference.SamplingParams(seed=1, max_tokens=7, top_k=5, frequency_penalty=0.5),
    inference.SamplingParams(seed=2, max_tokens=5, logit_bias={7: 3.0}),
]


def make(**options):
    return Decoder(CONFIG, rngs=nnx.Rngs(0), **options)


def tokens(llm):
    return [list(r.tokens) for r in llm.generate(PROMPTS, PARAMS, progress=False)]


def main(port, index):
    jax.config.update("jax_num_cpu_devices", 2)
    initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh, rules = make_mesh({"tensor": 4}), fsdp_tp()
    model = create(lambda: make(rules=rules), mesh, rules)
    if jax.process_index():
        inference.follow(model, config=SIZES, quiet=True)
        return
    llm = inference.LLM(model, config=SIZES, quiet=True)
    print(json.dumps(tokens(llm)), flush=True)
    try:
        while True:  # until the other process is killed
            llm.generate(PROMPTS[:1], PARAMS[0], progress=False)
    except inference.EngineDead as error:
        print(json.dumps([str(error)]), flush=True)
    llm.close()
    os._exit(0)  # JAX would wait for the other process


if __name__ == "__main__":
    main(*sys.argv[1:])
