"""Requests over gRPC."""
