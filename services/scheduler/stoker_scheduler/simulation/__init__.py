"""The scheduler on simulated nodes and a virtual clock: the very same fold and decisions, without a server."""
