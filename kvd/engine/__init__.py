"""The loop: owns time and order of the steps. Never decides what runs (scheduler), where it lies (cache) or how it is computed (executor)."""
