"""The PyTorch baselines of `benchmarks.encoder`: transformers on a padded batch."""

import importlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rivals.attention_baselines import want_package
from jaxscale import models


MODES = {
    "torch_eager": ("eager", None),
    "torch_sdpa": ("sdpa", None),
    "torch_compile": ("sdpa", "default"),
    "torch_compile_graphs": ("sdpa", "reduce-overhead"),
    "torch_cuda_graph": ("sdpa", "capture"),
    "flash_deberta": ("flash", None),
}
"""Attention and mode of `torch.compile`, by name of the implementation; ``capture`` is
one CUDA graph of the model as it is, ``flash`` is FlashDeBERTa's model."""


def forward(name: str, model: models.EncoderModel) -> Callable[..., Any]:
    """A function of tokens and lengths: transformers' model with these parameters.

    Its activations are zero in the padding, as those of the others are. The mask is
    made at the first call.

    Args:
        name: one of `MODES`.
        model: its parameters are saved and read by transformers.

    Raises:
        NotImplementedError: the model has no such attention.
    """
    import torch

    run = _in_its_mode(name, _hidden_states(name, model))
    masks: list[Any] = []

    def call(leaves: Any, tokens: Any, lengths: Any) -> Any:
        del leaves  # it has its own copy
        if not masks:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            masks.append((tokens.long(), (places < lengths[:, None]).long()))
        with torch.no_grad():
            return run(*masks[0])

    return call


def mean_of(name: str, model: models.EncoderModel) -> Callable[[Any], Any]:
    """A function of tokens and mask [2, B, L]: the means of the activations, fp32.

    Arguments and errors are as for `forward`; it is neither compiled nor captured.
    """
    hidden = _hidden_states(name, model)

    def mean(inputs: Any) -> Any:
        tokens, mask = inputs  # [B, L]
        return hidden(tokens, mask).float().sum(1) / mask.sum(1, keepdim=True)

    return mean


def vectors(name: str, model: models.EncoderModel, length: int) -> Callable[..., Any]:
    """A function of the ids of texts: the means of their activations, on the host.

    Texts are padded in pinned memory, from where one copy takes tokens and mask to the
    device. The mean is within the CUDA graph, if there is one.

    Args:
        name: one of `MODES`.
        model: its parameters are saved and read by transformers.
        length: tokens of a padded row.

    Raises:
        NotImplementedError: the model has no such attention.
    """
    import torch

    run = _in_its_mode(name, mean_of(name, model))
    gpu = torch.cuda.is_available()
    buffers: list[Any] = []

    def call(texts: Sequence[np.ndarray]) -> Any:
        if not buffers:
            shape = 2, len(texts), length
            host = torch.zeros(shape, dtype=torch.long, pin_memory=gpu)
            buffers.extend(
                (host, host.numpy(), torch.zeros_like(host, device=_device()))
            )
        host, (tokens, mask), device = buffers
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = ids
            tokens[row, len(ids) :] = 0
            mask[row, : len(ids)], mask[row, len(ids) :] = 1, 0
        device.copy_(host, non_blocking=True)
        with torch.no_grad():
            return run(device).cpu()  # which waits: the buffers are free again

    return call


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _hidden_states(name: str, model: models.EncoderModel) -> Callable[[Any, Any], Any]:
    """The activations that transformers computes of tokens and mask [B, L]."""
    import torch
    import transformers

    attention, _ = MODES[name]
    disentangled = model.config.relative is not None
    if disentangled and name == "torch_sdpa":
        raise NotImplementedError("transformers has no fused DeBERTa attention")
    source = transformers.AutoModel
    if name == "flash_deberta":
        if not disentangled or model.config.family == "deberta":
            raise NotImplementedError("FlashDeBERTa is DeBERTa-v2 and v3 alone")
        want_package("flashdeberta", "flashdeberta")
        source = importlib.import_module("flashdeberta").FlashDebertaV2Model
    # The others compute no pooled vector.
    pooled = model.config.family in ("bert", "roberta", "albert")
    options = {"add_pooling_layer": False} if pooled else {}
    with tempfile.TemporaryDirectory() as directory:
        models.save(model, directory)
        theirs = source.from_pretrained(
            directory,
            dtype=torch.bfloat16,
            attn_implementation="eager" if disentangled else attention,
            **options,
        )
    theirs = theirs.to(_device()).eval()

    def run(tokens: Any, mask: Any) -> Any:
        out = theirs(input_ids=tokens, attention_mask=mask).last_hidden_state
        return out * mask[..., None].to(out.dtype)

    return run


def _in_its_mode(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled or captured as its name says."""
    import torch

    _, mode = MODES[name]
    if mode == "capture":
        return captured(run)
    if mode is None:
        return run
    torch.compiler.reset()
    return torch.compile(run, mode=mode, dynamic=False)


def captured(run: Callable[..., Any], pool: Any = None) -> Callable[..., Any]:
    """A function whose first call captures a CUDA graph, always of these inputs.

    Their values may change from call to call.

    Args:
        run: What is captured.
        pool: A handle of memory that several graphs share; None is the graph's own.
    """
    import torch

    replays: list[tuple[Any, Any]] = []

    def capture(*inputs: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of JAX, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = run(*inputs)
        replays.append((graph, output))

    def call(*inputs: Any) -> Any:
        if not replays:
            capture(*inputs)
        ((graph, output),) = replays
        graph.replay()
        return output

    return call
