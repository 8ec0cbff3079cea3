"""Which tensors of a Hugging Face file hold which parameters of `Decoder`.

A kernel of ours is [in, out]. ``torch.nn.Linear`` stores [out, in], transformers'
``Conv1D`` (GPT-2) stores [in, out]. Blocks are stacked in ours, [L, ...], and one
tensor each in theirs.
"""

import dataclasses

from jaxscale.models.config import DecoderConfig
from jaxscale.models.hf_config import model_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor of a file and the parameters that it holds."""

    name: str
    """Name in the file; ``{layer}`` stands for the number of the block."""
    parameters: tuple[str, ...]
    """Paths in `Decoder`; several are joined along their last dimension."""
    transpose: bool = False
    """The file stores a kernel as [out, in]."""
    first_layer: int = 0
    """Number that the first of the stacked blocks has in the file."""

    @property
    def stacked(self) -> bool:
        """Each block has a tensor of its own."""
        return "{layer}" in self.name

    def tensor(self, layer: int | None) -> str:
        """Name of the tensor of one of the stacked blocks; None if not stacked."""
        if layer is None:
            return self.name
        return self.name.format(layer=layer + self.first_layer)


PREFIXES = {"gpt2": "transformer.", "gptj": "transformer.", "llama": "model."}
"""What comes before the names of all tensors but the output projection.

Files that hold the model without that projection leave it out, as GPT-2's do."""

IGNORED = (
    r"(^|\.)attn\.(bias|masked_bias)$",  # GPT-2 and GPT-J: the causal mask
    r"(^|\.)rotary_emb\.inv_freq$",  # LLaMA: rotary frequencies
)
"""Buffers of old files, recomputed from the configuration."""


def tensor_maps(config: DecoderConfig) -> list[TensorMap]:
    """Every tensor of a file of `config`, in the order of the computation.

    Example:
        >>> from jaxscale.models.gpt import gpt2_small
        >>> print(tensor_maps(gpt2_small())[4].name)
        transformer.h.{layer}.attn.c_attn.weight
    """
    family = model_type(config)
    tables = {"gpt2": _gpt2, "gptj": _gptj, "llama": _llama}
    maps = tables[family](config)
    if not config.tie_embeddings:
        maps += linear("lm_head", "lm_head", bias=config.lm_head_bias)
    return maps


def _gpt2(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "transformer.h.{layer}.", "blocks."
    query, key, value = (f"{ours}attention.{n}" for n in ("query", "key", "value"))
    return [
        TensorMap(name="transformer.wte.weight", parameters=("embed.table",)),
        TensorMap(name="transformer.wpe.weight", parameters=("positions.table",)),
        *layer_norm(block + "ln_1", ours + "attention_norm"),
        *linear(block + "attn.c_attn", query, key, value, transpose=False),
        *linear(block + "attn.c_proj", ours + "attention.out", transpose=False),
        *layer_norm(block + "ln_2", ours + "mlp_norm"),
        *linear(block + "mlp.c_fc", ours + "mlp.up", transpose=False),
        *linear(block + "mlp.c_proj", ours + "mlp.down", transpose=False),
        *layer_norm("transformer.ln_f", "norm"),
    ]


def _gptj(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "transformer.h.{layer}.", "blocks."
    return [
        TensorMap(name="transformer.wte.weight", parameters=("embed.table",)),
        *layer_norm(block + "ln_1", ours + "attention_norm"),
        *linear(block + "attn.q_proj", ours + "attention.query", bias=False),
        *linear(block + "attn.k_proj", ours + "attention.key", bias=False),
        *linear(block + "attn.v_proj", ours + "attention.value", bias=False),
        *linear(block + "attn.out_proj", ours + "attention.out", bias=False),
        *linear(block + "mlp.fc_in", ours + "mlp.up"),
        *linear(block + "mlp.fc_out", ours + "mlp.down"),
        *layer_norm("transformer.ln_f", "norm"),
    ]


def _llama(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "model.layers.{layer}.", "blocks."
    attention, mlp = config.attention_bias, config.mlp_bias
    return [
        TensorMap(name="model.embed_tokens.weight", parameters=("embed.table",)),
        scale(block + "input_layernorm", ours + "attention_norm"),
        *linear(block + "self_attn.q_proj", ours + "attention.query", bias=attention),
        *linear(block + "self_attn.k_proj", ours + "attention.key", bias=attention),
        *linear(block + "self_attn.v_proj", ours + "attention.value", bias=attention),
        *linear(block + "self_attn.o_proj", ours + "attention.out", bias=attention),
        scale(block + "post_attention_layernorm", ours + "mlp_norm"),
        *linear(block + "mlp.gate_proj", ours + "mlp.gate", bias=mlp),
        *linear(block + "mlp.up_proj", ours + "mlp.up", bias=mlp),
        *linear(block + "mlp.down_proj", ours + "mlp.down", bias=mlp),
        scale("model.norm", "norm"),
    ]


def linear(
    theirs: str, *ours: str, bias: bool = True, transpose: bool = True
) -> list[TensorMap]:
    """The tensors of a linear layer, or of several whose outputs are joined."""
    kernel = TensorMap(
        name=f"{theirs}.weight",
        parameters=tuple(f"{path}.kernel" for path in ours),
        transpose=transpose,
    )
    if not bias:
        return [kernel]
    biases = tuple(f"{path}.bias" for path in ours)
    return [kernel, TensorMap(name=f"{theirs}.bias", parameters=biases)]


def layer_norm(theirs: str, ours: str) -> list[TensorMap]:
    """The tensors of a layer norm."""
    bias = TensorMap(name=f"{theirs}.bias", parameters=(f"{ours}.bias",))
    return [scale(theirs, ours), bias]


def scale(theirs: str, ours: str) -> TensorMap:
    """The tensor of a norm without a bias."""
    return TensorMap(name=f"{theirs}.weight", parameters=(f"{ours}.scale",))
