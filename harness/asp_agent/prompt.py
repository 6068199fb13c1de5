"""What the model is told before the task. Of the environment only what the sandbox itself says (L6)."""

from asp.terminal import printable
from asp.transport import Transport

LOOK_TIMEOUT_S = 30
_FACT_CHARACTERS = 200

# One harmless command that also proves, before the first model call costs anything, that commands run there at all.
LOOK = r"""printf 'directory=%s\n' "$PWD"
printf 'system=%s\n' "$(uname -s -m 2>/dev/null)"
printf 'distribution=%s\n' "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null | tr -d '"')"
printf 'user=%s\n' "$(id -un 2>/dev/null)"
"""

_PROMPT = """\
You are a careful software engineer. You work on the files below the working directory, with the tools that you are
given, until the task is done.

- Look before you change: read the files that matter first, and keep each change as small as the task allows.
- After a change, run what shows that it works: the tests, the program, a check. Believe the result, not the plan.
- Each command runs in a fresh shell in the working directory: `cd` and variables do not last to the next one.
- If a tool result is an error, read it and change what you do; do not repeat the same call.
- If you cannot do the task, say so and say why. Never claim a check that you did not run.
- When the task is done, answer without a tool call: in a few sentences, what you did and how it was checked.

Environment:
"""


async def look(transport: Transport) -> dict[str, str]:
    """Ask the sandbox for the facts that the prompt states. Raises TransportError if no command can run there."""
    result = await transport.exec(LOOK, timeout_s=LOOK_TIMEOUT_S)
    pairs = (line.partition("=") for line in result.stdout.decode("utf-8", "replace").splitlines())
    return {name: printable(value, newlines=False)[:_FACT_CHARACTERS] for name, _, value in pairs if value}


def system_prompt(facts: dict[str, str], workspace: str) -> str:
    """Return the system prompt: the rules of work and the environment."""
    lines = [f"- Working directory: {facts.get('directory', workspace)}"]
    for name, label in (("system", "System"), ("distribution", "Distribution"), ("user", "User")):
        if name in facts:
            lines.append(f"- {label}: {facts[name]}")
    return _PROMPT + "\n".join(lines) + "\n"
