"""The policy layer: what the model sees of a tool. No local I/O here, ever (import-linter and ruff check it)."""

from asp_agent.tools.bash import BASH
from asp_agent.tools.edit import EDIT
from asp_agent.tools.read import READ
from asp_agent.tools.tool import Tool
from asp_agent.tools.write import WRITE

DEFAULT_TOOLS: tuple[Tool, ...] = (READ, WRITE, EDIT, BASH)
"""The tools that a run has unless told otherwise (T1)."""
