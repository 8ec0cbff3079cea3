"""Multi-node start-up, device meshes, sharding rules, and operations that use them."""

from jaxscale.public import listing
from jaxscale.sharding.distributed import Cluster, initialize
from jaxscale.sharding.fp8 import Fp8
from jaxscale.sharding.lookup import gather
from jaxscale.sharding.mesh import MESH_AXES, MeshConfig, make_mesh
from jaxscale.sharding.operations import constrain, contract, reshape
from jaxscale.sharding.parameters import (
    create,
    logical_axes,
    partitioned,
    place,
    shardings,
    specs,
)
from jaxscale.sharding.rules import (
    REPLICATED,
    AxisRules,
    dp,
    fsdp,
    fsdp_tp,
    megascale_3d,
    preset,
)
from jaxscale.sharding.schedule import (
    bubble_fraction,
    pipeline_schedule,
    place_layers,
)
from jaxscale.sharding.schedule_table import Phase, PipelineSchedule
from jaxscale.sharding.shards import per_shard
from jaxscale.sharding.state_rules import StateRules
from jaxscale.sharding.tensor_parallel import (
    TensorParallel,
    column_parallel,
    launch_in_order,
    row_parallel,
)
from jaxscale.sharding.xla_flags import XLA_PRESETS, XlaPreset, use_xla_flags


__all__ = [
    "MESH_AXES",
    "REPLICATED",
    "XLA_PRESETS",
    "AxisRules",
    "Cluster",
    "Fp8",
    "MeshConfig",
    "Phase",
    "PipelineSchedule",
    "StateRules",
    "TensorParallel",
    "XlaPreset",
    "bubble_fraction",
    "column_parallel",
    "constrain",
    "contract",
    "create",
    "dp",
    "fsdp",
    "fsdp_tp",
    "gather",
    "initialize",
    "launch_in_order",
    "logical_axes",
    "make_mesh",
    "megascale_3d",
    "partitioned",
    "per_shard",
    "pipeline_schedule",
    "place",
    "place_layers",
    "preset",
    "reshape",
    "row_parallel",
    "shardings",
    "specs",
    "use_xla_flags",
]

__dir__ = listing(__all__)
