"""Masked language modeling: which tokens are hidden, and the loss of guessing them.

Axes: B rows, T tokens of a row, S sequences of a row.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.packing import PackedBatch
from jaxscale.training.data.packed import PackedBatches
from jaxscale.training.losses import LossSums, chunked_cross_entropy
from jaxscale.training.step import LossFunction
from pallas_kernels.varlen_attention import segment_ids_from_cu_seqlens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """The choice of tokens to predict, and their replacements.

    Example:
        >>> MaskingConfig(probability=0.3).mask_share
        0.8
    """

    probability: float = 0.15
    """Share of the tokens that are to be guessed."""
    mask_share: float = 0.8
    """Share of these that become the mask token."""
    random_share: float = 0.1
    """Share of these that become a random token; the rest stay as they are."""
    seed: int = 0
    """Decides all of it, with the number of the row."""

    def __post_init__(self) -> None:
        for name in ("probability", "mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} {getattr(self, name)}, expected between 0 and 1"
                )
        if self.mask_share + self.random_share > 1:
            raise ValueError(
                f"mask_share {self.mask_share} and random_share {self.random_share} "
                "exceed 1 together"
            )
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must not be negative")


class MaskedBatches:
    """`PackedBatches` with some tokens hidden, other ones in each epoch.

    The choice depends on the seed and the number of the row alone, so a run that is
    resumed, or spread over other devices, sees the same.

    Example:
        >>> from jaxscale.training import DataConfig, TokenCorpus
        >>> names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        >>> tokenizer = Tokenizer.train(["to be"], 260, special_tokens=names)
        >>> corpus = TokenCorpus.from_ids([range(4, 44), range(44, 84)])
        >>> config = DataConfig(seq_len=16, batch_size=2, max_sequences=4)
        >>> batch = next(iter(MaskedBatches(PackedBatches(corpus, config), tokenizer)))
        >>> bool((batch.tokens != batch.targets)[batch.loss_mask].any())
        True

    References:
        BERT, arXiv 1810.04805, section 3.1; a new choice in each epoch: RoBERTa, arXiv
        1907.11692, section 4.1.
    """

    def __init__(
        self,
        batches: PackedBatches,
        tokenizer: Tokenizer,
        config: MaskingConfig = MaskingConfig(),
    ) -> None:
        """Describe the batches.

        Args:
            batches: Packed text.
            tokenizer: Tokenizer of that text; its control tokens are never hidden.
            config: Choice of the tokens to hide.

        Raises:
            ValueError: the tokenizer has no mask token, or rows hold one sequence each,
                whose padding an encoder would see.
        """
        if tokenizer.mask_id is None:
            raise ValueError(
                "tokenizer has no mask token; name one with mask_token=..., or train "
                "it with special_tokens=('[PAD]', '[CLS]', '[SEP]', '[MASK]')"
            )
        if batches.config.max_sequences < 2:
            raise ValueError(
                f"max_sequences {batches.config.max_sequences} of the data leaves out "
                "where rows end, and an encoder would see their padding; set it to 2 "
                "or more"
            )
        self.batches = batches
        self.config = config
        self._hide = jax.jit(
            functools.partial(
                hide_tokens,
                config=config,
                mask_id=tokenizer.mask_id,
                control_ids=tuple(tokenizer.control_ids),
                vocab_size=tokenizer.vocab_size,
            )
        )

    @property
    def is_endless(self) -> bool:
        """True if no pass over the corpus is the last."""
        return self.batches.is_endless

    def sample(self, count: int) -> "MaskedBatches":
        """Return `count` batches of rows that are drawn evenly from all, always alike.

        Args:
            count: Batches, fewer than there are.
        """
        drawn = copy.copy(self)
        drawn.batches = self.batches.sample(count)
        return drawn

    def __iter__(self) -> "MaskedBatchIterator":
        return MaskedBatchIterator(self)

    def __len__(self) -> int:
        return len(self.batches)


class MaskedBatchIterator(Iterator[PackedBatch]):
    """Walks through `MaskedBatches`; its position can be saved and restored."""

    def __init__(self, masked: MaskedBatches) -> None:
        """Begin with the first batch."""
        self._masked = masked
        self._batches = iter(masked.batches)

    def __next__(self) -> PackedBatch:
        # Keys take 32 bits; no run has so many rows that they repeat within an epoch.
        first_row = self._batches.get_state()["row"] % 2**31
        batch = next(self._batches)
        return self._masked._hide(batch, jnp.asarray(first_row, jnp.int32))

    def progress(self) -> dict[str, float]:
        """How often the text was read so far, as `PackedBatches` say it."""
        return self._batches.progress()

    def get_state(self) -> dict[str, Any]:
        """The position, as a small dictionary that JSON can hold."""
        masking = dataclasses.asdict(self._masked.config)
        return self._batches.get_state() | {"masking": masking}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, bit for bit.

        Raises:
            ValueError: the state comes from other data, packing or masking.
        """
        masking = dataclasses.asdict(self._masked.config)
        if state.get("masking") != masking:
            raise ValueError(
                f"the saved position was made with masking {state.get('masking')!r}, "
                f"this data has {masking!r}; resume with the same settings"
            )
        self._batches.set_state(state)

    def close(self) -> None:
        """Stop the prefetching thread."""
        self._batches.close()


def hide_tokens(
    batch: PackedBatch,
    first_row: Int[Array, ""],
    *,
    config: MaskingConfig,
    mask_id: int,
    control_ids: tuple[int, ...],
    vocab_size: int,
) -> PackedBatch:
    """`batch` with some tokens hidden, to be guessed.

    Args:
        batch: Packed rows, with ``cu_seqlens``; its targets are not read.
        first_row: Number of the first row, which decides what is hidden in it.
        config: Choice of the tokens to hide.
        mask_id: The mask token.
        control_ids: Tokens that are never hidden.
        vocab_size: Random tokens are drawn from so many.

    Returns:
        The rows as the model reads them; targets are the tokens as they were, and the
        loss counts those that were chosen.
    """
    bounds = batch.cu_seqlens
    if bounds is None:
        raise ValueError("cu_seqlens None of batch: it must say where rows end")

    def one_row(tokens: Array, bounds: Array, number: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        chosen_key, how_key, token_key = jax.random.split(key, 3)
        inside = segment_ids_from_cu_seqlens(bounds, tokens.shape[0]) >= 0
        control = jnp.isin(tokens, jnp.asarray(control_ids, tokens.dtype))
        chosen = jax.random.uniform(chosen_key, tokens.shape) < config.probability
        chosen &= inside & ~control
        how = jax.random.uniform(how_key, tokens.shape)
        drawn = jax.random.randint(token_key, tokens.shape, 0, vocab_size, tokens.dtype)
        random = how < config.mask_share + config.random_share
        hidden = jnp.where(random, drawn, tokens)
        hidden = jnp.where(how < config.mask_share, mask_id, hidden)
        return jnp.where(chosen, hidden, tokens), chosen

    tokens = jnp.asarray(batch.tokens)
    numbers = first_row + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, chosen = jax.vmap(one_row)(tokens, jnp.asarray(bounds), numbers)
    return dataclasses.replace(batch, tokens=hidden, targets=tokens, loss_mask=chosen)


def masked_lm_loss(*, chunk_size: int = 1024, z_loss: float = 0.0) -> LossFunction:
    """The loss of an encoder with a ``masked_lm`` head on batches of `MaskedBatches`.

    Args:
        chunk_size: Positions of a row whose logits exist at one time.
        z_loss: Coefficient of the squared log-sum-exp.
    """

    def loss(model: Any, batch: Any) -> tuple[Array, LossSums]:
        _require_head(model, "masked_lm")
        hidden = model.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
        kernel, bias = model.output_embedding()
        value, sums = chunked_cross_entropy(
            model.head.features(hidden),
            kernel,
            batch.targets,
            batch.loss_mask,
            chunk_size=chunk_size,
            z_loss=z_loss,
            bias=bias,
            rules=model.rules,
        )
        return value, sums._replace(inputs=batch.cu_seqlens[:, -1].sum())

    return loss


def _require_head(model: Any, *kinds: str) -> None:
    found = None if model.head is None else model.head.config.kind
    if found not in kinds:
        raise ValueError(
            f"the head of the model is {found!r}, expected one of {kinds} for this "
            "loss; make the model with head=encoder_head(config, ...)"
        )
