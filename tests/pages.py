"""Runs the Python of pages top to bottom, as a reader would paste it.

``python -m tests.pages docs/models.md ...`` runs each page in an empty directory, with
the devices that there are. Models of the Hugging Face hub are small ones of random
weights, in a cache of their own.
"""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


DECODERS = ("HuggingFaceTB/SmolLM2-135M",)
ENCODERS = ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2")
TEXT = ["def read_lines(path): import", "A fine film. Two lost hours. A dog runs."]


def blocks(text: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def publish(cache: Path) -> None:
    """Write the stand-ins as `huggingface_hub` keeps downloads."""
    from flax import nnx

    from jaxscale import models

    for name in (*DECODERS, *ENCODERS):
        folder = cache / f"models--{name.replace('/', '--')}"
        tokens = ("[PAD]", "[CLS]", "[SEP]", "[MASK]") if name in ENCODERS else ()
        tokenizer = models.Tokenizer.train(TEXT, 280, special_tokens=tokens)
        options: dict[str, Any] = {"tokenizer": tokenizer}
        if name in ENCODERS:
            config = models.encoder_preset("bert_tiny")
            config = dataclasses.replace(config, vocab_size=2048, max_seq_len=512)
            model = models.EncoderModel(config, rngs=nnx.Rngs(0))
        else:
            config = dataclasses.replace(models.preset("llama_tiny"), vocab_size=280)
            model = models.Decoder(config, rngs=nnx.Rngs(0))
            options["generation"] = models.GenerationConfig()
        models.save(model, folder / "snapshots" / "0", **options)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text("0")


def run(page: Path) -> None:
    """What a page does, in two steps where it trains; its error names its line."""
    script = "\n".join(blocks(page.read_text())).replace("steps=200", "steps=2")
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        exec(compile(script, page.name, "exec"), {"__name__": "__main__"})


def main() -> None:
    """Run the pages that the command line names."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
        publish(Path(cache))
        for page in sys.argv[1:]:
            run(Path(page).resolve())


if __name__ == "__main__":
    main()
