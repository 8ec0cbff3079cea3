"""The interpreter of one thread of a kernel."""

import functools

import jax
from jax._src import callback
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock
from jax._src.state import discharge
from jax._src.state import types as state_types

from tests.interpreter.inline import find_stand_in, inline
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


_STANDS_FOR = "stands_for"


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


class Interpreter(stock.JaxprInterpreter):
    """The stock interpreter with the operations of ``EXTENSIONS``."""

    def call(self, function, token, **kwargs):
        """Call ``function`` on the host, in order with the thread's other effects."""
        return callback.io_callback(
            function,
            callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            thread=self.thread,
            **kwargs,
        )

    def interpret(self, jaxpr, token, *args):
        # The stock loop hands the token to our code for inline_mgpu only, so our own
        # operations travel as one.
        eqns = [
            eqn.replace(
                primitive=gpu_primitives.inline_mgpu_p, params={_STANDS_FOR: eqn}
            )
            if eqn.primitive in EXTENSIONS
            else eqn
            for eqn in jaxpr.eqns
        ]
        previous = current_interpreter.set(self)
        try:
            return super().interpret(jaxpr.replace(eqns=eqns), token, *args)
        finally:
            current_interpreter.reset(previous)

    def _interpret_inline_mgpu_p(self, eqn, token, get_invals):
        invals = get_invals()
        if _STANDS_FOR in eqn.params:
            original = eqn.params[_STANDS_FOR]
            handler = EXTENSIONS[original.primitive]
            token, out = handler(self, original, token, invals)
            return token, out if original.primitive.multiple_results else [out]
        find_stand_in(eqn.params["mgpu_fn"])  # fail while tracing
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
        return callback.io_callback(
            functools.partial(inline, is_ref=is_ref, counts=counts, eqn=eqn),
            (callbacks.TOKEN_SHAPE_DTYPE, [var.aval for var in eqn.outvars]),
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
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
