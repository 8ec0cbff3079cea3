"""Decoders (GPT, LLaMA, ...), encoders (BERT, ...), heads, Hugging Face files,
tokenizers.
"""

from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import config_from_hf, config_to_hf, encoder_head
from jaxscale.models.generation import GenerationConfig
from jaxscale.models.heads import Head, HeadConfig, pool
from jaxscale.models.hf.load import load
from jaxscale.models.hf.save import save
from jaxscale.models.presets import (
    ENCODER_PRESETS,
    PRESETS,
    encoder_preset,
    preset,
)
from jaxscale.models.quantization import quantize
from jaxscale.models.stack import REMAT_POLICIES
from jaxscale.models.tokenizer import EncodedText, Tokenizer
from jaxscale.nn.signature import show_constructors
from jaxscale.public import listing


__all__ = [
    "ENCODER_PRESETS",
    "PRESETS",
    "REMAT_POLICIES",
    "Decoder",
    "DecoderConfig",
    "EncodedText",
    "EncoderConfig",
    "EncoderModel",
    "GenerationConfig",
    "Head",
    "HeadConfig",
    "Tokenizer",
    "config_from_hf",
    "config_to_hf",
    "encoder_head",
    "encoder_preset",
    "load",
    "pool",
    "preset",
    "quantize",
    "save",
]

__dir__ = listing(__all__)

show_constructors([globals()[name] for name in __all__])
