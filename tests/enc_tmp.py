import jax, jax.numpy as jnp, sys
from jax.sharding import SingleDeviceSharding
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.pallas_kernels.encode_layer.test_encode_layer import *
def prog(devices, m, d, f, heads):
    where = SingleDeviceSharding(devices[0])
    arrays = jax.eval_shape(lambda: operands(m, d, f, (d,)*3 if heads else (), attended=d))
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape,x.dtype,sharding=where), arrays)
    def g(*arrays):
        with use_device(H200): return run(arrays, "mosaic_gpu")
    return jax.jit(g), arrays
if __name__=="__main__":
    from pallas_kernels.encode_layer.config import *
    for m in (128,144,160,192,224,256,304,512,688,1024):
        s=Schedule(problem=Problem(m=m,attended=768,d_model=768,d_ff=3072,heads=(768,)*3,dtype=jnp.dtype(jnp.bfloat16)),device=H200)
        print(m,[(st.weights[0],st.config.tile_n,st.parts,st.count,st.steps) for st in s.stages],s.ring.config.stages,s.smem_bytes)
    for m in (256,688):
        c=compile_for_h200(prog,m,768,3072,True)
        print(m,c.thunks,[(k.name,k.registers,k.spilled) for k in c.kernels],c.serialized)
