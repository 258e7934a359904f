"""The launcher: makes its node's desired state true, one attempt at a time each, and survives its own death."""
