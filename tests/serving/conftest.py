"""The common fixtures that these tests need, for runs without the other tests (tools/engines.sh)."""

from tests.remote_code import modules_cache

__all__ = ["modules_cache"]
