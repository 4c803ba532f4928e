"""Logging set-up and failpoints. Never changes what the daemon does."""
