"""Envoy configuration from Settings."""
