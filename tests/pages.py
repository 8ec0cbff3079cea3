"""Runs the Python of pages top to bottom, as a reader would paste it.

``python -m tests.pages docs/models.md ...`` runs each page in an empty directory, with
the devices that there are. Models of the Hugging Face hub are small ones of random
weights, in a cache of their own; the text that comes with Python is a part of it; the
run that a page reads, ``runs/tiny``, is made up.
"""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxscale.training.data import packed
from tests.observability.runs import survived_hang


DECODERS = ("HuggingFaceTB/SmolLM2-135M",)
ENCODERS = ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2")
FIRST = "# before anything else of JAX"
"""What a page says of a block that runs before the others of all pages."""
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


def run(page: Path, *, first: bool = False) -> None:
    """What a page does, in two steps where it trains; its error names its line.

    Args:
        page: The Markdown.
        first: Only the blocks that come before all others, or only these others.
    """
    chosen = [block for block in blocks(page.read_text()) if (FIRST in block) == first]
    script = "\n".join(chosen).replace("steps=200", "steps=2")
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        if "runs/tiny" in script:
            survived_hang(Path("runs/tiny"))
        exec(compile(script, page.name, "exec"), {"__name__": "__main__"})


def main() -> None:
    """Run the pages that the command line names."""
    pages = [Path(page).resolve() for page in sys.argv[1:]]
    whole = packed.python_corpus
    packed.python_corpus = lambda: whole()[::20]
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
        for page in pages:
            run(page, first=True)
        publish(Path(cache))
        for page in pages:
            run(page)


if __name__ == "__main__":
    main()
