"""Decoders (GPT-2, GPT-J, LLaMA), Hugging Face files and tokenizers."""

from jaxscale.models.tokenizer import Tokenizer


__all__ = ["Tokenizer"]
