"""The gateway: the HTTP API that agents and people use, and the read model behind it."""
