"""asp: the Agent Sandbox Protocol. The brain stays here, every tool call runs in a sandbox over SSH."""
