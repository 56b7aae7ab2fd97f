"""Decisions about replicas: launch, restart, hold, stop. Standard library only."""
