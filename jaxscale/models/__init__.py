"""Decoders (GPT-2, GPT-J, LLaMA), Hugging Face files and tokenizers."""

from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import REMAT_POLICIES, Decoder
from jaxscale.models.hf import load, save
from jaxscale.models.hf_config import config_from_hf, config_to_hf
from jaxscale.models.presets import PRESETS, preset
from jaxscale.models.tokenizer import Tokenizer


__all__ = [
    "PRESETS",
    "REMAT_POLICIES",
    "Decoder",
    "DecoderConfig",
    "Tokenizer",
    "config_from_hf",
    "config_to_hf",
    "load",
    "preset",
    "save",
]
