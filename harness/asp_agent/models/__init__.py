"""Model drivers: one file each; an SDK is imported only when its driver is used."""

from asp.errors import quoted
from asp_agent.errors import ModelSetupError
from asp_agent.messages import Model
from asp_agent.models.retry import RetryPolicy
from asp_agent.models.scripted import ScriptedModel

__all__ = ["DEFAULT_MODEL", "open_model"]

DEFAULT_MODEL = "anthropic/claude-sonnet-5-5"

_KNOWN = "anthropic/NAME, openai/NAME, openai-chat/NAME (with --base-url for other servers), scripted/FILE.json"


def open_model(
    spec: str, *, base_url: str | None = None, retry: RetryPolicy | None = None, effort: str | None = None
) -> Model:
    """Open the model that ``spec`` names as ``provider/name``; nothing is sent yet.

    Known are ``anthropic/NAME``, ``openai/NAME`` (Responses), ``openai-chat/NAME`` (Chat Completions: vLLM, Ollama, llama.cpp,
    LM Studio by ``base_url``) and ``scripted/FILE.json`` (``scripted//abs/path.json`` for an absolute path).
    ``base_url`` replaces the provider's address. ``effort`` (low to max) says how much the model shall think.
    ``retry`` replaces the default policy of 6 tries.

    Raises ModelSetupError: unknown provider, no key, SDK not installed, a bad address, a script that is not valid.
    """
    provider, slash, name = spec.partition("/")
    if not slash or not name:
        message = f"a model is named provider/name, not {quoted(spec)}; known: {_KNOWN}"
        raise ModelSetupError(message)
    policy = retry or RetryPolicy()
    if provider == "scripted":
        if base_url is not None:
            message = "a scripted model calls no API: leave --base-url out"
            raise ModelSetupError(message)
        return ScriptedModel(name, retry=policy)
    if provider == "anthropic":
        return _open_anthropic(name, base_url, policy, effort)
    if provider in {"openai", "openai-chat"}:
        return _open_openai(name, base_url, policy, effort, chat=provider == "openai-chat")
    message = f"unknown model provider {quoted(provider)}; known: {_KNOWN}"
    raise ModelSetupError(message)


def _open_anthropic(name: str, base_url: str | None, retry: RetryPolicy, effort: str | None) -> Model:
    try:
        # Here and not above: the SDK takes 1.6 s to import, and `asp-agent --help` needs none of it.
        from asp_agent.models.anthropic import AnthropicModel  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"anthropic", "httpx2"}:
            raise
    else:
        return AnthropicModel(name, base_url=base_url, retry=retry, effort=effort)
    message = "the anthropic SDK is not installed; install with: pip install 'asp-agent[agent]'"
    raise ModelSetupError(message)


def _open_openai(name: str, base_url: str | None, retry: RetryPolicy, effort: str | None, *, chat: bool) -> Model:
    try:
        from asp_agent.models.openai import OpenAIModel  # noqa: PLC0415 - the SDK takes 0.6 s to import
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"openai", "httpx2"}:
            raise
    else:
        return OpenAIModel(name, chat=chat, base_url=base_url, retry=retry, effort=effort)
    message = "the openai SDK is not installed; install with: pip install 'asp-agent[agent]'"
    raise ModelSetupError(message)
