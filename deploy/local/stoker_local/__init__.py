"""The whole system on one machine: a supervisor, the demo, and nothing that production needs."""
