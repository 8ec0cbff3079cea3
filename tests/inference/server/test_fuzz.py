"""A few hundred of the calls of `fuzz`; by hand it makes as many as one likes."""

import asyncio

from tests.inference.server.endpoints.test_encoders import served
from tests.inference.server.fuzz import drawn, fuzz


def test_calls_that_nobody_would_write():
    statuses = asyncio.run(fuzz(drawn(300, 1), served()))
    assert statuses[200] > 60 and statuses[400] > 60
    assert statuses[None] > 5  # their clients have left
