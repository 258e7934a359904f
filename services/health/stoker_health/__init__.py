"""Health: looks at devices, proves nodes before work, judges findings, and says whose fault a failure was."""
