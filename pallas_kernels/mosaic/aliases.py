"""Names for what Pallas gives no type to."""

from typing import Any


type Ref = Any
"""A reference to global or shared memory, a barrier or an accumulator."""

type Scalar = Any
"""A number that a kernel computes with: an int32 of the device, or an `int`."""
