"""Tests of the doctor, against gateways that misbehave."""
