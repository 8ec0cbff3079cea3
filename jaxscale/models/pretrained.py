"""How a model is made from files: the constructor that all models share."""

from pathlib import Path
from typing import Any


_OF_TEXTS = {"Decoder": "inference.LLM", "EncoderModel": "inference.Encoder"}


class Pretrained:
    """A model that can be read from files."""

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
