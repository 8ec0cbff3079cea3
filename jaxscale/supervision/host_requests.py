"""Requests of a driver to the hosts of its job, which wait for the answers.

Each function takes `until`, which processes the executors' messages until a condition
holds, or for a number of seconds.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

from jaxscale.supervision import protocol
from jaxscale.supervision.hosts import ConnectedHost, Hosts


type Until = Callable[[Callable[[], bool], float], Awaitable[None]]


async def stacks_of(hosts: Hosts, until: Until, seconds: float) -> dict[int, str]:
    """The stacks of the ranks; empty for those that do not answer."""
    asked = [host for host in hosts if host.ranks]
    for host in asked:
        host.stacks = {}
        host.send(protocol.Stacks())
    before = -1
    # Nobody counts as silent while the answers of a large job still arrive.
    while before < (before := sum(len(host.stacks) for host in asked)):
        await until(
            lambda: all(
                len(h.stacks) >= len(h.ranks) or _is_gone(h, hosts) for h in asked
            ),
            seconds,
        )
    return {rank: text for host in asked for rank, text in host.stacks.items()}


async def kill_ranks(
    hosts: Hosts, until: Until, seconds: float, report: Callable[[str], None]
) -> None:
    """Kill all ranks; an executor that does not respond is dropped."""
    busy = list(hosts)
    for host in busy:
        host.port = None
        host.send(protocol.Kill())
    await until(
        lambda: all(host.port is not None or _is_gone(host, hosts) for host in busy),
        seconds,
    )
    for host in busy:
        if host.port is None and not _is_gone(host, hosts):
            report(f"the executor of {host.name} is dropped: it is silent")
            hosts.drop(host)


async def failing_hosts(
    hosts: Hosts,
    until: Until,
    seconds: float,
    *,
    names: Collection[str],
    command: Sequence[str],
    directory: str,
) -> dict[str, str]:
    """Run the self-check on hosts: the names of those that fail, and why."""
    asked = [host for host in hosts if host.name in names]
    for host in asked:
        host.diagnosis = None
        host.send(
            protocol.Diagnose(
                command=list(command), directory=directory, seconds=seconds
            )
        )
    await until(
        lambda: all(h.diagnosis is not None or _is_gone(h, hosts) for h in asked),
        seconds + 5,
    )
    failed = {}
    for host in asked:
        found = host.diagnosis
        # Without its executor nothing is known of a host; it may come back.
        if not _is_gone(host, hosts) and (found is None or found.code != 0):
            text = "no answer" if found is None else found.text.strip()
            code = f"code {found and found.code}"
            failed[host.name] = (text.splitlines() or [code])[-1]
    return failed


def _is_gone(host: ConnectedHost, hosts: Hosts) -> bool:
    return hosts.get(host.name) is not host
