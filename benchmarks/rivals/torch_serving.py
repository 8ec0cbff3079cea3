"""The baselines of `benchmarks.serving` in transformers, at their best settings.

- `static`: `generate` on batches that are padded on the left to a power of two, one
  after another; with ``graphs`` the cache is static, which lets transformers compile
  the step and replay it. A request is done at the step of its own last token, though a
  client would have to wait for the batch.
- `continuous`: transformers' own continuous batching, a paged cache, requests added as
  they arrive. It takes FlashAttention 2 or 4 where the package is installed, else SDPA
  over the packed batch. With all but the first, transformers turns its fast decoding
  path off.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any


def build(shape: Mapping[str, Any], seed: int, attention: str = "sdpa"):
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


class Clock:
    """The times of a load."""

    def __init__(self, due: Sequence[float]) -> None:
        """Start it."""
        self.due, self.start = due, time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def sleep_until(self, seconds: float) -> None:
        """Wait for a moment."""
        time.sleep(max(0.0, seconds - self.now()))


def static(model, load: Mapping[str, Any], batch: int, *, graphs: bool) -> list:
    """Times of the tokens of each request, of batches one after another."""
    import torch

    clock, events, i = Clock(load["due"]), [], 0
    longest = max(load["outputs"])
    while i < len(load["due"]):
        clock.sleep_until(load["due"][i])
        end = max(sum(due <= clock.now() for due in load["due"]), i + 1)
        end = min(end, i + batch)
        prompts, outputs = load["prompts"][i:end], load["outputs"][i:end]
        # Fixed shapes, or every batch would be compiled anew.
        width = 1 << (max(map(len, prompts)) - 1).bit_length()
        rows = batch if graphs else len(prompts)
        tokens = torch.zeros((rows, width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row in range(rows):
            prompt = prompts[min(row, len(prompts) - 1)]
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        times: list[float] = []
        wanted = max(outputs)

        def stop(ids, scores, times=times, wanted=wanted, **_):
            times.append(clock.now())
            return torch.full((len(ids),), len(times) >= wanted, device=ids.device)

        model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=longest if graphs else wanted,
            do_sample=False,
            stopping_criteria=[stop],
            **({"cache_implementation": "static"} if graphs else {}),
        )
        events += [times[:output] for output in outputs]
        i = end
    return events


def continuous(model, load: Mapping[str, Any], batch: int, *, level: int) -> list:
    """Times of the tokens of each request, by transformers' continuous batching."""
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(
        default_compile_level=level,
        max_requests_per_batch=batch,
        allow_block_sharing=False,
    )
    found: dict[str, list[float]] = {}
    count = len(load["due"])
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        clock = Clock(load["due"])

        def send() -> None:
            for i, due in enumerate(load["due"]):
                clock.sleep_until(due)
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
                found[result.request_id] = [t - clock.start for t in result.timestamps]
        sender.join()
    return [found[str(i)] for i in range(count)]


def measure(
    policy: str,
    shape: Mapping[str, Any],
    loads: Sequence[Any],
    batch: int,
    seed: int,
    warm_tokens: int,
) -> tuple[list, float]:
    """Times of the tokens of every request of every load, by one model.

    The first load is run once more beforehand, to compile; the seconds of that too.
    Where nothing is compiled, its first batch is enough, and without CUDA graphs, which
    continuous batching captures as lengths come, the first `warm_tokens` of each of its
    answers: the whole takes minutes.
    """
    continuously = policy.startswith("continuous")
    attention = fastest_attention() if continuously else "sdpa"
    model = build(shape, seed, attention)

    def run(load: Mapping[str, Any]) -> list:
        if continuously:
            level = 2 if policy.endswith("compile") else 0
            return continuous(model, load, batch, level=level)
        return static(model, load, batch, graphs=policy.endswith("graphs"))

    first = dict(loads[0])
    if policy == "continuous":
        first = {name: values[:batch] for name, values in first.items()}
        if attention == "sdpa":
            first["outputs"] = [min(n, warm_tokens) for n in first["outputs"]]
    start = time.perf_counter()
    run(first)
    seconds = time.perf_counter() - start
    return [run(load) for load in loads], seconds
