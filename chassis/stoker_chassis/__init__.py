"""The ground every service stands on: event log, stores, leader loop, hosting, devices, warm worker."""
