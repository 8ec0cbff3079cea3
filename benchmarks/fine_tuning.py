"""A step of fine-tuning an encoder to classify texts: ours packed, others padded.

Forward pass, gradients, clipping and AdamW in one step, fp32 parameters and optimizer
state, bf16 computation, no dropout. Lengths are uniform in [0.2 L, L] as in
`benchmarks.encoder`; tokens per second do not count padding. All begin with the same
random weights and read the same batches, each twice; the error is that of the first two
losses, before and after an update, against a padded model in fp32. ``memory_mb`` counts
the optimizer state, but not the parameters.

- ``jaxscale``: the step that `jaxscale.training.fit` makes, on one packed row.
- ``jax_padded``: the same step of a model in plain JAX with cuDNN's attention.
- ``torch_sdpa``, ``torch_compile``: transformers under autocast, with fused scores
  where the model has them and the fused AdamW; as it is, and the model compiled.
- ``torch_compile_graphs``: the same with CUDA graphs (reduce-overhead).
- ``torch_flash``: transformers with FlashAttention, which unpads around attention,
  where it is installed.
"""

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import encoder
from benchmarks.measure import command, timing
from benchmarks.measure.harness import Benchmark, Case, Jax, Params, Torch
from benchmarks.rivals import plain_encoder
from benchmarks.rivals.attention_baselines import want_package
from benchmarks.rivals.plain_encoder import Switches
from jaxscale import models, training
from jaxscale.training.data.labeled import LabeledBatch
from jaxscale.training.losses import LossSums
from jaxscale.training.step import LossFunction


BATCHES = 4
"""Different ones, over and over."""

LABELS = ("no", "yes")

OPTIMIZER = training.OptimizerConfig(
    learning_rate=1e-4, schedule="constant", warmup_steps=0, b1=0.9, b2=0.95
)

MODES = {
    "torch_sdpa": ("sdpa", None),
    "torch_compile": ("sdpa", "default"),
    "torch_compile_graphs": ("sdpa", "reduce-overhead"),
    "torch_flash": ("flash_attention_2", None),
}
"""Attention and mode of `torch.compile`, by name of the implementation."""


def random_model(params: Params) -> models.EncoderModel:
    """A classifier with random fp32 parameters."""
    config = encoder.config_of(params)
    head = models.encoder_head(config, "sequence", labels=LABELS)
    return encoder.random_model(config, head, jnp.float32)


def layers_apart(params: Params) -> models.EncoderModel:
    """The same, every layer by itself."""
    return random_model(params).unstacked()


def inputs(params: Params, key: jax.Array) -> tuple:
    """Parameters, and random tokens [S, B, L] and labels [S, B] of S batches."""
    config = encoder.config_of(params)
    shape = BATCHES, params["batch"], params["max_len"]
    tokens_key, labels_key = jax.random.split(key)
    tokens = jax.random.randint(tokens_key, shape, 5, config.vocab_size, jnp.int32)
    labels = jax.random.randint(labels_key, shape[:2], 0, len(LABELS), jnp.int32)
    return tuple(jax.tree.leaves(layers_apart(params))), tokens, labels


# --- In JAX ---------------------------------------------------------------------------


def padded_loss(switches: Switches, dtype: Any) -> LossFunction:
    """The loss of a plain model on rows of one text each.

    Args:
        switches: how it computes.
        dtype: type of the computation.
    """
    classify = training.classification_loss()

    def loss(model: Any, batch: Any) -> tuple[jax.Array, LossSums]:
        cast = jax.tree.map(lambda x: x.astype(dtype), model)
        lengths = batch.cu_seqlens[:, -1]
        with jax.numpy_dtype_promotion("standard"):
            hidden = plain_encoder.hidden(cast, batch.tokens, lengths, switches)

        class Answers:
            """What the loss asks of a model."""

            head, config = model.head, model.config

            def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
                return cast.answer(hidden, batch.cu_seqlens)

        return classify(Answers(), batch)

    return loss


def padded_batch(params: Params, tokens: Any, labels: Any) -> LabeledBatch:
    """Rows of one text each."""
    bounds = np.stack([np.zeros(params["batch"]), encoder.lengths_of(params)], 1)
    return LabeledBatch(
        tokens=tokens,
        token_types=jnp.zeros_like(tokens),
        cu_seqlens=jnp.asarray(bounds, jnp.int32),
        labels=labels[:, None],
        loss_mask=jnp.ones((params["batch"], 1), jnp.bool_),
    )


def packed_batch(params: Params, tokens: Any, labels: Any) -> LabeledBatch:
    """One row of all texts, rounded up as in `benchmarks.encoder`."""
    lengths = encoder.lengths_of(params)
    inside = np.flatnonzero(np.arange(params["max_len"]) < lengths[:, None])
    row = jnp.zeros(encoder.token_budget(params), jnp.int32)
    row = row.at[: len(inside)].set(tokens.reshape(-1)[inside])
    return LabeledBatch(
        tokens=row[None],
        token_types=jnp.zeros_like(row)[None],
        cu_seqlens=jnp.asarray(np.cumsum([0, *lengths])[None], jnp.int32),
        labels=labels[None],
        loss_mask=jnp.ones((1, params["batch"]), jnp.bool_),
    )


def step_of(loss: LossFunction) -> tuple[Any, Any]:
    """The optimizer, and ``step(state, batch) -> (state, metrics)``."""
    optimizer = training.make_optimizer(OPTIMIZER, 1000)
    step = training.make_train_step(
        training.accumulated(loss),
        optimizer,
        schedule=training.make_schedule(OPTIMIZER, 1000),
    )
    return optimizer, step


class Steps:
    """Goes on to train with each call; gives its first two losses.

    Args:
        params: of the case.
        loss: of a model on a batch.
        batch_of: makes a batch of params, tokens and labels.
    """

    def __init__(self, params: Params, loss: LossFunction, batch_of: Callable):
        self.params, self.batch_of = params, batch_of
        self.optimizer, self.step = step_of(loss)
        self.batches: list[LabeledBatch] = []
        self.losses: list[jax.Array] = []
        self.calls = 0

    def __call__(self, leaves: Any, tokens: Any, labels: Any) -> jax.Array:
        """Train on the next batch."""
        if not self.batches:
            both = zip(tokens, labels, strict=True)
            self.batches = [self.batch_of(self.params, *each) for each in both]
            self.state = self._begin(leaves)
        batch = self.batches[self.calls // 2 % BATCHES]
        self.state, metrics = self.step(self.state, batch)
        self.calls += 1
        self.losses = [*self.losses, metrics["loss"]][:2]
        # It is there when this step is done, and wrong once a loss is not a number.
        return jnp.stack([self.losses[0], self.losses[-1]]) + 0 * metrics["loss"]

    def _begin(self, leaves: Any) -> training.TrainState:
        tree = jax.tree.structure(layers_apart(self.params))
        model = jax.tree.unflatten(tree, [jnp.copy(x) for x in leaves])
        return training.TrainState.create(model, self.optimizer)

    def memory(self, leaves: Any, tokens: Any, labels: Any) -> float:
        """Bytes of the optimizer state and of what the step makes."""
        compiled = self.step.lower(self.state, self.batches[0]).compile()
        moments = jax.tree.leaves(self.state.opt_state)
        return timing.program_bytes(compiled) + sum(x.nbytes for x in moments)


def ours(params: Params) -> Callable[..., Any]:
    """Packed before the embedding."""
    return Steps(params, training.classification_loss(), packed_batch)


def jax_padded(params: Params) -> Callable[..., Any]:
    """A plain model with cuDNN's attention."""
    if not timing.on_gpu():
        raise NotImplementedError("cuDNN needs a GPU")
    return Steps(params, padded_loss(Switches(), jnp.bfloat16), padded_batch)


def reference(params: Params) -> Callable[..., Any]:
    """The first two losses of a padded model in fp32, scores stored."""
    loss = padded_loss(Switches(attention="xla"), jnp.float32)
    optimizer, step = step_of(loss)
    tree = jax.tree.structure(layers_apart(params))

    def run(leaves: Any, tokens: Any, labels: Any) -> jax.Array:
        model = jax.tree.unflatten(tree, leaves)
        state = training.TrainState.create(model, optimizer)
        batch, losses = padded_batch(params, tokens[0], labels[0]), []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return jnp.stack(losses)

    return run


# --- In PyTorch -----------------------------------------------------------------------


def _theirs(params: Params, name: str) -> Any:
    """The model of transformers with the same parameters."""
    import torch
    import transformers

    attention, _ = MODES[name]
    model = random_model(params)
    disentangled = model.config.relative is not None
    if disentangled and name in ("torch_sdpa", "torch_flash"):
        raise NotImplementedError("transformers has no fused DeBERTa attention")
    if name == "torch_flash":
        want_package("flash_attn.flash_attn_interface", "flash_attn")
    with tempfile.TemporaryDirectory() as directory:
        models.save(model, directory)
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager" if disentangled else attention,
        )
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout) or hasattr(module, "drop_prob"):
            module.p = module.drop_prob = 0.0
    # No mode but this one has gradients in all versions; dropout is off.
    return theirs.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def torch_steps(name: str) -> Torch:
    """A baseline in torch."""

    def make(params: Params) -> Callable[..., Any]:
        import torch

        theirs, mode = _theirs(params, name), MODES[name][1]
        device = next(theirs.parameters()).device
        decayed = [p for p in theirs.parameters() if p.ndim > 1]
        others = [p for p in theirs.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=OPTIMIZER.learning_rate,
            betas=(OPTIMIZER.b1, OPTIMIZER.b2),
            fused=device.type == "cuda",
        )
        run = theirs
        if mode is not None:
            torch.compiler.reset()
            run = torch.compile(theirs, mode=mode, dynamic=False)
        lengths = torch.tensor(encoder.lengths_of(params), device=device)
        mask = torch.arange(params["max_len"], device=device) < lengths[:, None]
        batches: list[tuple[Any, Any]] = []
        losses: list[Any] = []
        calls = 0

        def step(leaves: Any, tokens: Any, labels: Any) -> Any:
            nonlocal calls
            if not batches:
                both = zip(tokens.long(), labels.long(), strict=True)
                batches.extend((x.clone(), y.clone()) for x, y in both)
            x, y = batches[calls // 2 % BATCHES]
            calls += 1
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            cast: Any = contextlib.nullcontext()
            if device.type == "cuda":
                cast = torch.autocast("cuda", dtype=torch.bfloat16)
            with cast:
                loss = run(input_ids=x, attention_mask=mask.long(), labels=y).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIMIZER.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if len(losses) < 2:
                losses.append(loss.detach().clone())
            return torch.stack([losses[0], losses[-1]]) + 0 * loss.detach()

        return step

    return Torch(make)


# --- The command ----------------------------------------------------------------------


def case(model: str, batch: int, max_len: int) -> Case:
    """One batch of one model."""
    return encoder.case(model, batch, max_len)


BENCHMARK = Benchmark(
    name="fine_tuning",
    cases=[
        case("bert_base", 16, 512),
        case("bert_base", 32, 128),
        case("bert_base", 64, 256),
        case("bert_large", 16, 512),
        case("bert_large", 32, 128),
        case("deberta_v3_base", 16, 512),
    ],
    quick_cases=[case("bert_tiny", 3, 24)],
    kernels=encoder.BENCHMARK.kernels,
    packages={
        "torch_flash": ("torch", "transformers", "flash_attn"),
        "torch*": ("torch", "transformers"),
    },
    inputs=inputs,
    reference=reference,
    implementations={
        "jaxscale": Jax(ours, jit=False),
        "jax_padded": Jax(jax_padded, jit=False),
        **{name: torch_steps(name) for name in MODES},
    },
    metrics=encoder.metrics,
    time="wall",
    samples=20,
    rotate=False,
    max_rel_error=2e-2,
    selectors={"model": "model", "batch": "batch", "max_len": "max_len"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
