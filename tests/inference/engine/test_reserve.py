import jax
import jax.numpy as jnp
import pytest

from jaxscale.inference.engine.reserve import reserve_small


def test_nothing_is_reserved_on_cpus():
    assert reserve_small(jax.devices("cpu")) == []


@pytest.mark.gpu
def test_small_arrays_lie_between_the_separators():
    device = jax.devices()[0]
    kept = [x.unsafe_buffer_pointer() for x in reserve_small([device])]
    made = [jnp.zeros(n, jnp.int32, device=device) for n in (1, 1000, 50_000) * 8]
    places = [x.unsafe_buffer_pointer() for x in made]
    assert all(min(kept) - (256 << 10) <= place < max(kept) for place in places)
