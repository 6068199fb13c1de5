"""asp_sandboxes: provisioning, done by a person or an orchestrator, never by the agent."""
