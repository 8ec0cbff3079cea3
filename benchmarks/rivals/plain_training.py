"""The baseline in plain JAX of `benchmarks.training`: what one writes without jaxscale.

`jax.nn.dot_product_attention`, which is cuDNN's on a GPU, optax's AdamW, shardings for
parameters and activations, and XLA's own collectives. Layers are a Python loop, so that
each is compiled; nothing is recomputed.

Legend: B batch, T tokens, N query heads, K key/value heads, H head dim, D model,
F hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.workloads.equal_llama import LEARNING_RATE, Rows, Shape, shapes, weight


SPECS = {
    "embed.table": ("tensor", "fsdp"),
    "attention.query.kernel": ("fsdp", "tensor"),
    "attention.key.kernel": ("fsdp", "tensor"),
    "attention.value.kernel": ("fsdp", "tensor"),
    "attention.out.kernel": ("tensor", "fsdp"),
    "mlp.gate.kernel": ("fsdp", "tensor"),
    "mlp.up.kernel": ("fsdp", "tensor"),
    "mlp.down.kernel": ("tensor", "fsdp"),
    "lm_head.kernel": ("fsdp", "tensor"),
}
"""How each matrix is split over the mesh; scales are not."""


def parameters(shape: Shape, mesh: Mesh, seed: int) -> dict[str, Any]:
    """The weights of a seed on a mesh, those of each layer by themselves."""

    def placed(name: str, layer: int | None = None) -> jax.Array:
        inner = name.removeprefix("blocks.")
        sharding = NamedSharding(mesh, PartitionSpec(*SPECS.get(inner, ())))
        return jax.device_put(weight(shape, name, seed, layer), sharding)

    names = shapes(shape)
    found: Any = {n: placed(n) for n in names if not n.startswith("blocks.")}
    inside = [n for n in names if n.startswith("blocks.")]
    found["blocks"] = [
        {n.removeprefix("blocks."): placed(n, i) for n in inside}
        for i in range(shape.num_layers)
    ]
    return found


def loss_function(shape: Shape, dtype: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """``loss(parameters, tokens)``: the mean cross-entropy of rows [B, T + 1]."""
    n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_dim
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def split(x: jax.Array, *names: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*names))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + shape.norm_eps)
        return (y * scale).astype(x.dtype)

    def rotate(x: jax.Array) -> jax.Array:  # [B, T, N, H]
        exponents = jnp.arange(0, h, 2, dtype=jnp.float32) / h
        positions = jnp.arange(x.shape[1], dtype=jnp.float32)
        angles = positions[:, None] * shape.rope_theta**-exponents
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, H / 2]
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return rotated.astype(x.dtype)

    def attention(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        def heads(name: str, count: int) -> jax.Array:
            y = x @ w[f"attention.{name}.kernel"].astype(dtype)
            y = y.reshape(*x.shape[:2], count, h)  # [B, T, N, H]
            return split(y, "fsdp", None, "tensor", None)

        window = None if shape.window is None else (shape.window - 1, 0)
        y = jax.nn.dot_product_attention(
            rotate(heads("query", n)),
            rotate(heads("key", k)),
            heads("value", k),
            is_causal=True,
            local_window_size=window,
            implementation=implementation,
        )
        y = y.reshape(*x.shape[:2], n * h)  # [B, T, N H]
        return y @ w["attention.out.kernel"].astype(dtype)

    def mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        gate, up, down = (
            w[f"mlp.{name}.kernel"].astype(dtype) for name in ("gate", "up", "down")
        )
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        y = norm(x, w["attention_norm.scale"])
        if shape.parallel_block:
            return split(x + attention(y, w) + mlp(y, w), "fsdp", "tensor", None)
        x = split(x + attention(y, w), "fsdp", "tensor", None)
        y = norm(x, w["mlp_norm.scale"])
        return split(x + mlp(y, w), "fsdp", "tensor", None)

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        x = w["embed.table"].astype(dtype)[tokens[:, :-1]]  # [B, T, D]
        x = split(x, "fsdp", "tensor", None)
        for layer in w["blocks"]:
            x = block(x, layer)
        head = w["embed.table"].T if shape.tie_embeddings else w["lm_head.kernel"]
        logits = norm(x, w["norm.scale"]) @ head.astype(dtype)  # [B, T, V]
        logits = split(logits, "fsdp", None, "tensor").astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return found.mean()

    return loss


def prepare(
    job: Mapping[str, Any], devices: Sequence[Any], rows: Sequence[Rows]
) -> tuple[Mesh, Any, Callable[[Any, Any], tuple[Any, Any]], list[jax.Array]]:
    """The mesh, the state, ``step(state, batch) -> (state, loss)``, the batches."""
    shape = Shape(**job["shape"])
    mesh = jax.make_mesh(
        (job["fsdp"], job["tensor"]),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices,
    )
    loss = loss_function(shape, jnp.dtype(job["dtype"]))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            LEARNING_RATE,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask=lambda w: jax.tree.map(lambda x: x.ndim > 1, w),
        ),
    )
    weights = parameters(shape, mesh, job["seed"])
    state = weights, optimizer.init(weights)  # moments lie as their weights do
    whole = NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda x: x.sharding if x.ndim else whole, state)
    state = jax.device_put(state, places)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))
    batches = [jax.device_put(each.tokens, by_row) for each in rows]
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
    return mesh, state, run, batches
