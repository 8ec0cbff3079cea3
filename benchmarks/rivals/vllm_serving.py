"""vLLM as a rival of `benchmarks.serving`, in a process and packages of its own.

`run` starts this file with the Python of vLLM. Started so, it imports vLLM and the
standard library alone: the versions of other packages are those that vLLM wants.

The environment variable ``BENCHMARK_VLLM`` names a virtual environment, or a folder of
packages that the Python of the benchmark gets before its own. Without it vLLM has to be
installed beside the benchmark.

One engine serves all requests; its core is a process, as vLLM has it, and requests
come from this one: neither HTTP nor text is within the times. Prefixes are not cached,
and answers have exactly the tokens that are asked for.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any


PLACE = "BENCHMARK_VLLM"
"""Environment variable that says where vLLM is."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # No NVLink multicast.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_FAR = "vllm:"  # begins the lines of the child that say how far it is
_NOT_THERE = 3  # exit status where vLLM cannot be imported


def digest(load: Mapping[str, Any]) -> str:
    """A name of some requests: those of equal names are equal.

    Args:
        load: With ``prompts``, ``outputs`` and ``due``, as `serving_policies.Workload`.
    """
    parts = [load[name] for name in ("prompts", "outputs", "due")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# --- The command's side ---------------------------------------------------------------


def run(
    config: Mapping[str, Any],
    load: Mapping[str, Any],
    samples: int,
    settings: Mapping[str, Any],
    warm: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve a load some times, after once to warm up.

    Args:
        config: The model, as the ``config.json`` of transformers; weights are random.
        load: As for `digest`.
        samples: How often.
        settings: Arguments of the engine besides its defaults.
        warm: What to warm up with; the load itself if None.

    Returns:
        ``runs``, the times of the tokens of each request, in seconds, of each run;
        ``seconds`` until the engine could answer; ``version`` of vLLM; and
        ``settings``, the sizes that it has chosen.

    Raises:
        NotImplementedError: vLLM is not there.
        RuntimeError: it failed.
    """
    python, environment = _python()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        place.joinpath("config.json").write_text(json.dumps(config))
        job = {"load": load, "warm": warm or load}
        job |= {"samples": samples, "settings": settings}
        place.joinpath("job.json").write_text(
            json.dumps({**job, "digest": digest(load)})
        )
        said = ""
        with subprocess.Popen(
            [python, "-P", __file__, folder],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    said += line
                    if line.startswith(_FAR):
                        print(line, end="", file=sys.stderr, flush=True)
                child.wait()
            finally:
                # Its core, too, which would keep the GPU.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if child.returncode == _NOT_THERE:
            raise NotImplementedError(said.strip().splitlines()[-1])
        if child.returncode:
            raise RuntimeError(f"vLLM failed:\n{said[-4000:]}")
        return json.loads(place.joinpath("result.json").read_text())


def _python() -> tuple[str, dict[str, str]]:
    """The Python that has vLLM, and its environment."""
    environment = {**os.environ, **_ENVIRONMENT}
    environment.pop("PYTHONPATH", None)
    place = os.environ.get(PLACE)
    if place is None:
        return sys.executable, environment
    own = pathlib.Path(place, "bin", "python")
    if own.is_file():
        return str(own), environment
    return sys.executable, {**environment, "PYTHONPATH": place}


# --- The child's side -----------------------------------------------------------------


async def _served(engine: Any, load: Mapping[str, Any]) -> list[list[float]]:
    """Times of the tokens of each request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    start = time.perf_counter()

    async def one(i: int) -> list[float]:
        await asyncio.sleep(start + load["due"][i] - time.perf_counter())
        params = SamplingParams(
            temperature=0.0,
            max_tokens=load["outputs"][i],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt, events = {"prompt_token_ids": load["prompts"][i]}, []
        async for output in engine.generate(prompt, params, f"{start}-{i}"):
            now = time.perf_counter() - start
            events += [now] * len(output.outputs[0].token_ids)
        return events

    return await asyncio.gather(*map(one, range(len(load["due"]))))


async def _measured(folder: pathlib.Path, vllm: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    job = json.loads(folder.joinpath("job.json").read_text())
    load = job["load"]
    if digest(load) != job["digest"]:
        raise ValueError(f"requests {digest(load)}, expected {job['digest']}")
    start = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **job["settings"],
        ),
        usage_context=UsageContext.OPENAI_API_SERVER,  # whose defaults are a server's
    )
    seconds = time.perf_counter() - start
    _say(f"can answer after {seconds:.1f} s")
    scheduler = engine.vllm_config.scheduler_config
    try:
        runs = []
        for each in [job["warm"]] + [load] * job["samples"]:
            runs.append(await _served(engine, each))
            tokens, took = sum(each["outputs"]), max(e[-1] for e in runs[-1])
            _say(f"{tokens} tokens in {took:.2f} s, {tokens / took:,.0f}/s")
        del runs[0]  # which warmed up
    finally:
        engine.shutdown()
    return {
        "runs": runs,
        "seconds": seconds,
        "version": vllm.__version__,
        "settings": {
            "slots": scheduler.max_num_seqs,
            "prefill_tokens": scheduler.max_num_batched_tokens,
        },
    }


def _say(what: str) -> None:
    print(f"{_FAR} {what}", flush=True)


def _main(arguments: Sequence[str]) -> int:
    try:
        import vllm
    except ImportError as error:
        print(f"vLLM cannot be imported: {error}; {PLACE} may say where it is")
        return _NOT_THERE
    folder = pathlib.Path(arguments[0])
    result = asyncio.run(_measured(folder, vllm))
    folder.joinpath("result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
