"""One of two processes that read checkpoints, each from a disk of its own."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.sharding import make_mesh
from jaxscale.training.checkpoint import Checkpointer, DamagedCheckpoint
from tests.training import processes
from tests.training.damage import damage


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
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
