"""Writes docs/zoo.md, all presets with their sizes: ``python -m docs.model_zoo``."""

from collections.abc import Iterable
from pathlib import Path

import jax
from flax import nnx

from jaxscale import models


PATH = Path(__file__).parent / "zoo.md"

_HEAD = """# Model zoo

Named shapes, and what they take in memory. `preset(name)` and `encoder_preset(name)`
give the configuration, `load(directory)` gives the model of a directory from Hugging
Face, weights included. This page is written by `python -m docs.model_zoo`.

- **Train**: parameters, gradients and AdamW's optimizer state in fp32, 16 bytes per
  parameter. Activations come on top; `jaxscale plan` counts them. Bytes are the sum
  over all devices.
- **Serve**: parameters in bf16. A decoder needs room for keys and values as well.
- **Checked against**: for each family, small models with random weights, made by
  transformers 5.17, are stored with their outputs. Outputs here equal them within 1e-4
  in fp32, and what is saved equals what was loaded, bit for bit. No preset of full size
  was compared in this way; the weights of all-MiniLM-L6-v2 were, and their embeddings
  are within 1e-4 of PyTorch's.

"""

_FAMILIES = {
    "gpt2": "GPT-2",
    "gptj": "GPT-J",
    "llama": "LLaMA",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "neox": "GPT-NeoX, Pythia",
    "pythia": "GPT-NeoX, Pythia",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, text",
    "bert": "BERT",
    "minilm": "BERT",
    "roberta": "RoBERTa",
    "xlm": "RoBERTa",
    "camembert": "RoBERTa",
    "albert": "ALBERT",
    "distilbert": "DistilBERT",
    "modernbert": "ModernBERT",
    "deberta": "DeBERTa",
    "mdeberta": "DeBERTa",
}


def family(name: str) -> str:
    """The family of a preset, as the page calls it."""
    first = name.split("_")[0]
    return _FAMILIES.get(first) or _FAMILIES[first.rstrip("0123456789")]


def parameters(model: nnx.Module) -> int:
    """How many numbers an abstract model has."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def text() -> str:
    """The page."""
    decoders = [
        "| Preset | Family | Parameters | Train | Serve | Per 1,024 tokens, bf16 |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in _shown(models.PRESETS):
        config = models.preset(name)
        model = jax.eval_shape(
            lambda config=config: models.Decoder(config, rngs=nnx.Rngs(0))
        )
        count = parameters(model)
        cache = 1024 * 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        cells = [f"`{name}`", family(name), _count(count), _size(16 * count)]
        decoders.append(_line([*cells, _size(2 * count), _size(cache)]))
    encoders = [
        "| Preset | Family | Parameters | Train | Serve |",
        "|---|---|--:|--:|--:|",
    ]
    for name in _shown(models.ENCODER_PRESETS):
        config = models.encoder_preset(name)
        model = jax.eval_shape(
            lambda config=config: models.EncoderModel(config, rngs=nnx.Rngs(0))
        )
        count = parameters(model)
        cells = [f"`{name}`", family(name), _count(count), _size(16 * count)]
        encoders.append(_line([*cells, _size(2 * count)]))
    parts = ["## Decoders\n", *decoders, "\n## Encoders\n", *encoders]
    return _HEAD + "\n".join(parts) + "\n"


def _shown(names: Iterable[str]) -> list[str]:
    """Those of real models; the tiny ones are for tests and first steps."""
    return [name for name in names if not name.endswith("_tiny")]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _count(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _size(size: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


if __name__ == "__main__":
    PATH.write_text(text())
