"""The rank of a process in its job, as its launcher says.

JAX detects Slurm, Open MPI and Kubernetes as well, but has no public way to ask it what
it found before that service runs. So `detect` reads the same variables; besides, it
knows torchrun, Open MPI 5, and Kubernetes without its client.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence


# Where launchers give no port: the last 4096, outside the ports of most services.
_FIRST_PORT = 2**16 - 2**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The rank of one process in its job, and how to reach the others."""

    process_id: int = 0
    """Number of this process, from 0."""
    num_processes: int = 1
    """Number of processes of the job."""
    coordinator: str | None = None
    """``host:port`` of process 0; None for a single process."""
    launcher: str = "single"
    """Where this was read from: arguments, environment, torchrun, slurm, kubernetes,
    open_mpi, jax (`jax.distributed.initialize` was called already) or single."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this host that the process uses; None for all visible ones."""


def detect(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> Cluster:
    """The cluster that arguments and environment variables describe.

    Arguments win, then ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID`` (which Kubeflow sets), then the launcher:

    - torchrun, and launchers that set the same: ``RANK``, ``WORLD_SIZE``,
      ``MASTER_ADDR`` and ``LOCAL_RANK``. The port is the one after ``MASTER_PORT``,
      where torchrun listens itself; ``JAX_COORDINATOR_PORT`` sets another.
    - Open MPI: ``OMPI_COMM_WORLD_{SIZE,RANK,LOCAL_RANK,LOCAL_SIZE}``. The coordinator
      is read from versions before 5 and known when all processes share a host;
      otherwise pass ``mpirun -x JAX_COORDINATOR_ADDRESS=host:port``.
    - Slurm: ``SLURM_PROCID``, ``SLURM_NTASKS`` and ``SLURM_STEP_NODELIST`` of ``srun``,
      whose first host is the coordinator; ``JAX_COORDINATOR_PORT`` sets the port.
    - Kubernetes: ``JOB_COMPLETION_INDEX`` of an Indexed Job is the number of the
      process; the pod's specification sets the other two variables above.

    Args:
        environ: Environment variables, `os.environ`.
        coordinator: As for `initialize`, like the following arguments.
        num_processes: Number of processes.
        process_id: Number of this process.
        local_device_ids: GPUs of this process.

    Raises:
        ValueError: something is missing, malformed or contradictory.

    Example:
        >>> detect({"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2",
        ...         "JAX_COORDINATOR_ADDRESS": "job-0.jobs:1234"}).launcher
        'kubernetes'
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    launcher = "arguments"
    if None in given.values():
        launcher, found = _from_environment(environ)
        for name, value in given.items():
            if value is None:
                given[name] = found.get(name)
            elif name != "coordinator" and found.get(name, value) != value:
                raise ValueError(
                    f"{name} is {value}, but {launcher} says {found[name]}; leave the "
                    "argument out, or give coordinator, num_processes and process_id"
                )
        local_device_ids = local_device_ids or found.get("local_device_ids")
        if launcher == "single" and any(value is not None for value in given.values()):
            launcher = "arguments"
    coordinator, count, index = given.values()
    if count == 1 or all(value is None for value in given.values()):
        return Cluster()
    for name, value in given.items():
        if value is None:
            raise ValueError(_missing(name, launcher))
    split_address(str(coordinator))
    if count < 1:
        raise ValueError(f"num_processes is {count}, expected at least 1")
    if not 0 <= index < count:
        raise ValueError(
            f"process_id is {index}, expected 0 to {count - 1} for "
            f"num_processes={count}; number the processes from 0"
        )
    return Cluster(
        process_id=index,
        num_processes=count,
        coordinator=coordinator,
        launcher=launcher,
        local_device_ids=None if local_device_ids is None else tuple(local_device_ids),
    )


def _from_environment(environ: Mapping[str, str]) -> tuple[str, dict]:
    """Name of the launcher, and the coordinator, counts and GPUs that it reports."""
    explicit = {
        "coordinator": environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _integer(environ, "JAX_NUM_PROCESSES"),
        "process_id": _integer(environ, "JAX_PROCESS_ID"),
    }
    explicit = {name: value for name, value in explicit.items() if value is not None}
    if len(explicit) == 3:
        return "environment", explicit
    if "RANK" in environ and "WORLD_SIZE" in environ:  # started by any of those below
        return "torchrun", _torchrun(environ) | explicit
    if "OMPI_COMM_WORLD_RANK" in environ:  # before Slurm: mpirun may run under it
        return "open_mpi", _open_mpi(environ) | explicit
    if "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
        return "slurm", _slurm(environ) | explicit
    if "JOB_COMPLETION_INDEX" in environ:
        index = _integer(environ, "JOB_COMPLETION_INDEX")
        return "kubernetes", {"process_id": index} | explicit
    return ("environment" if explicit else "single"), explicit


def _torchrun(environ: Mapping[str, str]) -> dict:
    count = _required(environ, "WORLD_SIZE")
    on_host = _integer(environ, "LOCAL_WORLD_SIZE") or count
    found = {
        "num_processes": count,
        "process_id": _required(environ, "RANK"),
    } | _local_gpu(environ, "LOCAL_RANK", on_host > 1 and "LOCAL_RANK" in environ)
    host = environ.get("MASTER_ADDR")
    if host:
        port = environ.get("JAX_COORDINATOR_PORT")
        if port is None:
            port = (_integer(environ, "MASTER_PORT") or _FIRST_PORT - 1) + 1
        bare = host.removeprefix("[").removesuffix("]")
        found["coordinator"] = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
    return found


def _slurm(environ: Mapping[str, str]) -> dict:
    nodes = environ["SLURM_STEP_NODELIST"]  # node001 or node[001-004,9],gpu7
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}, expected names of hosts")
    job = _required(environ, "SLURM_JOB_ID")
    port = environ.get("JAX_COORDINATOR_PORT", str(_FIRST_PORT + job % 2**12))
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # 4(x2),3
    several = any(int(number) > 1 for number in re.findall(r"\b(\d+)", tasks))
    return {
        "coordinator": f"{first[1]}{first[2] or ''}:{port}",
        "num_processes": _required(environ, "SLURM_NTASKS"),
        "process_id": _integer(environ, "SLURM_PROCID"),
    } | _local_gpu(environ, "SLURM_LOCALID", several)


def _open_mpi(environ: Mapping[str, str]) -> dict:
    count = _required(environ, "OMPI_COMM_WORLD_SIZE")
    on_host = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    found = {
        "num_processes": count,
        "process_id": _integer(environ, "OMPI_COMM_WORLD_RANK"),
    } | _local_gpu(environ, "OMPI_COMM_WORLD_LOCAL_RANK", on_host > 1)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # 12582912.0;tcp://10.0.0.1,10.1.0.1
    job = uri.partition(";")[0] or environ.get("PMIX_NAMESPACE", "")
    port = environ.get(
        "JAX_COORDINATOR_PORT", str(_FIRST_PORT + zlib.crc32(job.encode()) % 2**12)
    )
    address = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    if on_host == count:
        found["coordinator"] = f"127.0.0.1:{port}"
    elif address is not None:
        found["coordinator"] = f"{address[1] or f'[{address[2]}]'}:{port}"
    return found


def _local_gpu(environ: Mapping[str, str], variable: str, several: bool) -> dict:
    """One GPU per process, if several share a host and see more than one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not several or (len(visible) == 1 and visible[0]):
        return {}
    return {"local_device_ids": (_required(environ, variable),)}


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    return _required(environ, variable) if variable in environ else None


def _required(environ: Mapping[str, str], variable: str) -> int:
    value = environ.get(variable)
    if value is None or not value.strip().isdecimal():
        raise ValueError(
            f"environment variable {variable} is {value!r}, expected a whole number"
        )
    return int(value)


def _missing(name: str, launcher: str) -> str:
    variable = {
        "coordinator": "JAX_COORDINATOR_ADDRESS=host:port (a host that all reach)",
        "num_processes": "JAX_NUM_PROCESSES",
        "process_id": "JAX_PROCESS_ID, or completionMode: Indexed in Kubernetes",
    }[name]
    return (
        f"{name} is not known from {launcher}; pass {name}= to initialize, or set the "
        f"environment variable {variable}, on every process"
    )


def split_address(coordinator: str) -> tuple[str, int]:
    """Host, without brackets, and port of a coordinator.

    Raises:
        ValueError: it has another form.
    """
    host, _, port = coordinator.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    number = int(port) if port.isdecimal() else 0
    if not bare or "/" in host or (":" in bare) != (bare != host) or number > 65535:
        number = 0
    if number < 1:
        raise ValueError(
            f"coordinator is {coordinator!r}, expected host:port with a port from 1 to "
            "65535, such as node001:8476 or [fd00::1]:8476"
        )
    return bare, number
