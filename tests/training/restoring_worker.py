"""One of two processes that read checkpoints, each from a disk of its own."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.sharding import make_mesh
from jaxscale.training.checkpoint.store import Checkpointer, DamagedCheckpoint
from tests.training import processes
from tests.training.checkpoint.damage import damage


def main(coordinator: str, rank: str, root: str) -> None:
    processes.join(coordinator, rank)
    rows = NamedSharding(make_mesh({"fsdp": 4}), PartitionSpec("fsdp"))

    def filled(step):
        return jax.jit(lambda: jnp.full(4096, step), out_shardings=rows)()

    shared, own = Path(root, "shared"), Path(root, rank)
    with Checkpointer(shared, keep=9) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"model": {"w": filled(step)}}, {"row": step})
    shutil.copytree(shared, own)
    if rank == "1":
        damage(own / "5", "cut off")
        shutil.rmtree(own / "4")
        damage(own / "3", "no metadata")
    else:
        damage(own / "2", "no position")
    multihost_utils.sync_global_devices("damaged")
    target: Any = {"model": {"w": filled(0)}}
    found: dict[str, Any] = {}
    with Checkpointer(own, read_only=True) as checkpointer:
        state, data = checkpointer.restore(target)
        shards = state["model"]["w"].addressable_shards
        found["state"] = sorted({int(x) for s in shards for x in s.data}), data
        model = checkpointer.restore_model(target["model"])
        found["model"] = int(model["w"].addressable_shards[0].data[0])
        for step in (3, 2):
            try:
                checkpointer.restore(target, step)
            except DamagedCheckpoint as error:
                found[str(step)] = str(error)
    with Checkpointer(Path(root, "empty")) as checkpointer:
        found["none"] = checkpointer.newest()
    found |= replicas(Path(root, "replicas"))
    print(json.dumps(found))


def replicas(directory: Path) -> dict[str, Any]:
    """Restore what both processes hold alike, and count what each reads for it."""
    mesh = make_mesh({"data": 2, "fsdp": 2})
    rng, places = np.random.default_rng(0), [PartitionSpec(), PartitionSpec("fsdp")]
    arrays: dict[str, Any] = {}
    for i in range(8):  # any bits, also those of NaN and of -0
        x = rng.integers(0, 2**32, (512, 256), np.uint32)
        x = x.view([np.float32, np.int32, jnp.bfloat16, np.uint32][i // 2])
        kind = "pinned_host" if i == 5 else "device"
        place = NamedSharding(mesh, places[i % 2], memory_kind=kind)
        arrays[f"x{i}"] = jax.make_array_from_callback(
            x.shape, place, lambda index, x=x: x[index]
        )
    arrays["flag"] = jax.device_put(
        np.array([True, False]), NamedSharding(mesh, places[0])
    )
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, arrays, {})
    target: Any = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
    with jax.set_mesh(mesh), Checkpointer(directory, read_only=True) as checkpointer:
        before = bytes_read()
        with jax.set_mesh(mesh):  # as a training loop does
            restored, _ = checkpointer.restore(target)
        read = bytes_read() - before
    same = all(
        (np.asarray(a.data).view(np.uint8) == np.asarray(b.data).view(np.uint8)).all()
        for name, x in arrays.items()
        for a, b in zip(
            x.addressable_shards, restored[name].addressable_shards, strict=True
        )
    )
    size = sum(x.nbytes for x in arrays.values())
    kept = all(restored[name].sharding == x.sharding for name, x in arrays.items())
    return {"read": read / size, "same": same and kept}


def bytes_read() -> int:
    """By this process, from wherever."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


if __name__ == "__main__":
    main(*sys.argv[1:])
