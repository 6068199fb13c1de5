"""The policy layer: what the model sees of a tool. No local I/O here, ever (import-linter and ruff check it)."""
