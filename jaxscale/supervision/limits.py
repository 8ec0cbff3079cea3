"""System limits of a process: open files, and so connections."""

_OTHERS = 256  # files of the process itself, and connections of strangers


def allow_connections(count: int) -> None:
    """Let this process hold `count` connections at once.

    Raises:
        ValueError: the system does not allow it.

    Example:
        >>> allow_connections(8)
        >>> allow_connections(2**40)
        Traceback (most recent call last):
        ...
        ValueError: 1099511627776 connections need as many open files, ...
    """
    import resource  # which not all platforms have

    needed = count + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{count} connections need as many open files, and this machine allows "
            f"{hard} a process; raise the hard limit to {needed} at least (`ulimit -Hn "
            f"{needed}`, LimitNOFILE of systemd, nofile in limits.conf)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
