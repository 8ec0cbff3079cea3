"""Serve a LLaMA whose weights are split over the GPUs of several hosts.

Every process runs this file. Process 0 answers HTTP and plans what to compute next; it
tells the others over TCP, and all of them compute. DIR is a Hugging Face directory that
every host can read. ``jaxscale serve DIR --mesh.tensor 16``, started in the same way,
does this and more; here are the parts.

One GPU, or all of one host:

    python serve_llama.py DIR

Slurm, two hosts with eight GPUs each, one process a host:

    srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 python serve_llama.py DIR

Open MPI:

    mpirun -n 2 --host n1,n2 -x JAX_COORDINATOR_ADDRESS=n1:8476 \
        python serve_llama.py DIR

Kubernetes: an Indexed Job with a headless service, as in docs/hosts.md, whose command
is this file; a second service leads clients to the pod of index 0. When a process is
lost, process 0 answers /health with 503 and the others end: let the Job start all pods
again.

By hand, on each host with its own number:

    JAX_COORDINATOR_ADDRESS=10.0.0.1:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \
        python serve_llama.py DIR

Then, from anywhere that reaches process 0:

    curl n1:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": "To be or", "max_tokens": 20}'

To try it on a laptop, start it by hand twice with ``--devices 2``.
"""

import argparse
import signal
from pathlib import Path

import jax

from jaxscale.inference import EngineConfig, follow, make_engine
from jaxscale.inference.server import EngineBackend, ServerConfig, TextModel, serve
from jaxscale.models import Decoder, GenerationConfig, Tokenizer
from jaxscale.sharding import fsdp_tp, initialize, make_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets others in")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-len", type=int, help="most tokens of a request")
    parser.add_argument("--slots", type=int, help="most requests decoded together")
    parser.add_argument("--devices", type=int, help="simulated ones of this process")
    options = parser.parse_args()
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)

    initialize()
    mesh = make_mesh({"tensor": -1})  # all devices of all processes
    model = Decoder.from_pretrained(options.model, mesh=mesh, rules=fsdp_tp())
    model = model.for_inference()  # and what was loaded is gone
    config = EngineConfig(max_len=options.max_len, num_slots=options.slots)
    if jax.process_index() > 0:
        # Launchers send SIGTERM to all; process 0 drains, and then ends the others.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow(model, config=config)
        return

    tokenizer = Tokenizer.from_file(options.model)

    def served() -> TextModel:
        ends = GenerationConfig.from_file(options.model).eos_ids
        engine = make_engine(model, tokenizer, config=config, eos_ids=ends)
        return TextModel(
            name=Path(options.model).name,
            backend=EngineBackend(engine.start()),
            tokenizer=tokenizer,
        )

    serve(served, ServerConfig(), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
