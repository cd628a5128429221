"""A clock for jobs on clusters that are not there."""
