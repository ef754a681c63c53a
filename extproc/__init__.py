"""Tidegate: admits, queues or sheds LLM traffic behind Envoy, counting in tokens."""
