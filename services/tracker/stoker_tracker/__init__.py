"""The tracker: every job has its MLflow run, exact whatever is killed, and owned by the platform."""
