"""The checkpoint that a job writes to OUTPUT: its assembly, record, card and exports."""
