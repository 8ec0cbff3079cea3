"""How long plans take, so that the next one reaches the device just in time."""

from collections.abc import Hashable


_SLACK = 0.0005  # seconds, beside twice what the host needs
_NEWEST = 0.2  # weight of the newest measurement
_LATE = 0.9  # of an estimate that was too long
_QUIET = 1.0  # seconds without a request, after which none is expected


class Pace:
    """Measured times of plans on the device, and of the host between them.

    A plan that is launched when the device has just begun with the one before cannot
    hold who arrives meanwhile. One that is launched just before the other ends can, and
    the device goes on without a gap.

    Example:
        >>> pace = Pace()
        >>> for _ in range(99):
        ...     pace.planned(0.001)
        ...     pace.ended("decode", 1, 0.010, waited=True)
        >>> round(pace.spare("decode"), 4), pace.device_bound
        (0.0075, True)
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seconds: dict[Hashable, float] = {}
        self._host = self._step = 0.0
        self._arrival: float | None = None

    def arrived(self, now: float) -> None:
        """Note a request."""
        self._arrival = now

    def planned(self, seconds: float) -> None:
        """Note what a plan took the host, until it was launched."""
        self._host = _mixed(self._host, seconds)

    def ended(
        self, kind: Hashable, steps: int, seconds: float, *, waited: bool
    ) -> None:
        """Note the end of a plan.

        Args:
            kind: Plans of a kind take the device about as long.
            steps: Of decoding.
            seconds: From its beginning on the device until its results were seen.
            waited: The host has waited for them; otherwise they were there before.
        """
        known = self._seconds.get(kind, 0.0)
        found = _mixed(known, seconds) if waited else min(known * _LATE, seconds)
        self._seconds[kind] = found
        self._step = _mixed(self._step, found / steps)

    def spare(self, kind: Hashable) -> float:
        """Seconds that the host has until it must plan the next, from the beginning of
        a plan on the device; 0 or less for none.
        """
        return self._seconds.get(kind, 0.0) - 2 * self._host - _SLACK

    @property
    def device_bound(self) -> bool:
        """Whether the host is done with a plan in half a step of the device."""
        return self._host > 0 and self._step > 2 * self._host

    def expects(self, now: float) -> bool:
        """Whether requests have come lately."""
        return self._arrival is not None and now - self._arrival < _QUIET


def _mixed(known: float, newest: float) -> float:
    return newest if not known else known + _NEWEST * (newest - known)
