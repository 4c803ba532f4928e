"""Structured output: constraints compiled off the engine thread, and which tokens they allow next. Knows ids and bytes, never a request, a step or a tensor."""
