"""Neural network modules, and the sequence packing that they run on."""

from jaxscale.nn.attention import AttentionConfig, attention
from jaxscale.nn.blocks import MLP, Block, BlockConfig, make_norm
from jaxscale.nn.cache import (
    PagedChunks,
    PagedMixed,
    PagedRows,
    append_rows,
    clear_tails,
    empty_pages,
)
from jaxscale.nn.convolution import SequenceConvolution
from jaxscale.nn.disentangled import (
    DisentangledAttention,
    DisentangledConfig,
    RelativePositions,
)
from jaxscale.nn.embeddings import (
    Embed,
    RopeConfig,
    RopeScaling,
    rope_inv_freq,
    rotary,
)
from jaxscale.nn.joined import JoinedLinear
from jaxscale.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from jaxscale.nn.lora import LoraConfig, add_adapters, merge_adapters
from jaxscale.nn.norms import LayerNorm, RMSNorm, layer_norm, rms_norm
from jaxscale.nn.packing import (
    PackedBatch,
    assign_rows,
    pack,
    pack_sequences,
    positions,
    unpack,
)
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import (
    Attention,
    AttentionState,
    Packed,
    Whole,
    attention_state,
)
from jaxscale.nn.signature import show_constructors
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from jaxscale.public import listing


__all__ = [
    "MLP",
    "Attention",
    "AttentionConfig",
    "AttentionState",
    "Block",
    "BlockConfig",
    "ColumnParallelLinear",
    "DisentangledAttention",
    "DisentangledConfig",
    "Embed",
    "JoinedLinear",
    "LayerNorm",
    "Linear",
    "LoraConfig",
    "Packed",
    "PackedBatch",
    "PagedChunks",
    "PagedMixed",
    "PagedRows",
    "QuantizedLinear",
    "RMSNorm",
    "RelativePositions",
    "RopeConfig",
    "RopeScaling",
    "RowParallelLinear",
    "SequenceConvolution",
    "TileSparseLinear",
    "Whole",
    "add_adapters",
    "append_rows",
    "assign_rows",
    "attention",
    "attention_state",
    "clear_tails",
    "empty_pages",
    "layer_norm",
    "make_norm",
    "merge_adapters",
    "pack",
    "pack_sequences",
    "positions",
    "rms_norm",
    "rope_inv_freq",
    "rotary",
    "unpack",
]

__dir__ = listing(__all__)

show_constructors([globals()[name] for name in __all__])
