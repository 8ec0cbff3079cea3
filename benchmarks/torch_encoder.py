"""The PyTorch baselines of `benchmarks.encoder`: transformers on a padded batch."""

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.attention_baselines import want_package
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
    import transformers

    attention, mode = MODES[name]
    disentangled = model.config.relative is not None
    if disentangled and name == "torch_sdpa":
        raise NotImplementedError("transformers has no fused DeBERTa attention")
    source = transformers.AutoModel
    if name == "flash_deberta":
        if not disentangled or model.config.family == "deberta":
            raise NotImplementedError("FlashDeBERTa is DeBERTa-v2 and v3 alone")
        want_package("flashdeberta", "flashdeberta")
        source = importlib.import_module("flashdeberta").FlashDebertaV2Model
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    theirs = theirs.to(device).eval()
    masks: list[Any] = []
    replays: list[Callable[[], Any]] = []

    def run(tokens: Any, mask: Any) -> Any:
        out = theirs(input_ids=tokens, attention_mask=mask).last_hidden_state
        return out * mask[..., None].to(out.dtype)

    if mode not in (None, "capture"):
        torch.compiler.reset()
        run = torch.compile(run, mode=mode, dynamic=False)

    def call(leaves: Any, tokens: Any, lengths: Any) -> Any:
        del leaves  # it has its own copy
        if not masks:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            masks.append((tokens.long(), (places < lengths[:, None]).long()))
            if mode == "capture":
                replays.append(_captured(run, masks[0]))
        with torch.no_grad():
            return replays[0]() if replays else run(*masks[0])

    return call


def _captured(run: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Replays of one CUDA graph of a function, always of these inputs."""
    import torch

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run(*inputs)

    def replay() -> Any:
        graph.replay()
        return output

    return replay
