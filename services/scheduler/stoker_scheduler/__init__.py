"""The scheduler: who gets which GPUs, as a pure fold of the log and pure decisions on it."""
