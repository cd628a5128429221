"""Checks of OUTPUT against its compression record and its source."""
