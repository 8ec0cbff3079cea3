"""Settings of the HTTP server."""

import dataclasses
import re

from jaxscale.checks import check_integers, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Access to the server, and limits on requests.

    Example:
        >>> ServerConfig(max_prompts=0)
        Traceback (most recent call last):
        ...
        ValueError: max_prompts 0 must be an integer of at least 1
    """

    api_keys: tuple[str, ...] = ()
    """API keys; requests must send one as ``Authorization: Bearer KEY``. Empty accepts
    every request. Clients with different keys get equal shares of the engine."""
    allowed_hosts: tuple[str, ...] | None = None
    """Accepted values of the ``Host`` header, ``"*"`` for any. None is the names of
    this machine if the server listens on loopback alone, against DNS rebinding,
    otherwise any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that may send requests from a browser (CORS), as ``https://a.example``;
    ``"*"`` for any."""
    isolate_clients: bool = False
    """Share the prefix cache only among requests with the same API key, so that
    response times tell nobody what others have asked."""
    allow_priority: bool = False
    """Let requests choose their priority; otherwise any but 0 is refused."""
    allow_trace: bool = False
    """Let clients record what the engine does in each step; otherwise ``/live/trace``
    is refused."""
    max_body_bytes: int = 16 * 2**20
    """Maximum size of a request body, in bytes."""
    max_prompts: int = 256
    """Maximum number of prompts, or of texts to score, per request."""
    max_inputs: int = 2048
    """Maximum number of texts to embed per request."""
    strict_schemas: bool = False
    """Refuse JSON schemas that cannot be enforced in full; otherwise the rest is
    ignored, and the response lists it in ``x-jaxscale-ignored``."""
    max_choices: int = 512
    """Maximum number of completions per request: prompts times n."""
    header_seconds: float = 20.0
    """Timeout for receiving the headers of a request."""
    body_seconds: float = 60.0
    """Timeout for receiving its body."""
    stall_seconds: float = 60.0
    """Time after which a client that does not read its response is disconnected."""
    heartbeat_seconds: float = 15.0
    """Time after which an idle stream gets a comment, so that gateways keep it open."""
    drain_seconds: float = 60.0
    """Time that running requests have to finish after SIGTERM."""
    tls_certificate: str | None = None
    """File with the certificate chain (PEM); the server then speaks HTTPS."""
    tls_key: str | None = None
    """File with the private key of the certificate; None: it is in the same file."""
    max_connections: int = 4096
    """Maximum number of open connections; more are answered with 503."""

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
