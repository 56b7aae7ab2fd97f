"""Monarch actors: thin, they translate calls and faults. Nothing here loads torch before a trainer trains."""
