"""Offline measurement: latency, throughput, and how near a step comes to the memory's speed."""
