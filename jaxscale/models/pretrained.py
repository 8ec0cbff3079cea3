"""How a model is made from files: the constructor that all models share."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp


_OF_TEXTS = {"Decoder": "inference.LLM", "EncoderModel": "inference.Encoder"}


_ELSEWHERE = {
    "generate": "jaxscale.inference.LLM(model, tokenizer).generate(prompts)",
    "encode": "jaxscale.inference.Encoder(model, tokenizer).encode(texts)",
    "predict": "jaxscale.inference.Encoder(model, tokenizer).predict(texts)",
    "save_pretrained": "jaxscale.models.save(model, directory)",
    "parameters": "flax.nnx.state(model, flax.nnx.Param)",
    "state_dict": "flax.nnx.state(model)",
    "load_state_dict": "flax.nnx.update(model, state)",
    "num_parameters": "model.config.num_parameters()",
    "to": "jaxscale.sharding.place(model, mesh, rules)",
    "cuda": "jaxscale.sharding.place(model, mesh, rules)",
    "half": "from_pretrained(path, dtype='bfloat16')",
    "bfloat16": "from_pretrained(path, dtype='bfloat16')",
    "compile": "jax.jit(lambda model, tokens: model(tokens))",
    "init": "model(tokens), for the model has its parameters",
    "apply": "model(tokens), for the model has its parameters",
}
"""What to call in place of methods of other libraries."""


def check_tokens(tokens: Any, ndims: tuple[int, ...]) -> None:
    """Raise where token ids are no array of integers with one of these numbers of axes.

    Raises:
        ValueError: they are not.
    """
    shape, dtype = getattr(tokens, "shape", None), getattr(tokens, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(
            f"tokens is a {type(tokens).__name__}, expected an array of token ids, "
            "[batch, tokens]; jax.numpy.array makes one"
        )
    if len(shape) not in ndims or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"tokens is of shape {shape} and type {dtype}, expected integers "
            "[batch, tokens]; tokens[None] adds a batch of one"
        )


def check_dtype(name: str, dtype: Any) -> None:
    """Raise where a data type is the name of none.

    Raises:
        ValueError: it is.
    """
    try:
        jnp.dtype(dtype)
    except TypeError:
        raise ValueError(
            f"{name} {dtype!r} is no data type; use one such as 'bfloat16' or 'float32'"
        ) from None


class Pretrained:
    """A model that can be read from files."""

    config: Any

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only called for what there is not."""
            told = f"; call {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{told}"
            )

    @classmethod
    def from_pretrained[M](cls: type[M], path: str | Path, **options: Any) -> M:
        """The model of a Hugging Face directory or of a name on its hub.

        Args:
            path: As for `jaxscale.models.load`.
            **options: The other arguments of it.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: as `load`, or the model is of another kind than this class.
        """
        from jaxscale.models.hf.load import load  # which needs the models

        model = load(path, **options)
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise ValueError(
                f"path {str(path)!r} holds a model of {kind}; give it to "
                f"{kind}.from_pretrained, or for texts to {_OF_TEXTS[kind]}"
            )
        return model

    def _check_length(self, name: str, length: int) -> None:
        limit = self.config.max_seq_len
        if self.config.position == "learned" and length > limit:
            raise ValueError(
                f"{name} {length} exceeds max_seq_len {limit}, the size of the table "
                "of learned positions; shorten the sequences or pack them"
            )
