"""Problems and forms to be timed in loops, and the programs that are made of them.

Forms are lowered one after another and compiled in threads, a batch of problems at a
time; those with a matmul of XLA, which times algorithms for it, one by one and while
nothing else uses the GPUs. Forms that lower to the same program, such as ``auto`` and
what it picks, share it.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.measure import timing
from benchmarks.measure.harness import NoMeasurement, Results, failed


SECONDS = 0.06
"""Length of a timed program on a GPU, about.

Starting a program on several GPUs costs up to a millisecond, which is to be a small
part of it.
"""

MAX_SETS = 16
"""Of operands that take turns in a loop."""

PRODUCT = "stablehlo.dot_general"
"""What a program with a matmul of XLA's says."""

CUBLAS_CHOOSES = {"xla_gpu_autotune_level": 0}
"""Options of XLA under which cuBLAS itself chooses the algorithm of a matmul.

By default XLA times several and keeps the fastest; at times neither it nor cuBLAS finds
what the other does. Programs with such matmuls are compiled both ways; the fastest
counts.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An array spread over the devices."""

    shape: tuple[int, ...]
    """Global shape."""
    spec: PartitionSpec
    """How it is split."""
    dtype: Any = jnp.bfloat16
    """Type of its elements."""
    scale: float = 1.0
    """Standard deviation of its elements, random normal numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """How the results of some forms are compared, on a sample of their elements."""

    expected: Callable[..., Any]
    """From the operands of the problem, as a dict, to fp32 values; on each device."""
    found: Callable[[Any], Any]
    """From the result of a form to the values to compare; on each device."""
    spec: PartitionSpec
    """How both are split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to do a problem; runs on each device, inside `jax.shard_map`.

    Where it is `partitioned`, XLA splits it instead: its function is of global arrays.
    """

    name: str
    """The implementation. Of several forms of one name the fastest counts."""
    function: Callable[..., Any]
    """From the operands to the result. Raises ``NotImplementedError`` if it cannot."""
    operands: tuple[str, ...]
    """Their names. The first is the same in all calls, the others take turns."""
    out_spec: Any
    """How the result is split."""
    check: str
    """Name of the check."""
    partitioned: bool = False
    """Whether XLA's partitioner puts in what communicates."""
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of XLA."""
    state: Callable[[], Any] | None = None
    """Makes what the calls of a program hand on to each other. The function then takes
    it first, and returns it after its result."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What to say of this form in its row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Operands, and forms that are to be compared on them."""

    label: str
    """For messages."""
    mesh: jax.sharding.Mesh
    """The devices."""
    operands: Mapping[str, Operand]
    """By name; drawn at random."""
    derived: Mapping[str, tuple[Callable[..., Any], PartitionSpec]]
    """Further operands, each made on each device from a dict of the drawn ones."""
    forms: Sequence[Form]
    """What to time."""
    checks: Mapping[str, Check]
    """By name."""
    num_sets: int
    """How many sets of operands take turns."""
    seconds: float
    """Estimate of a call, from which the length of the loop follows."""


def on_devices(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Any:
    """`function` of each device as a jitted function of global arrays."""
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
    )


def repeated(
    function: Callable, trips: int, state: Callable[[], Any] | None = None
) -> Callable:
    """Calls ``function(x, *set)`` on each set in turn, ``trips`` times over.

    With `state`, as in `Form`, the calls are ``function(state, x, *set)``.

    Returns:
        ``(x, sets) -> results``: the results of the last turn.
    """
    with_state = function if state else lambda none, *args: (function(*args), none)
    call = jax.jit(with_state)  # traced and lowered once

    def run(x: Any, sets: Sequence[tuple]) -> tuple:
        first = state() if state else None
        shapes = [jax.eval_shape(call, first, x, *operands)[0] for operands in sets]
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tuple(shapes))

        def turn(_: Any, carry: Any) -> Any:
            (x, _, handed_on), results = carry, []
            for operands in sets:
                result, handed_on = call(handed_on, x, *operands)
                x, result = lax.optimization_barrier((x, result))
                results.append(result)
            return x, tuple(results), handed_on

        return lax.fori_loop(0, trips, turn, (x, start, first))[1]

    return run


@dataclasses.dataclass(eq=False)
class Program:
    """A lowered program and, once it is wanted, its compilation."""

    lowered: Any
    text: str
    seconds: float
    """To trace and lower it."""
    options: dict[str, Any]
    """Options of XLA."""
    compiled: Future | None = None

    @property
    def times_algorithms(self) -> bool:
        """Whether XLA uses the GPUs to compile it."""
        if self.options.items() >= CUBLAS_CHOOSES.items():
            return False
        return timing.on_gpu() and PRODUCT in self.text

    def compile(self, pool: ThreadPoolExecutor) -> Future:
        """Begin the compilation, unless it has begun."""
        if self.compiled is None:
            self.compiled = pool.submit(
                timing.compiled, self.lowered, self.seconds, self.options or None
            )
        return self.compiled


@dataclasses.dataclass
class Ready:
    """A form that is being compiled."""

    form: Form
    program: Program
    calls: int


@dataclasses.dataclass
class Prepared:
    """A problem whose programs are being compiled."""

    problem: Problem
    forms: list[Ready]
    refused: Results
    """Why forms have no program, by name."""
    helpers: dict[str, Future]
    """Programs that make operands and compare results."""


def _sharded(problem: Problem, name: str) -> jax.ShapeDtypeStruct:
    made: Any = problem.operands.get(name)
    if made is None:
        drawn = {k: _sharded(problem, k) for k in problem.operands}
        made = jax.eval_shape(_derive(problem, *problem.derived[name]), drawn)
    sharding = NamedSharding(problem.mesh, _spec(problem, name))
    return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)


def _spec(problem: Problem, name: str) -> PartitionSpec:
    drawn = problem.operands.get(name)
    return problem.derived[name][1] if drawn is None else drawn.spec


def _derive(problem: Problem, function: Callable, spec: PartitionSpec) -> Any:
    specs = {name: operand.spec for name, operand in problem.operands.items()}
    return on_devices(problem.mesh, function, (specs,), spec)


def _calls_per_turn(problem: Problem, form: Form) -> int:
    sets = problem.num_sets if len(form.operands) > 1 else 1
    return sets * -(-2 // sets)  # at least two, so that the loop costs little


def program(problem: Problem, form: Form) -> tuple[Any, tuple, int]:
    """The program that times a form.

    Returns:
        The jitted program, shapes of its arguments, and the number of calls in it.
    """
    per_turn = _calls_per_turn(problem, form)
    on_gpu = problem.mesh.devices.flat[0].platform == "gpu"
    wanted = SECONDS / problem.seconds if on_gpu else 2
    trips = max(2, round(wanted / per_turn))
    first, *others = form.operands
    count = problem.num_sets if others else 1
    repeats = per_turn // count
    one = tuple(_spec(problem, name) for name in others)
    out = NamedSharding(problem.mesh, form.out_spec) if form.partitioned else None

    def placed(*operands: Any) -> Any:
        return lax.with_sharding_constraint(form.function(*operands), out)

    def run(x: Any, sets: Any) -> Any:
        function = placed if form.partitioned else form.function
        return repeated(function, trips, form.state)(x, sets * repeats)

    if form.partitioned:
        jitted = jax.jit(run, out_shardings=out)
    else:
        in_specs = _spec(problem, first), (one,) * count
        jitted = on_devices(problem.mesh, run, in_specs, (form.out_spec,) * per_turn)
    shapes = tuple(_sharded(problem, name) for name in others)
    return jitted, (_sharded(problem, first), (shapes,) * count), trips * per_turn


def prepare(problem: Problem, pool: ThreadPoolExecutor) -> Prepared:
    """Lower the forms of a problem and begin to compile what needs no GPU for that.

    Forms that lower to the same program share it.
    """
    ready: list[Ready] = []
    refused: Results = {}
    programs: dict[tuple, Program] = {}
    checked: dict[str, Any] = {}
    for form in problem.forms:
        try:
            start = time.monotonic()
            jitted, arguments, calls = program(problem, form)
            lowered = jitted.lower(*arguments)
            seconds = time.monotonic() - start
        except NotImplementedError as error:
            refused[form.name] = NoMeasurement(f"not supported: {error}")
            continue
        except Exception as error:
            refused[form.name] = failed(error)
            continue
        text = lowered.as_text()
        for options in _choices(form, text):
            new = Program(lowered, text, seconds, options)
            one = programs.setdefault((text, *options.items()), new)
            if not one.times_algorithms:
                one.compile(pool)
            ready.append(Ready(form, one, calls))
        checked[form.check] = lowered, form.out_spec
    return Prepared(problem, ready, refused, _helpers(problem, checked, pool))


def _choices(form: Form, text: str) -> list[dict[str, Any]]:
    """Options of XLA with which a form is compiled."""
    options = dict(form.compiler_options)
    if timing.on_gpu() and PRODUCT in text:
        return [options, options | CUBLAS_CHOOSES]
    return [options]


def _helpers(
    problem: Problem, lowered: Mapping[str, Any], pool: ThreadPoolExecutor
) -> dict[str, Future]:
    """Programs that draw and derive operands, and that compare results.

    Args:
        problem: the problem.
        lowered: the program of one form of each check, by name of the check.
        pool: where they are compiled.
    """
    mesh = problem.mesh
    programs = {f"draw {name}": _drawer(problem, name) for name in problem.operands}
    drawn = {name: _sharded(problem, name) for name in problem.operands}
    for name, (function, spec) in problem.derived.items():
        programs[f"derive {name}"] = _derive(problem, function, spec).lower(drawn)
    specs = {name: operand.spec for name, operand in problem.operands.items()}
    for name, (program, out_spec) in lowered.items():
        check = problem.checks[name]
        expected = on_devices(mesh, check.expected, (specs,), check.spec)
        with jax.default_matmul_precision("highest"):
            programs[f"expected {name}"] = expected.lower(drawn)
        result = jax.tree.map(
            lambda spec, x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            out_spec,
            program.out_info[0],
        )
        found = on_devices(mesh, check.found, (out_spec,), check.spec)
        programs[f"found {name}"] = found.lower(result)
    options = CUBLAS_CHOOSES if timing.on_gpu() else None  # none of them is timed
    return {
        name: pool.submit(program.compile, options)
        for name, program in programs.items()
    }


def _drawer(problem: Problem, name: str) -> Any:
    """Program that draws an operand from a seed; each device draws its part."""
    operand, mesh = problem.operands[name], problem.mesh
    local = NamedSharding(mesh, operand.spec).shard_shape(operand.shape)
    split = {axis for part in operand.spec for axis in _axes(part)}

    def device(seed: jax.Array) -> jax.Array:
        # The bit generator of the hardware: threefry takes seconds to compile.
        random = jax.random.key(seed, impl="rbg")
        for axis in mesh.axis_names:
            if axis in split:  # else every device draws the same
                random = jax.random.fold_in(random, lax.axis_index(axis) + 1)
        return operand.scale * jax.random.normal(random, local, operand.dtype)

    program = on_devices(mesh, device, PartitionSpec(), operand.spec)
    return program.lower(jax.ShapeDtypeStruct((), jnp.int32))


def _axes(part: Any) -> tuple:
    return part if isinstance(part, tuple) else (part,) if part else ()
