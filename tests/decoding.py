"""Tokens that go through pages part by part, for tests that compare them with rows."""

import jax.numpy as jnp

from jaxscale.nn import PagedChunks, PagedRows, empty_pages


def nan_pages(model, num_pages, page_size):
    """A pool in which what is read before it is written can be seen."""
    config = model.config
    pages = empty_pages(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        rules=model.rules,
    )
    return jnp.full_like(pages, jnp.nan)


def decode(model, tokens, *sizes, page_size=4, workspace=None):
    """Logits of `tokens`, [B, T, V], and the pages that hold their keys and values.

    The first of `sizes` is how many tokens of each row are computed as a chunk, all
    chunks in one row; then so many at a time, in rows of their own. Those add over
    devices in `workspace`, if there is one.
    """
    batch, total = tokens.shape
    width = -(-total // page_size)
    pages = nan_pages(model, batch * width, page_size)
    table = jnp.arange(batch * width, dtype=jnp.int32)[::-1].reshape(batch, width)
    first, *others = sizes
    rows = table[:, :, None] * page_size + jnp.arange(page_size)  # [B, W, G]
    rows = rows.reshape(batch, -1)[:, :first].reshape(-1)
    state = PagedChunks(
        positions=jnp.tile(jnp.arange(first), batch)[None],
        pages=pages,
        layer=jnp.int32(0),
        rows=rows,
        cu_q=first * jnp.arange(batch + 1),
        prompt_table=table,
        ends=jnp.full(batch, first),
    )
    hidden, state = model.run(tokens[:, :first].reshape(1, -1), state)
    found, done = [model.unembed(hidden).reshape(batch, first, -1)], first
    for size in others:
        lengths, new = jnp.full(batch, done), jnp.full(batch, size)
        state = PagedRows.of(
            state.pages, table, lengths, new, size, workspace=workspace
        )
        hidden, state = model.run(tokens[:, done : done + size], state)
        workspace = state.workspace
        found.append(model.unembed(hidden))
        done += size
    assert done == total
    return jnp.concatenate(found, axis=1), state.pages
