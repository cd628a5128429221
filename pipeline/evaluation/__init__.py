"""Scores of a checkpoint, dense or compressed."""
