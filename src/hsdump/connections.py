"""Connections to servers: how long an idle one is used again."""

from __future__ import annotations

import httpx

KEPT_S = 2.0
"""Servers close a connection that was idle for 5 s (uvicorn's default, and so SGLang's and vLLM's), which is httpx's
own limit as well: a request on a connection of just that age meets its end and fails, although nothing is wrong. Less
than half of that is safe.
"""


def limits(most: int | None = None, kept: int = 64) -> httpx.Limits:
    """Give a client's limits.

    Args:
        most: connections at a time; None for as many as there are requests.
        kept: idle ones at a time.
    """
    return httpx.Limits(max_connections=most, max_keepalive_connections=kept, keepalive_expiry=KEPT_S)
