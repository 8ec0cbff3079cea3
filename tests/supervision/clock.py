"""The driver's clock of deadlines, in the hands of a test.

On a busy host a process that is well may be silent for longer than any deadline that a
test can wait for. So the clock stands still, until what a deadline is for has happened.
"""

from collections.abc import Awaitable, Callable

from jaxscale.supervision.driver import Driver


_TAKE = Driver._take


def goes_while(is_due: Callable[[Driver], bool]) -> Callable[[Driver], Awaitable[None]]:
    """`Driver._take` of a driver whose clock goes while `is_due` alone."""

    async def taken(self: Driver) -> None:
        before = self._now
        await _TAKE(self)
        if not is_due(self):
            self._now = before

    return taken
