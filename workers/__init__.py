"""Runs units of work: one layer on a device, the Ray actors and their pool."""

PROJECT = "Lamina"
