"""Training: losses, optimizers, the step, checkpoints, metrics and the loop."""

from jaxscale.training.corpus import (
    Document,
    TokenCorpus,
    python_corpus,
    read_documents,
    split,
    tokenize,
)
from jaxscale.training.data import (
    DataConfig,
    PackedBatches,
    PackedBatchIterator,
    PackedRows,
    TextData,
    load_text,
    load_tokenizer,
)
from jaxscale.training.losses import LossSums, chunked_cross_entropy


__all__ = [
    "DataConfig",
    "Document",
    "LossSums",
    "PackedBatchIterator",
    "PackedBatches",
    "PackedRows",
    "TextData",
    "TokenCorpus",
    "chunked_cross_entropy",
    "load_text",
    "load_tokenizer",
    "python_corpus",
    "read_documents",
    "split",
    "tokenize",
]
