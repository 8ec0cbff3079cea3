"""Settings of the HTTP server."""

import dataclasses
import re

from jaxscale.checks import check_integers, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Who may call the server, and how much a call may ask for.

    Example:
        >>> ServerConfig(max_prompts=0)
        Traceback (most recent call last):
        ...
        ValueError: max_prompts 0 must be an integer of at least 1
    """

    api_keys: tuple[str, ...] = ()
    """Keys of which a call must show one as ``Authorization: Bearer KEY``; none lets
    everyone in. Clients with different keys get equal shares of the engine."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names by which calls may ask for the server, in their ``Host``; ``"*"`` is any.
    None is this machine's own where it listens at loopback alone, so that no page of
    another site reaches it by a name that was made to mean this machine; else any."""
    allowed_origins: tuple[str, ...] = ()
    """Sites whose pages may call from a browser (CORS), as ``https://a.example``;
    ``"*"`` is any."""
    isolate_clients: bool = False
    """Let clients find only their own prompts in the cache, so that none learns from
    the clock what others have asked; beginnings that they share are computed again."""
    allow_priority: bool = False
    """Let calls choose their priority; otherwise any but 0 is refused."""
    max_body_bytes: int = 16 * 2**20
    """Most bytes of the body of a call."""
    max_prompts: int = 256
    """Most prompts of one call, or texts to score."""
    max_inputs: int = 2048
    """Most texts of one call to embed."""
    strict_schemas: bool = False
    """Refuse schemas of which something cannot be enforced; otherwise that is left
    aside, and the answer says so in ``x-jaxscale-ignored``."""
    max_choices: int = 512
    """Most continuations of one call: prompts times n."""
    header_seconds: float = 20.0
    """Time in which the head of a call must be here."""
    body_seconds: float = 60.0
    """Time in which its body must be here."""
    stall_seconds: float = 60.0
    """Time after which a client is given up that does not read what it is sent."""
    heartbeat_seconds: float = 15.0
    """Time after which a stream without news gets a comment, so that gateways keep it
    open."""
    drain_seconds: float = 60.0
    """Time that running calls have to end after SIGTERM."""
    tls_certificate: str | None = None
    """A file with a certificate and those that vouch for it (PEM): calls come by
    https."""
    tls_key: str | None = None
    """A file with its key; None: it is in the same file."""
    max_connections: int = 4096
    """Most open connections; more are answered with 503."""

    def __post_init__(self) -> None:
        counts = ("max_body_bytes", "max_prompts", "max_choices", "max_connections")
        check_integers(self, 1, "max_inputs")
        check_integers(self, 1, *counts)
        times = ("header_seconds", "body_seconds", "stall_seconds")
        check_positive(self, *times, "heartbeat_seconds", "drain_seconds")
        object.__setattr__(self, "api_keys", tuple(self.api_keys))
        for name in ("allowed_hosts", "allowed_origins"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(given))
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(
                    f"allowed_origins holds {origin!r}, expected '*' or the origin of "
                    "a site, as https://a.example, without a path"
                )
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key needs a tls_certificate; give both")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise ValueError(
                    "api_keys holds one that is empty or has characters outside of "
                    "printable ASCII, which no header can carry"
                )
