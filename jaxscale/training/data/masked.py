"""Masked language modeling: which tokens are masked.

Axes: B packed rows, T tokens per row, S sequences per row.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.packing import PackedBatch
from jaxscale.training.data.iterator import BatchIterator, Source
from jaxscale.training.data.packed import PackedBatches
from pallas_kernels.varlen_attention import segment_ids_from_cu_seqlens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """The choice of tokens to predict, and their replacements.

    Example:
        >>> MaskingConfig(probability=0.3).mask_share
        0.8
    """

    probability: float = 0.15
    """Fraction of tokens to predict."""
    mask_share: float = 0.8
    """Fraction of these that become the mask token."""
    random_share: float = 0.1
    """Fraction of these that become a random token; the rest stay unchanged."""
    seed: int = 0
    """Random seed, combined with the number of the row."""

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
    """`PackedBatches` with some tokens masked, different ones in each epoch.

    The choice depends only on the seed and the number of the row, so it is the same
    when a run resumes or changes its devices.

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

    start = PackedBatches.start

    def __init__(
        self,
        batches: PackedBatches,
        tokenizer: Tokenizer,
        config: MaskingConfig = MaskingConfig(),
    ) -> None:
        """Describe the batches.

        Args:
            batches: Packed text.
            tokenizer: Tokenizer of that text; its control tokens are never masked.
            config: Choice of the tokens to mask.

        Raises:
            ValueError: the tokenizer has no mask token, or rows hold one sequence each,
                whose padding an encoder would attend to.
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
        self.hide = jax.jit(
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
        """True if the number of epochs is unlimited."""
        return self.batches.is_endless

    def sample(self, count: int) -> "MaskedBatches":
        """Return `count` batches of evenly spaced rows, always the same.

        Args:
            count: Number of batches, fewer than there are.
        """
        drawn = copy.copy(self)
        drawn.batches = self.batches.sample(count)
        return drawn

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the data, for which alone a saved position is valid."""
        masking = dataclasses.asdict(self.config)
        return self.batches.identity | {"masking": masking}

    @property
    def prefetch(self) -> int:
        """Number of prefetched batches."""
        return self.batches.prefetch

    def source(self, position: Mapping[str, int]) -> Source[PackedBatch]:
        """The batches from a position on, before masking."""
        return self.batches.source(position)

    def progress(self, position: Mapping[str, int]) -> dict[str, float]:
        """Epochs of the text, as for `PackedBatches`."""
        return self.batches.progress(position)

    def __iter__(self) -> "MaskedBatchIterator":
        return MaskedBatchIterator(self)

    def __len__(self) -> int:
        return len(self.batches)


class MaskedBatchIterator(BatchIterator[PackedBatch]):
    """An iterator over `MaskedBatches`, whose position can be saved and restored."""

    def __init__(self, masked: MaskedBatches) -> None:
        """Begin with the first batch."""
        super().__init__(masked)
        self._masked = masked

    def __next__(self) -> PackedBatch:
        # Keys take 32 bits; no run has so many rows that they repeat within an epoch.
        first_row = self._place()["row"] % 2**31
        return self._masked.hide(super().__next__(), jnp.asarray(first_row, jnp.int32))


def hide_tokens(
    batch: PackedBatch,
    first_row: Int[Array, ""],
    *,
    config: MaskingConfig,
    mask_id: int,
    control_ids: tuple[int, ...],
    vocab_size: int,
) -> PackedBatch:
    """`batch` with some tokens masked, to be predicted.

    Args:
        batch: Packed rows, with ``cu_seqlens``; its targets are not read.
        first_row: Number of the first row, on which the choice depends.
        config: Choice of the tokens to mask.
        mask_id: The mask token.
        control_ids: Tokens that are never masked.
        vocab_size: Range of the random tokens.

    Returns:
        The masked rows; targets are the original tokens, and the loss counts the chosen
        ones.
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
