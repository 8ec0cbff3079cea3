"""Encoder inference with sequence packing: texts to embeddings and logits.

Legend: B packed rows, T tokens per row, S sequences per row, D model, C labels.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxscale.checks import check_choice, check_type
from jaxscale.inference.encoder.encode_plan import (
    EncodePlan,
    coarse_first,
    default_budget,
    plan_rows,
    usual_capacities,
)
from jaxscale.inference.encoder.encode_programs import (
    Batch,
    EncodePrograms,
    Launched,
    ProgramShape,
    answer,
    embed,
    parts_of,
)
from jaxscale.inference.encoder.stacked_parameters import unstacked_in_place
from jaxscale.inference.encoder.texts import Text, tokenized
from jaxscale.inference.run_directory import is_run, load_run
from jaxscale.keywords import explain_keywords
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.heads import Pooling
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.hf.load import load
from jaxscale.models.hf.sentence_transformers import sentence_settings
from jaxscale.models.tokenizer import EncodedText, Tokenizer
from jaxscale.observability.bar import progress_bar, shows_bar
from jaxscale.sharding.rules import REPLICATED, AxisRules
from pallas_kernels.mosaic import DeviceSpec


type Method = Literal["encode", "predict"]

type _Step = tuple[Sequence[Sequence[int]], ProgramShape]
"""Indices of the texts of each row of a batch, and what computes it."""


class Encoder:
    """An encoder, its tokenizer and its pooling, for lists of texts of any lengths.

    Texts are tokenized, sorted by length and packed into rows, with at most 15% padding
    from 109 tokens on. There are some thirty row sizes, for each of which the model is
    compiled once: at its first use, or before by `compile`. While the device computes a
    row, the next one is transferred; results are returned in the order of the texts.

    Example:
        >>> import dataclasses
        >>> from flax import nnx
        >>> from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=256 + 1)
        >>> config = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=300)
        >>> encoder = Encoder(EncoderModel(config, rngs=nnx.Rngs(0)), tokenizer)
        >>> encoder.encode(["to be", "or not"], token_budget=64).shape
        (2, 32)
    """

    @explain_keywords
    def __init__(
        self,
        model: EncoderModel,
        tokenizer: Tokenizer,
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        max_length: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Put the parts together; nothing is compiled yet.

        Args:
            model: The encoder, with a head if `predict` is to be called. With
                ``scan_layers=False`` and without a mesh it takes longer to compile and
                runs faster: `EncoderModel.unstacked`. Its parameters are taken now:
                make another `Encoder` after they have changed. Of the memory of a stack
                of layers this shares the projections that kernels read in place (on
                Hopper in 16 bits: 7 of 12 parts of a layer of BERT); of layers that are
                not a stack all else.
            tokenizer: The tokenizer of the model.
            pooling: How the vector of a text is made from those of its tokens.
            normalize: True: `encode` scales each embedding to length 1.
            max_length: Maximum tokens per text; None is the `tokenizer`'s maximum
                length, to which `predict` then truncates texts as training did, or else
                the model's limit.
            mesh: The devices of the model; None is one. Batches are split over the mesh
                axes of its rule for ``batch``.

        Raises:
            ValueError: the tokenizer has more tokens than the model, `pooling` is
                unknown, or `max_length` exceeds what the model allows.
        """
        check_type("model", model, EncoderModel, "from_pretrained(path) loads one")
        check_choice("pooling", pooling, Pooling)
        config = model.config
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"tokenizer has {tokenizer.vocab_size} tokens, but vocab_size of the "
                f"model is {config.vocab_size}; they do not belong together"
            )
        if max_length is not None and not 0 < max_length <= config.max_seq_len:
            raise ValueError(
                f"max_length {max_length} must be positive and at most "
                f"{config.max_seq_len}, the longest sequence of the model"
            )
        # The fast program for one device has no stack of layers.
        single = mesh is None and not model.scan_layers
        self.model = unstacked_in_place(model) if single else model
        on_gpu = single and DeviceSpec.current() is not None
        self.tokenizer = tokenizer
        self.pooling: Pooling = pooling
        self.normalize = normalize
        noted = tokenizer.max_length if max_length is None else None
        limit = config.max_seq_len if noted is None else noted
        self.max_length = max_length or min(limit, config.max_seq_len)
        self.cuts = noted is not None
        """Whether `predict` truncates texts to `max_length` by default."""
        self.mesh = mesh
        encode = functools.partial(embed, pooling=pooling, normalize=normalize)
        head = None if model.head is None else model.head.config
        self._vectors = {"encode": config.d_model}
        if head is not None and head.kind == "sequence":
            self._vectors["predict"] = head.num_labels
        self._programs = EncodePrograms(
            self.model,
            {"encode": encode, "predict": answer},
            vectors=self._vectors,
            rows=self._num_rows,
            types=config.token_types,
            mesh=mesh,
            place=self._place,
            parts=parts_of(config.num_layers) if on_gpu else (),
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        mesh: Mesh | None = None,
        rules: AxisRules = REPLICATED,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        **options: Any,
    ) -> "Encoder":
        """The encoder of a Hugging Face or sentence-transformers directory, or a run.

        A ``modules.json`` says how sentences are embedded: the pooling, whether
        embeddings are normalized, and the maximum length. Without one, embeddings are
        the unnormalized mean over the tokens, and the maximum length is
        ``model_max_length`` of the tokenizer; for a model trained here, this is the
        length that its texts were truncated to, so `predict` truncates them too. Texts
        longer than a given `max_length` are refused.

        Args:
            path: The directory, with ``config.json``, safetensors and
                ``tokenizer.json``; the name of a model on the Hugging Face hub; or the
                output directory of a run, whose newest checkpoint is taken.
            pooling: Setting to use instead of the directory's.
            normalize: Setting to use instead of the directory's.
            max_length: Setting to use instead of the directory's.
            mesh: The devices; None is the first device only.
            rules: Mesh axes that split parameters and batches.
            dtype: Type of the computation; None is that of the parameters.
            param_dtype: Type of the parameters; None keeps that of the file. Not for
                runs.
            **options: Further arguments of `jaxscale.models.load`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: as `load`, the model is a decoder, or ``modules.json`` has an
                unsupported setting.
        """
        path = local_directory(path)
        settings = sentence_settings(path)
        source = settings.pop("path")
        tokenizer = Tokenizer.from_file(source)
        lower_case = settings.pop("lower_case", False)
        if lower_case and tokenizer.encode("A") != tokenizer.encode("a"):
            raise ValueError(
                f"path {str(path)!r} sets do_lower_case, which is not supported: its "
                "tokenizer tells upper case from lower; set it to false and give texts "
                "in lower case"
            )
        if param_dtype is not None:
            options["param_dtype"] = param_dtype
        model = (load_run if is_run(source) else load)(
            source, mesh=mesh, rules=rules, dtype=dtype, **options
        )
        if not isinstance(model, EncoderModel):
            raise ValueError(
                f"path {str(path)!r} holds a decoder, which embeds no sentences; give "
                "the directory of an encoder"
            )
        noted = settings.pop("max_length", None)
        if noted is not None:
            tokenizer = tokenizer.with_max_length(int(noted))
        given = {"pooling": pooling, "normalize": normalize, "max_length": max_length}
        settings |= {name: v for name, v in given.items() if v is not None}
        return cls(model, tokenizer, mesh=mesh, **settings)

    def encode(
        self,
        texts: Sequence[Text],
        *,
        token_budget: int | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> Float[np.ndarray, "texts D"]:
        """One vector for each text, in fp32.

        Args:
            texts: Texts, pairs of texts, or token ids of texts, in any mixture.
            token_budget: Maximum tokens per row on each device. More keep a large GPU
                busy; the results do not depend on it. None is 16,384, or on a CPU 512,
                doubled until the longest text fits.
            truncate: Truncate texts of more than `max_length` tokens; otherwise they
                are an error.
            progress: Show a bar; None shows one in a terminal or notebook.

        Returns:
            The embeddings in the order of `texts`.

        Raises:
            TypeError: `texts` is one string or not a list, or has an element that is
                not a text.
            ValueError: a text is empty or too long, or the budget is too small for it
                or not a positive integer.
        """
        found = self._run("encode", texts, token_budget, truncate, progress)
        width = self.model.config.d_model
        rows = np.empty((len(texts), width), np.float32)
        for launched in found:
            launched.into(rows)
        return rows

    def predict(
        self,
        texts: Sequence[Text],
        *,
        token_budget: int | None = None,
        truncate: bool | None = None,
        progress: bool | None = None,
    ) -> Float[np.ndarray, "texts C"] | list[Float[np.ndarray, "_ C"]]:
        """The logits of the model's head for each text, in fp32.

        Arguments and errors are as for `encode`, except that texts longer than in
        training are truncated as in training, with a warning in the log, so the
        accuracy is that of training. Logits of a ``masked_lm`` head take 4 V bytes per
        token of the budget: use a small one.

        Args:
            texts: Texts, or pairs of texts.
            token_budget: Maximum tokens per row on each device.
            truncate: Truncate texts of more than `max_length` tokens; False refuses
                them. None truncates if the length is from the model's own files or
                tokenizer.
            progress: Show a bar; None shows one in a terminal or notebook.

        Returns:
            [texts, C] from a sequence head. From a token head a list with [tokens, C]
            per text, for the tokens of ``tokenizer.encode_inputs``.

        Raises:
            ValueError: also if the model has no head.
        """
        head = self.model.head
        if head is None or head.config.kind == "pooler":
            raise ValueError(
                "the model has no head that answers; load it from a directory with "
                "one, or call encode for embeddings"
            )
        cuts = self.cuts if truncate is None else truncate
        found = self._run("predict", texts, token_budget, cuts, progress)
        if not head.config.pools:
            answers: list[Any] = [None] * len(texts)
            for launched in found:
                for index, rows in launched.results():
                    answers[index] = rows
            return answers
        logits = np.empty((len(texts), head.config.num_labels), np.float32)
        for launched in found:
            launched.into(logits)
        return logits

    def plan(
        self,
        texts: Sequence[Text],
        *,
        token_budget: int | None = None,
        truncate: bool = False,
    ) -> EncodePlan:
        """Return the packing that `encode` would use.

        Args:
            texts: Texts, pairs of texts, or token ids of texts, in any mixture.
            token_budget: Maximum tokens per row on each device.
            truncate: Truncate texts of more than `max_length` tokens; otherwise they
                are an error.

        Raises:
            ValueError: as `encode`.
        """
        encoded = self.tokenize(texts, truncate=truncate, spans=False)
        return self._plan(encoded, token_budget)

    def compile(
        self,
        method: Method = "encode",
        *,
        token_budget: int | None = None,
        wait: bool = True,
        sizes: Literal["all", "largest"] = "all",
    ) -> None:
        """Compile the programs of `encode` or `predict` in advance, the largest first.

        Then come a few sizes that soon stand in for all others. There are one to three
        programs per row size, enough for texts of at least 8 tokens on average. Without
        this, or while it runs in the background, a call waits only for the programs
        that it needs.

        Args:
            method: ``"encode"`` or ``"predict"``.
            token_budget: The token budget of later calls, on which the sizes depend.
                None is their default, on a CPU for texts of at most 512 tokens.
            wait: False: return at once, and compile in the background.
            sizes: ``"largest"`` is the one program that can stand in for all others.

        Raises:
            ValueError: `method` is neither, or the budget is not a positive integer.
        """
        check_choice("method", method, Method)
        check_choice("sizes", sizes, ("all", "largest"))
        if token_budget is None:
            token_budget = default_budget(self.device.platform, [])
        plan_rows([], token_budget)  # raises for an invalid budget
        shapes = [
            ProgramShape(method, size, room)
            for size in coarse_first(token_budget)
            for room in reversed(usual_capacities(size))
        ]
        futures = self._programs.begin(shapes if sizes == "all" else shapes[:1])
        for future in futures if wait else ():
            future.result()

    def tokenize(
        self, texts: Sequence[Text], *, truncate: bool = False, spans: bool = True
    ) -> list[EncodedText]:
        """The tokens of texts, which other methods take in their place.

        Args:
            texts: Texts, pairs of texts, or token ids of texts, in any mixture.
            truncate: Truncate texts of more than `max_length` tokens; otherwise they
                are an error.
            spans: False leaves `EncodedText.spans` empty, which saves time.

        Raises:
            ValueError: as `encode`.
        """
        vocab = self.model.config.vocab_size
        limit = self.max_length
        return tokenized(texts, self.tokenizer, vocab, limit, truncate, spans)

    def launch(
        self,
        method: Method,
        texts: Sequence[EncodedText],
        token_budget: int,
        *,
        stand_in: bool = False,
    ) -> list[Launched]:
        """Have the device compute texts, and return at once, for `read`.

        Args:
            method: ``"encode"`` or ``"predict"``.
            texts: Results of `tokenize`.
            token_budget: Maximum tokens per row on each device.
            stand_in: A program of a larger size stands in for one that is not compiled
                yet, if there is any; otherwise it is waited for.
        """
        steps = self._steps(method, self._plan(texts, token_budget))
        self._programs.begin(shape for _, shape in steps)
        if stand_in:
            steps = [
                (rows, self._programs.stand_in(shape, max(map(len, rows))))
                for rows, shape in steps
            ]
        with self._on_mesh():
            return [self._launch(texts, *step) for step in steps]

    def read(self, launched: Launched) -> Iterator[tuple[int, np.ndarray]]:
        """Index and result of each text, fp32, once they are there."""
        return launched.results()

    @property
    def device(self) -> Any:
        """The first device that computes."""
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def num_compiled(self) -> tuple[int, int]:
        """Programs that are compiled, and those that are or will be."""
        return self._programs.num_compiled, len(self._programs)

    # --------------------------------------------------------------------------------

    def _plan(
        self, encoded: Sequence[EncodedText], token_budget: int | None
    ) -> EncodePlan:
        lengths = [len(text.ids) for text in encoded]
        if token_budget is None:
            token_budget = default_budget(self.device.platform, lengths)
        return plan_rows(lengths, token_budget, parts=self._num_rows)

    def _run(
        self,
        method: Method,
        texts: Sequence[Text],
        token_budget: int | None,
        truncate: bool,
        progress: bool | None,
    ) -> Iterable[Launched]:
        """All batches, each once the next is launched; errors are raised at once."""
        encoded = self.tokenize(texts, truncate=truncate, spans=False)
        plan = self._plan(encoded, token_budget)
        steps = self._steps(method, plan)
        if len(steps) == 1 and not shows_bar(progress):
            with self._on_mesh():
                return [self._launch(encoded, *steps[0])]
        return self._results(encoded, steps, progress)

    def _results(
        self,
        encoded: Sequence[EncodedText],
        steps: Sequence[_Step],
        progress: bool | None,
    ) -> Iterator[Launched]:
        waiting: collections.deque[Launched] = collections.deque()
        self._programs.begin(shape for _, shape in steps)
        with progress_bar("encode", progress, len(encoded)) as advance, self._on_mesh():
            for rows, shape in steps:
                waiting.append(self._launch(encoded, rows, shape))
                if len(waiting) > 1:
                    yield waiting.popleft()
                advance(sum(map(len, rows)))
            yield from waiting

    def _launch(
        self,
        encoded: Sequence[EncodedText],
        rows: Sequence[Sequence[int]],
        shape: ProgramShape,
    ) -> Launched:
        """Have the device compute rows of texts."""
        texts = [[encoded[i] for i in row] for row in rows]
        batch = self._batch(texts, shape.size, shape.room)
        result = self._programs(shape, batch)
        release = functools.partial(self._programs.done, batch, result)
        pooled = shape.method in self._vectors
        return Launched(pooled, rows, encoded, result, release)

    def _steps(self, method: Method, plan: EncodePlan) -> list[_Step]:
        """The rows of each batch, and their program."""
        return [
            (
                plan.rows[start : start + self._num_rows],
                ProgramShape(method, plan.budgets[start], plan.capacities[start]),
            )
            for start in range(0, len(plan.rows), self._num_rows)
        ]

    def _batch(
        self, rows: Sequence[Sequence[EncodedText]], size: int, room: int
    ) -> Batch:
        """The batch for `EncodePrograms`; missing rows are empty."""
        batch = self._programs.batch(size, room)
        for i, row in enumerate(rows):
            batch.fill(i, row, self.model.config.token_types)
        return batch

    @property
    def _place(self) -> NamedSharding | None:
        """The sharding of a batch."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, self.model.rules.spec("batch", None))

    @functools.cached_property
    def _num_rows(self) -> int:
        """Rows per batch: one per data-parallel device."""
        if self.mesh is None:
            return 1
        axes = self.model.rules.mesh_axes(["batch"])
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)
