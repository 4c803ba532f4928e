"""The load generator: scenarios against kvd's own endpoint or any OpenAI-compatible server, what they measured as JSON, and the tables and plots made of it.

It owns the workload's text, the driver, the servers that it starts itself, the statistics of paired runs and the report. It is a client: it never
imports a room of the daemon, and knows no tensors.
"""
