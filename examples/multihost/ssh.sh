#!/bin/bash
# Plain ssh: one process on each host, which uses all its GPUs. With keys that let you in
# without a password, from a directory that all hosts see:
#
#     bash ssh.sh n1,n2 pretrain_llama.py --mesh.tensor 8 --data.paths ...
#
# The same command continues the run. Ctrl-C ends all processes at once; for a checkpoint
# before the end send a SIGTERM to one of them, on its host.
set -euo pipefail
IFS=, read -ra hosts <<<"$1"
shift

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for i in "${!hosts[@]}"; do
    # With -tt the process ends when its connection does.
    ssh -tt "${hosts[i]}" "cd $(printf '%q' "$PWD") && exec env \
        JAX_COORDINATOR_ADDRESS=${hosts[0]#*@}:${JAX_COORDINATOR_PORT:-8476} \
        JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i \
        $(printf '%q ' "$(command -v python)" "$@")" </dev/null &
done
# The first process that fails ends the script, and so the others.
for _ in "${hosts[@]}"; do wait -n; done
