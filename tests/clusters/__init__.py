"""Scenarios that need clusters of their own. Ray is a global: each runs in a process of its own."""
