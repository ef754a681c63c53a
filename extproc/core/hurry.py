"""Whether a time limit that ran out tells of the upstream, or only of a caller in a hurry.

Theory. A caller's deadline may be shorter than a healthy upstream needs. If such timeouts counted, impatient callers
would close an upstream to everybody; if none did, one that has fallen silent would never be seen where every caller has
a deadline. So a limit is held against what is usual there: what gave clearly more than that says that the upstream is
sick, whoever set the limit. Usual is what was learned: the first token's 95th percentile for that model and prompt
size, and for an answer that comes as a whole the time to generate the output expected of it. Until that is known it is
assumed: half of what the settings give a first token, and a common speed for an answer of no more than some length. A
limit of the operator's own always counts.

Deliberately not here: what is learned (baseline, forecast), and which failures are timeouts (flights).
"""

from __future__ import annotations

from math import inf

from extproc.core.request import Request

__all__ = ["ample_s"]

CLEARLY = 2.0
"""What gave so many times the usual was enough."""
UNKNOWN = 0.5
"""Where nothing is known of a first token, so much of its limit was."""
LEAST_S = 1.0
"""In less than that nobody is called silent: a lost packet takes as long."""
ASSUMED_TOKENS, ASSUMED_PER_S = 1_000, 50.0
"""An answer that nothing is known of: it has at most so many tokens, at so many per second."""


def ample_s(request: Request, first_token_s: float, limit_s: float, *, p95_s: float, output_s: float) -> float:
    """Seconds that are enough for an attempt at `request`.

    first_token_s, limit_s: what the settings give a first token, and the attempt where its caller sets no limit. p95_s:
    the usual first token, infinite where that is unknown; output_s: its output usually, 0 where that is.
    """
    seconds = CLEARLY * p95_s if p95_s < inf else UNKNOWN * first_token_s
    if not request.stream:
        assumed_s = min(request.size.output, ASSUMED_TOKENS) / ASSUMED_PER_S
        seconds += CLEARLY * output_s if output_s else assumed_s
    return min(limit_s, max(LEAST_S, seconds))
