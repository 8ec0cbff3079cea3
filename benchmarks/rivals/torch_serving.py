"""The baseline of `benchmarks.serving` in transformers: its continuous batching.

The cache is paged, and requests are added as they arrive. It takes FlashAttention 2 or
4 where the package is installed, else SDPA over the packed batch. With all but the
first, transformers turns its fast decoding path off.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any


def build(shape: Mapping[str, Any], seed: int, attention: str):
    """A LLaMA with random weights in bf16, made on the GPU."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**shape, attn_implementation=attention)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def fastest_attention() -> str:
    """What transformers calls the fastest attention over pages that is installed."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available

    if is_flash_attn_2_available():
        return "flash_attention_2"
    return "flash_attention_4" if is_flash_attn_4_available() else "sdpa"


def continuous(model, load: Mapping[str, Any], batch: int) -> list:
    """Times of the tokens of each request."""
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(
        default_compile_level=0,
        max_requests_per_batch=batch,
        allow_block_sharing=False,
    )
    found: dict[str, list[float]] = {}
    count = len(load["due"])
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()

        def send() -> None:
            for i, due in enumerate(load["due"]):
                time.sleep(max(0.0, due - (time.perf_counter() - start)))
                manager.add_request(
                    list(load["prompts"][i]),
                    request_id=str(i),
                    max_new_tokens=load["outputs"][i],
                    record_timestamps=True,
                )

        sender = threading.Thread(target=send)
        sender.start()
        while len(found) < count:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
            elif result.error is not None:
                raise RuntimeError(f"request {result.request_id}: {result.error}")
            elif result.is_finished():
                found[result.request_id] = [t - start for t in result.timestamps]
        sender.join()
    return [found[str(i)] for i in range(count)]


def measure(
    shape: Mapping[str, Any],
    loads: Sequence[Any],
    batch: int,
    seed: int,
    warm_tokens: int,
) -> tuple[list, float]:
    """Times of the tokens of every request of every load, by one model.

    The first batch of the first load is run once more beforehand; the seconds of that
    too. Without CUDA graphs, which continuous batching captures as lengths come, the
    first `warm_tokens` of each of its answers are enough.
    """
    attention = fastest_attention()
    model = build(shape, seed, attention)
    first = {name: values[:batch] for name, values in loads[0].items()}
    if attention == "sdpa":
        first["outputs"] = [min(n, warm_tokens) for n in first["outputs"]]
    start = time.perf_counter()
    continuous(model, first, batch)
    seconds = time.perf_counter() - start
    return [continuous(model, load, batch) for load in loads], seconds
