"""The compression methods. Each is a `Method` in front of pure functions; no method knows another."""
