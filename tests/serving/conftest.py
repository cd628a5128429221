"""What these tests need of the fixtures of all, for runs without the rest (tools/engines.sh)."""

from tests.remote_code import modules_cache

__all__ = ["modules_cache"]
