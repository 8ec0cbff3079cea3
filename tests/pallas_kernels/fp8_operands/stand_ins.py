"""Numpy stand-ins for the inline functions of the op; import to register them."""

from tests.interpreter import register_inline


register_inline("transpose_bytes", lambda data: data.T)
