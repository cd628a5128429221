"""The compression methods. Each file is pure functions behind one `Method`; none knows another."""
