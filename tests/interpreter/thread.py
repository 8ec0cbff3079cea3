"""The interpreter of one thread of a kernel."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import core as jax_core
from jax._src.pallas import mpmd
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock
from jax._src.state import discharge
from jax._src.state import primitives as state_primitives
from jax._src.state import types as state_types

from tests.interpreter.arithmetic import evaluate, of_type
from tests.interpreter.inline import inline
from tests.interpreter.operations import (
    current_interpreter,
    interpret_accumulator_store,
    interpret_get_global,
    interpret_run_state,
    interpret_semaphore_signal,
    interpret_semaphore_wait,
    interpret_wgmma_wait,
    is_semaphore,
    resolve_ref,
    wgmma,
    wgmma_wait,
)


EXTENSIONS = {
    pallas_primitives.semaphore_signal_p: interpret_semaphore_signal,
    pallas_primitives.semaphore_wait_p: interpret_semaphore_wait,
    pallas_primitives.get_global_p: interpret_get_global,
    gpu_primitives.semaphore_signal_p: interpret_semaphore_signal,
    gpu_primitives.semaphore_wait_p: interpret_semaphore_wait,
    gpu_primitives.wgmma_wait_p: interpret_wgmma_wait,
    gpu_primitives.wgmma_accumulator_store_p: interpret_accumulator_store,
    discharge.run_state_p: interpret_run_state,
}
# Methods of the stock interpreter that take the equation, the token and how to get the
# values.
STOCK = {
    state_primitives.get_p: "get",
    gpu_primitives.load_p: "get",
    state_primitives.swap_p: "swap",
    pallas_primitives.run_scoped_p: "run_scoped",
    mpmd.mpmd_map_p: "mpmd_map",
    gpu_primitives.barrier_wait_p: "barrier_wait",
    gpu_primitives.barrier_arrive_p: "barrier_arrive",
    gpu_primitives.copy_gmem_to_smem_p: "copy_gmem_to_smem",
    gpu_primitives.wgmma_ref_p: "wgmma_ref",
    gpu_primitives.wgmma_accumulator_deref_p: "wgmma_accumulator_deref",
    gpu_primitives.wait_smem_to_gmem_p: "wait_smem_to_gmem",
    gpu_primitives.commit_smem_p: "commit_smem",
    gpu_primitives.inline_mgpu_p: "inline_mgpu",
    lax.cond_p: "cond",
    lax.scan_p: "scan",
    lax.while_p: "while",
}
NOTHING = {
    gpu_primitives.commit_group_p,
    gpu_primitives.set_max_registers_p,
    gpu_primitives.async_prefetch_p,
}
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class Interpreter(stock.JaxprInterpreter):
    """Runs the equations of one thread on numpy values.

    Memory is the stock interpreter's, arithmetic numpy's, loops are Python's, and
    ``EXTENSIONS`` are the operations that the stock interpreter lacks.
    """

    def call(self, function, token, **kwargs):
        """Call ``function`` for this thread."""
        return function(token=token, thread=self.thread, **kwargs)

    def interpret(self, jaxpr, token, *args):
        variables = jaxpr.all_invars
        if len(args) < len(variables):  # the caller may hand the constants over
            args = (*jaxpr.consts, *args)
        env = dict(zip(variables, args, strict=True))

        def read(atom) -> Any:
            if isinstance(atom, jax_core.Literal):
                return of_type(atom.val, atom.aval)
            return env[atom]

        previous = current_interpreter.set(self)
        try:
            for eqn in jaxpr.eqns:
                token, out = self._run(eqn, token, [read(atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, out, strict=True))
        finally:
            current_interpreter.reset(previous)
        return token, [read(atom) for atom in jaxpr.outvars]

    def _run(self, eqn, token, values) -> tuple[Any, list]:
        """The outputs of one equation."""
        primitive = eqn.primitive
        if primitive in NOTHING:
            return token, []
        if primitive is lax.axis_index_p:
            return token, [self._interpret_axis_index_p(eqn)]
        if primitive is pallas_primitives.program_id_p:
            return token, [np.int32(0)]  # blocks of pallas_call have a grid of one
        if primitive is gpu_core.layout_cast_p:
            return token, values
        if primitive.name in CALLS:
            return self.interpret(eqn.params[CALLS[primitive.name]], token, *values)
        if primitive in EXTENSIONS:
            token, out = EXTENSIONS[primitive](self, eqn, token, values)
        elif primitive in STOCK:
            method = getattr(self, f"_interpret_{STOCK[primitive]}_p")
            token, out = method(eqn, token, lambda: values)
        elif primitive is gpu_primitives.copy_smem_to_gmem_p:
            token, out = self._interpret_copy_smem_to_gmem_p(
                eqn, token, *values, **eqn.params
            )
        else:
            return token, evaluate(eqn, values)
        return token, out if primitive.multiple_results else [out]

    def _interpret_cond_p(self, eqn, token, get_invals):
        which, *values = get_invals()
        branches = eqn.params["branches"]
        which = min(max(int(which), 0), len(branches) - 1)
        return self.interpret(branches[which], token, *values)

    def _interpret_scan_p(self, eqn, token, get_invals):
        length, jaxpr = eqn.params["length"], eqn.params["jaxpr"]
        consts, carry, xs = map(list, eqn.params["ft_in"].update(get_invals()).unpack())
        steps, columns = range(length), []
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            token, out = self.interpret(
                jaxpr, token, *consts, *carry, *(x[i] for x in xs)
            )
            carry, row = map(list, eqn.params["ft_out"].update(out).unpack())
            columns.append(row)
        if eqn.params["reverse"]:
            columns.reverse()
        ys = [np.stack(column) for column in zip(*columns, strict=True)]
        return token, carry + ys

    def _interpret_while_p(self, eqn, token, get_invals):
        values, params = get_invals(), eqn.params
        count = params["cond_nconsts"]
        cond_consts, values = values[:count], values[count:]
        count = params["body_nconsts"]
        body_consts, carry = values[:count], values[count:]
        while True:
            token, (again,) = self.interpret(
                params["cond_jaxpr"], token, *cond_consts, *carry
            )
            if not again:
                return token, carry
            token, carry = self.interpret(
                params["body_jaxpr"], token, *body_consts, *carry
            )

    def _interpret_inline_mgpu_p(self, eqn, token, get_invals):
        invals = get_invals()
        count = eqn.params["pytree_args"].num_leaves
        transforms = jax.tree.unflatten(
            eqn.params["pytree_ref_transforms"], invals[count:]
        )
        is_ref = tuple(
            isinstance(var.aval, state_types.AbstractRef) for var in eqn.invars[:count]
        )
        # How many semaphores each argument names.
        counts = tuple(
            var.aval.size if ref and is_semaphore(var.aval) else 0
            for var, ref in zip(eqn.invars[:count], is_ref, strict=True)
        )
        args = [
            resolve_ref(var.aval, value, path) if ref else value
            for var, value, path, ref in zip(
                eqn.invars[:count], invals[:count], transforms, is_ref, strict=True
            )
        ]
        return self.call(
            functools.partial(inline, is_ref=is_ref, counts=counts, eqn=eqn),
            token,
            mesh_location=self.mesh_location,
            args=args,
        )

    def _interpret_wgmma_ref_p(self, eqn, token, get_invals):
        acc, a, b, *leaves = get_invals()
        empty = jax.tree.structure([])
        paths = jax.tree.unflatten(
            jax.tree_util.treedef_tuple(
                eqn.params[f"{operand}_transforms_tree"] or empty
                for operand in ("acc", "a", "b")
            ),
            leaves,
        )
        a_is_ref = isinstance(eqn.invars[1].aval, state_types.AbstractRef)
        acc, a, b = (
            resolve_ref(var.aval, value, path) if i != 1 or a_is_ref else value
            for i, (var, value, path) in enumerate(
                zip(eqn.invars[:3], (acc, a, b), paths, strict=True)
            )
        )
        return self.call(
            functools.partial(wgmma, source_info=eqn.source_info, a_is_ref=a_is_ref),
            token,
            mesh_location=self.mesh_location,
            acc=acc,
            a=a,
            b=b,
        ), []

    def _interpret_wgmma_accumulator_deref_p(self, eqn, token, get_invals):
        waited = functools.partial(wgmma_wait, n=eqn.params["wait_n"] or 0)
        return super()._interpret_wgmma_accumulator_deref_p(
            eqn, self.call(waited, token), get_invals
        )
