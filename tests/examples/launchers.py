"""Stand-ins for sbatch, srun, mpirun and ssh, which start processes on this machine.

Each takes the options that the recipes use and no others, and gives a process what the
real one gives it: sbatch runs a copy of the script and reads its directives; srun
passes its whole environment on and adds SLURM_*; mpirun and ssh give that of the other
machine, mpirun with OMPI_* and what -x names.

Run as ``python launchers.py NAME ARGUMENTS``, by the standard library alone.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time


# What a login on another machine would set, and the devices that it would have.
OF_THE_MACHINE = ("PATH", "HOME", "PYTHONPATH", "XLA_FLAGS", "NPROC")
OF_THE_MACHINE += ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
OF_THE_MACHINE += (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)


def machine() -> dict[str, str]:
    return {name: os.environ[name] for name in OF_THE_MACHINE if name in os.environ}


def run_all(commands: list[tuple[list[str], dict[str, str]]]) -> int:
    """Run all; the first that fails, or a SIGTERM, ends the others."""
    processes = [
        subprocess.Popen(command, env=environ, start_new_session=True)
        for command, environ in commands
    ]

    def end(*_: object) -> None:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    while (codes := [process.poll() for process in processes]).count(None):
        if any(codes):
            end()
        time.sleep(0.05)
    return next((abs(code) for code in codes if code), 0)


def sbatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--output", required=True)
    for name in ("--job-name", "--gpus-per-node", "--time", "--signal", "--open-mode"):
        parser.add_argument(name)
    for name in ("--exclusive", "--requeue"):
        parser.add_argument(name, action="store_true")
    script, *rest = arguments
    with open(script) as file:
        lines = file.read().splitlines()
    assert lines[0] == "#!/bin/bash"
    directives: list[str] = []
    for line in lines:
        if not line.startswith("#") and line.strip():
            break  # Slurm reads no directive behind the first command.
        if line.startswith("#SBATCH "):
            directives += shlex.split(line.removeprefix("#SBATCH "))
    options = parser.parse_args(directives)
    job = os.environ["TEST_JOB_ID"]
    log = options.output.replace("%x", options.job_name).replace("%j", job)
    environ = os.environ | {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NUM_NODES": str(options.nodes),
        "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node),
    }
    with tempfile.TemporaryDirectory() as spool, open(log, "a") as output:
        copy = shutil.copy(script, f"{spool}/slurm_script")
        command = ["bash", copy, *rest]
        return subprocess.run(
            command, env=environ, stdout=output, stderr=output, check=False
        ).returncode


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", choices=["1"])
    parser.add_argument("--cpu-bind", choices=["none"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    on_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    common = {
        "SLURM_NTASKS": str(nodes * on_node),
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{on_node}(x{nodes})",
    }
    tasks = [
        {
            "SLURM_PROCID": str(node * on_node + task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODEID": str(node),
        }
        for node in range(nodes)
        for task in range(on_node)
    ]
    return run_all([(options.command, os.environ | common | task) for task in tasks])


def mpirun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--map-by", required=True)
    parser.add_argument("--bind-to", choices=["none"])
    parser.add_argument("-x", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    hosts = options.host.split(",")
    mapping = re.fullmatch(r"ppr:(\d+):node", options.map_by)
    assert mapping, options.map_by
    on_host = int(mapping[1])
    passed = {}
    for variable in options.x:
        name, given, value = variable.partition("=")
        passed[name] = value if given else os.environ[name]
    count = len(hosts) * on_host
    common = {  # as version 5, which does not say where the first process is
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(on_host),
        "PMIX_NAMESPACE": "prterun-test@1",
    }
    ranks = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % on_host),
        }
        for rank in range(count)
    ]
    return run_all(
        [(options.command, machine() | passed | common | rank) for rank in ranks]
    )


def ssh(arguments: list[str]) -> int:
    terminal, host, command = arguments
    assert terminal == "-tt" and host.startswith("127.0.0."), arguments
    os.chdir(os.environ["HOME"])
    return run_all([(["bash", "-c", command], machine())])


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
