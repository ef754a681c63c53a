"""Traffic from traces: sent to a running gateway (replay), or played in virtual time by its own decisions (compare)."""
