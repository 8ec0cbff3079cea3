"""Multi-host start-up: launchers, and real processes that meet over loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from jaxscale.sharding import Cluster, distributed, initialize
from jaxscale.sharding.distributed import _Meeting, detect
from tests.calls import own_instructions
from tests.ports import free_port


SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu-a[007-008,12],gpu-b1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


# ------------------------------------------------------------------------------------
# Who is who


def test_slurm():
    assert detect(SLURM) == Cluster(
        process_id=3,
        num_processes=4,
        coordinator=f"gpu-a007:{61440 + 4100 % 4096}",
        launcher="slurm",
        local_device_ids=(1,),
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3,5]", "n3"), ("n[09-11],m2", "n09")],
)
def test_slurm_node_lists(nodes, host):
    found = detect(SLURM | {"SLURM_STEP_NODELIST": nodes, "JAX_COORDINATOR_PORT": "99"})
    assert found.coordinator == f"{host}:99"


@pytest.mark.parametrize(
    ("change", "gpus"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None),  # one process owns the host
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),  # Slurm has already bound one
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, (1,)),
    ],
)
def test_gpus_of_a_process(change, gpus):
    assert detect(SLURM | change).local_device_ids == gpus
    chosen = detect(SLURM | change, local_device_ids=[2, 3])
    assert chosen.local_device_ids == (2, 3)


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_torchrun():
    """Its own port is taken: torchrun listens there."""
    expected = Cluster(
        process_id=3,
        num_processes=4,
        coordinator="node1:29501",
        launcher="torchrun",
        local_device_ids=(1,),
    )
    assert detect(TORCHRUN) == expected
    assert detect(SLURM | TORCHRUN) == expected  # as torchrun is started by srun
    assert detect(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}).local_device_ids is None


@pytest.mark.parametrize(
    ("change", "coordinator"),
    [
        ({"MASTER_ADDR": "fd00::1"}, "[fd00::1]:29501"),
        ({"JAX_COORDINATOR_PORT": "99"}, "node1:99"),
        ({"JAX_COORDINATOR_ADDRESS": "n2:8476"}, "n2:8476"),
        ({"MASTER_PORT": None}, "node1:61440"),
    ],
)
def test_coordinator_under_torchrun(change, coordinator):
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    assert detect(environ).coordinator == coordinator


def test_torchrun_that_names_no_host_or_no_number():
    environ = {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}
    with pytest.raises(
        ValueError, match=r"coordinator is not known from torchrun; pas"
    ):
        detect(environ)
    with pytest.raises(
        ValueError, match="variable WORLD_SIZE is 'two', expected a who"
    ):
        detect(TORCHRUN | {"WORLD_SIZE": "two"})
    assert detect(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) == Cluster()


def test_open_mpi_wins_over_the_slurm_that_started_its_daemons():
    found = detect(SLURM | OPEN_MPI)
    assert (found.launcher, found.process_id) == ("open_mpi", 2)
    assert (found.coordinator or "").startswith("10.96.0.1:6")
    assert found.local_device_ids == (0,)
    six = "1;tcp6://[fe80::b9b,2620:10d::2]:43370"
    found = detect(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": six})
    assert (found.coordinator or "").startswith("[fe80::b9b]:6")


def test_open_mpi_5_names_no_host():
    environ = {k: v for k, v in OPEN_MPI.items() if "uri" not in k}
    with pytest.raises(
        ValueError,
        match=r"coordinator is not known from open_mpi.*JAX_COORDINATOR_ADDR",
    ):
        detect(environ)
    found = detect(environ | {"JAX_COORDINATOR_ADDRESS": "n1:8476"})
    assert found.coordinator == "n1:8476"
    alone = environ | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert (detect(alone).coordinator or "").startswith("127.0.0.1:6")


def test_kubernetes():
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "JAX_COORDINATOR_ADDRESS": "train-0.train:8476",
        "JAX_NUM_PROCESSES": "2",
    }
    assert detect(pod) == Cluster(
        process_id=1,
        num_processes=2,
        coordinator="train-0.train:8476",
        launcher="kubernetes",
    )
    del pod["JAX_NUM_PROCESSES"]
    with pytest.raises(ValueError, match=r"num_processes .*kubernetes.*JAX_NUM_PROC"):
        detect(pod)


def test_kubeflow_sets_everything():
    environ = {"JAX_COORDINATOR_ADDRESS": "j-0:1", "JAX_NUM_PROCESSES": "2"}
    found = detect(environ | {"JAX_PROCESS_ID": "1"})
    assert (found.launcher, found.process_id) == ("environment", 1)


def test_arguments_win_and_a_lone_process_needs_none():
    explicit = {"coordinator": "[fd00::1]:8476", "num_processes": 2, "process_id": 0}
    assert detect(SLURM, **explicit).launcher == "arguments"
    assert detect(SLURM, coordinator="n9:8476").coordinator == "n9:8476"
    assert detect({}) == detect({"SLURM_PROCID": "0"}) == Cluster()
    assert detect(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == Cluster()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "node001"}, "coordinator is 'node001', expected host:port"),
        ({"coordinator": "node001:0"}, "a port from 1 to 65535"),
        ({"coordinator": "node001:70000"}, "a port from 1 to 65535"),
        ({"coordinator": "http://node001:80"}, "expected host:port"),
        ({"coordinator": "fd00::1:8476"}, r"such as .*\[fd00::1\]:8476"),
        ({"process_id": 2}, "process_id is 2, expected 0 to 1 for num_processes=2"),
        ({"process_id": -1}, "process_id is -1, expected 0 to 1"),
        ({"num_processes": 0}, "num_processes is 0, expected at least 1"),
        ({"process_id": None}, "process_id is not known from arguments; pass process"),
        ({"num_processes": None}, "num_processes is not known .*JAX_NUM_PROCESSES"),
    ],
)
def test_bad_arguments(arguments, message):
    good = {"coordinator": "node001:8476", "num_processes": 2, "process_id": 0}
    with pytest.raises(ValueError, match=message):
        detect({}, **(good | arguments))


def test_arguments_that_contradict_the_launcher():
    with pytest.raises(ValueError, match="num_processes is 2, but slurm says 4; leave"):
        detect(SLURM, num_processes=2)
    with pytest.raises(ValueError, match="SLURM_NTASKS is 'four', expected a whole"):
        detect(SLURM | {"SLURM_NTASKS": "four"})


# ------------------------------------------------------------------------------------
# Does everyone answer


@pytest.fixture
def port():
    return free_port()


def call(port, process_id, num_processes=2, timeout=1.0):
    return initialize(f"127.0.0.1:{port}", num_processes, process_id, timeout=timeout)


def test_unreachable_coordinator_is_an_error_in_time(port):
    start = time.monotonic()
    with pytest.raises(  # and no hang
        TimeoutError,
        match=rf"process 1 of 2 .* host 127.0.0.1, port {port} within 1 s .*refused.*"
        "process 0 is running.*host name.*firewall",
    ):
        call(port, 1)
    assert time.monotonic() - start > 0.9


def test_unknown_host():
    with pytest.raises(TimeoutError, match=r"host nowhere.invalid, port 8476 within 0"):
        initialize("nowhere.invalid:8476", 2, 1, timeout=0.5)


def test_port_that_belongs_to_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TimeoutError, match="not waiting for this process"):
            call(port, 1, timeout=0.5)
        with pytest.raises(
            ValueError, match=f"process 0 cannot listen .*port {port} or choose another"
        ):
            call(port, 0)


def test_missing_processes_are_counted(port):
    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"3 of 4 processes \(1, 2, 3\) did not reach process 0 at"
    ):
        call(port, 0, 4)
    assert time.monotonic() - start > 0.9


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([(1, 3)], "process 1 has num_processes=3, but process 0 has 4; start all"),
        ([(2, 4), (2, 4)], "two processes have process_id=2; give each its own number"),
    ],
)
def test_processes_that_contradict_each_other_all_learn_it(port, workers, message):
    errors = []

    def join(process_id, num_processes):
        try:
            call(port, process_id, num_processes, timeout=120)
        except ValueError as error:
            errors.append(str(error))

    calls = [(0, 4), *workers]
    threads = [threading.Thread(target=join, args=c) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(errors) == len(calls)
    assert all(message in error for error in errors), errors


@pytest.fixture
def ahead(monkeypatch):
    """Seconds that the clock of this module is ahead; a connection has it looked at."""
    found, clock = [0.0], time.monotonic
    ours = SimpleNamespace(monotonic=lambda: clock() + found[0], sleep=time.sleep)
    monkeypatch.setattr(distributed, "time", ours)
    return found


@contextlib.contextmanager
def process_0(port, count, timeout):
    """Process 0 as a thread, and what it raises."""
    errors = []

    def coordinate():
        try:
            call(port, 0, count, timeout=timeout)
        except (TimeoutError, ValueError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=coordinate)
    thread.start()
    yield errors
    thread.join(120)
    assert not thread.is_alive()


def connect(port):
    until = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_process_that_restarts_while_others_are_awaited_is_let_in_again(port, ahead):
    with process_0(port, 3, timeout=1000) as errors:
        for _ in range(2):  # process 1 arrives, leaves, arrives again
            with connect(port) as connection:
                connection.sendall(b"jaxscale 1 3\n")
                assert connection.recv(5) == b"wait\n"
        with connect(port) as stranger:  # who is let go after that
            stranger.sendall(b"nonsense\n")
            assert stranger.recv(1) == b""
        ahead[0] = 2000.0
        connect(port).close()
    assert "1 of 3 processes (2) did not reach process 0" in errors[0]
    assert "1 (1) came and left again within 1000 s" in errors[0]


def test_exactly_those_that_are_missing_are_named_to_all(port, monkeypatch):
    """Also where the time of another process ends a moment before that of process 0.

    With more time where the least is too little for a busy host.
    """
    with contextlib.suppress(AssertionError):
        return name_those_that_are_missing(port, 2.0)
    monkeypatch.setattr(distributed, "_LAST_WORD_SECONDS", 60.0)
    name_those_that_are_missing(port, 30.0)


def name_those_that_are_missing(port, seconds):
    errors = {}

    def join(process_id, timeout):
        try:
            call(port, process_id, 3, timeout=timeout)
        except TimeoutError as error:
            errors[process_id] = str(error)

    calls = [(0, seconds), (1, seconds - 0.1)]
    threads = [threading.Thread(target=join, args=c) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert errors[0] == errors[1] and "in use" not in errors[0]
    assert errors[0].startswith("1 of 3 processes (2) did not reach process 0 at")


def meet(count, timeout, strangers=0):
    """Have so many others meet process 0; what it raised, and its instructions."""
    cluster = Cluster(process_id=0, num_processes=count, coordinator="127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        address = server.getsockname()
        silent = [socket.create_connection(address) for _ in range(strangers)]
        others = [socket.create_connection(address) for _ in range(1, count)]
        for index, other in enumerate(others, start=1):
            other.sendall(f"jaxscale {index} {count}\n".encode())
        until, meeting = time.monotonic() + timeout, _Meeting(cluster, server)
        used = own_instructions(lambda: meeting.wait(timeout, until))
        for other in others:
            with other, other.makefile() as lines:
                assert lines.read() == "wait\nok\n"
        for other in silent:
            other.close()
    return used


def test_silent_strangers_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(distributed, "_SILENT_SECONDS", 10**4)
    meet(4, 300.0, strangers=40)  # no time to wait for any


def test_process_0_does_as_much_for_each_process_however_many_there_are():
    few, many = (meet(n, 300.0) for n in (100, 1600))
    assert many < 20 * few  # 16 times as many: 256 times as much where it is quadratic


def test_a_stranger_that_says_half_a_line_is_let_go(port, monkeypatch, ahead):
    monkeypatch.setattr(distributed, "_SILENT_SECONDS", 0.2)
    with process_0(port, 2, timeout=1000) as errors:
        with connect(port) as stranger:
            stranger.sendall(b"jaxscale 1")
            assert stranger.recv(1) == b"" and not errors
        ahead[0] = 2000.0
        connect(port).close()
    assert "did not reach process 0" in errors[0]


def test_a_port_that_may_not_be_used_is_not_called_in_use(port, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ValueError, match=r"Permission denied.*; choose a port"
    ) as found:
        call(port, 0)
    assert "that uses port" not in str(found.value)


WORKER = """
import sys
import jax
from jaxscale.sharding import initialize, make_mesh
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
cluster = initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), timeout=300)
assert initialize() is cluster
assert cluster.process_id == jax.process_index() and jax.process_count() == 2
mesh = make_mesh({"data": 2, "tensor": 2})
# The last axis stays within a process.
assert {d.process_index for d in mesh.devices[:, cluster.process_id].flat} == {
    cluster.process_id
}
value = np.arange(4.0, dtype=np.float32) + 1
sharding = NamedSharding(mesh, P(("data", "tensor")))
x = jax.make_array_from_callback((4,), sharding, lambda i: value[i])
total = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, ("data", "tensor")),
    mesh=mesh, in_specs=P(("data", "tensor")), out_specs=P(),
))(x)

# Parameters are split over both processes, each computing its own shards.
from flax import nnx
from jaxscale.sharding import contract, create, fsdp, partitioned, place

def make():
    init = partitioned(jax.nn.initializers.normal(), "embed", "mlp")
    return nnx.Param(init(jax.random.key(0), (8, 4), np.float32))

mesh, axes = make_mesh({"fsdp": 4}), (("embed", "mlp"), ("batch", "act_mlp"))
kernel = create(make, mesh, fsdp())
assert [s.data.shape for s in kernel.get_value().addressable_shards] == [(2, 4)] * 2
rows = jax.device_put(np.eye(8, dtype=np.float32), NamedSharding(mesh, P("fsdp")))
run = jax.jit(lambda x, w: contract("be,em->bm", x, w[...], *axes, fsdp()))
out = run(rows, kernel)
copy = place(make(), mesh, fsdp())
gap = jax.jit(lambda a, b: abs(a - b).max())(out, copy.get_value())
assert out.sharding.spec == P("fsdp") or out.sharding.spec == P("fsdp", None)
print("total", float(total[0]), cluster.launcher, float(gap) < 1e-6)
"""


def test_two_processes_sum_over_loopback(port):
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_proxy")}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd(), "NPROC": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(port), str(index)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        results = [worker.communicate(timeout=600) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, results, strict=True):
        assert worker.returncode == 0, err
        assert "total 10.0 arguments True" in out
