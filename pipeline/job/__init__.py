"""The stages of a job, from the manifest to the summary."""
