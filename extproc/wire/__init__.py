"""The only room that speaks gRPC and Envoy's messages."""
