"""A step of JAX's layout inference without its sort, which prints whole kernels.

JAX 0.11 infers the layouts of a kernel's values from equations between them. It sorts
the values that are equal by their names, and to name one it prints an operation with
all that is inside: two fifths of the time in which a kernel is lowered. The order does
not matter to the layouts; here it is that of the equations.
"""

from jax.experimental.mosaic.gpu import constraints
from jax.experimental.mosaic.gpu.constraints import Equals, Variable


named = constraints.compute_transitively_equal_vars
"""What JAX does, by names."""


def equal_variables(
    system: constraints.ConstraintSystem,
) -> dict[Variable, list[Variable]]:
    """The other variables that equations make equal to each variable of one."""
    groups: dict[Variable, list[Variable]] = {}
    for constraint in system.constraints:
        match constraint:
            case Equals(lhs=Variable() as left, rhs=Variable() as right):
                group, other = (groups.setdefault(v, [v]) for v in (left, right))
                if group is not other:
                    group += other
                    groups |= dict.fromkeys(other, group)
    return {
        variable: [other for other in group if other is not variable]
        for group in {id(group): group for group in groups.values()}.values()
        for variable in group
    }


def install() -> None:
    """Have JAX call `equal_variables`."""
    constraints.compute_transitively_equal_vars = equal_variables
