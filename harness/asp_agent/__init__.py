"""asp_agent: the agent. Loop, tools (policy layer), models, run folder. It never runs anything on this machine."""
