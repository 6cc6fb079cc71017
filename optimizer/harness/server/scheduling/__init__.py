"""Scheduling of requests: queue, batches, slots, and the threads that run the model."""
