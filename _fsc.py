import sys
from tests.compiled import compile_for_h200
from tests.registers import kernels
if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = compile_for_h200(kernels, "decode_layer", name)
        print(name, found.kernels, found.thunks, found.count("copy"), found.count("transpose"), found.serialized, flush=True)
