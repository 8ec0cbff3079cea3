#!/bin/bash
# Open MPI: one process on each host, which uses all its GPUs. On one of the hosts, from a
# directory that all see:
#
#     bash open_mpi.sh n1,n2 pretrain_llama.py --mesh.tensor 8 --data.paths ...
#
# The same command continues the run. For a checkpoint before the end send a SIGTERM to one
# of the processes; mpirun would give them a second.
set -euo pipefail
hosts=$1
shift
first=${hosts%%,*}

# Processes may use all cores of their host. The first host coordinates; since version 5
# nothing else tells the processes so. The environment that counts is passed on with -x.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none \
    -x PATH -x JAX_COORDINATOR_ADDRESS="$first:${JAX_COORDINATOR_PORT:-8476}" \
    "$(command -v python)" "$@"
