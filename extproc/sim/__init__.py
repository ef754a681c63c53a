"""Traffic from traces, sent or simulated."""
