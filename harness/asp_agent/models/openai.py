"""OpenAI's models over the Responses API, and every server that speaks Chat Completions (vLLM, Ollama, llama.cpp, LM Studio).

As in the Anthropic driver the SDK only sends the request; the server-sent events are read here, and no exception of the SDK
is behind one of ours. Nothing is stored on the server's side (``store=False``): what a model reasoned comes back to it as its
own, encrypted items.
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, cast

import httpx2
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AsyncStream,
    DefaultAsyncHttpxClient,
    OpenAIError,
    Timeout,
)

from asp.errors import quoted
from asp_agent.errors import ContextFull, ModelError, ModelRefused, ModelSetupError
from asp_agent.messages import ModelEvent, Request, TextDelta, TurnDone
from asp_agent.models.anthropic_wire import BadStream, EventLines, encodable
from asp_agent.models.openai_wire import ChatAnswer, ErrorEvent, ResponsesAnswer, chat_messages, responses_input
from asp_agent.models.retry import AttemptFailed, RetryPolicy, may_pass_later, retry_after_s

READ_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 10.0
NO_KEY = "none"
"""What is sent to a server of one's own that asks for no key; the SDK wants one."""

_KEY_LINE = "export OPENAI_API_KEY=..."
_OVERFLOW = re.compile(
    r"context_length_exceeded|maximum context length|context.{0,20}exceed"
    r"|exceed\w* (the |this )?(model's )?(available |maximum )?context"
    r"|prompt is too long|greater than the context length|input is too long",
    re.IGNORECASE,
)
_HOPELESS = re.compile("insufficient_quota", re.IGNORECASE)
_PASSING = {408: "timed out", 429: "rate limited", 504: "timed out"}
_SHORTEST_SECRET = 4


class OpenAIModel:
    """One model behind one of the two APIs. One connection pool; may be asked by several tasks at once."""

    def __init__(
        self,
        name: str,
        *,
        chat: bool = False,
        base_url: str | None = None,
        effort: str | None = None,
        retry: RetryPolicy | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """Take the key where the SDK finds it (OPENAI_API_KEY). A Chat server with an address of its own needs none.

        Raises ModelSetupError: no key, a key that cannot be in a header, an address that is none.
        """
        self.name = f"{'openai-chat' if chat else 'openai'}/{name}"
        self.scripted = False
        self._chat, self._model, self._effort = chat, str(encodable(name)), effort
        self._source = ("openai", "chat" if chat else "responses", name)
        self._retry = retry or RetryPolicy()
        self._read_timeout_s = read_timeout_s
        problem = ""
        try:
            timeout = Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
            http_client = DefaultAsyncHttpxClient(timeout=timeout)
            self._client = self._open(base_url, timeout, http_client, free=chat and base_url is not None)
        except OpenAIError as error:
            problem = f"no API key for {self.name}; set one: {_KEY_LINE}"
            if "api_key" not in str(error):
                problem = f"the openai SDK cannot be set up: {quoted(str(error))}"
        except (httpx2.InvalidURL, ImportError, ValueError) as error:
            problem = f"the openai SDK cannot be set up: {quoted(str(error))}"
        if problem:  # raised out here: nothing of the SDK's exception stays behind ours
            raise ModelSetupError(problem)
        url, key = self._client.base_url, self._client.api_key
        if url.scheme not in {"http", "https"} or not url.host:
            message = "the model's address (--base-url or OPENAI_BASE_URL) is not an http:// or https:// address"
            raise ModelSetupError(message)
        if not key.isascii() or not key.isprintable() or " " in key:
            message = "OPENAI_API_KEY holds a space, a line break or another character that no key has; set it again"
            raise ModelSetupError(message)

    @staticmethod
    def _open(base_url: str | None, timeout: Timeout, http_client: DefaultAsyncHttpxClient, *, free: bool) -> AsyncOpenAI:
        try:
            return AsyncOpenAI(base_url=base_url, max_retries=0, timeout=timeout, http_client=http_client)
        except OpenAIError:
            if not free:
                raise
        return AsyncOpenAI(base_url=base_url, max_retries=0, timeout=timeout, http_client=http_client, api_key=NO_KEY)

    def secrets(self) -> Sequence[str]:
        """Return the key, and a password in the address."""
        values = {self._client.api_key, self._client.base_url.password} - {NO_KEY, ""}
        return tuple(sorted(value for value in values if value))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    def stream(self, request: Request) -> AsyncGenerator[ModelEvent, None]:
        """Ask and yield events; the last one is TurnDone. See :class:`asp_agent.messages.Model` for what it raises."""
        return self._retry.stream(self.name, lambda: self._attempt(request))

    async def _attempt(self, request: Request) -> AsyncGenerator[TextDelta | TurnDone, None]:
        answer = ChatAnswer(self._source) if self._chat else ResponsesAnswer(self._source)
        try:
            async with aclosing(self._read(request, answer)) as pieces:
                async for piece in pieces:
                    yield TextDelta(piece)
            turn = answer.turn()
        except (OpenAIError, httpx2.HTTPError, BadStream, ErrorEvent, UnicodeEncodeError) as error:
            failure = self._explain(error)
        else:
            yield TurnDone(turn)
            return
        raise failure  # outside of the handler, so that no SDK exception is its context

    async def _read(self, request: Request, answer: ChatAnswer | ResponsesAnswer) -> AsyncGenerator[str, None]:
        """Ask, fill ``answer`` and yield its text as it comes, to the end of the stream: figures come last."""
        stream = await self._send(request)
        chunks = stream.response.aiter_bytes()
        lines = EventLines()
        try:
            async for chunk in chunks:
                for event in lines.feed(chunk):
                    if text := answer.add(event):
                        yield text
                if answer.ended:
                    return
        finally:
            await stream.close()
            with suppress(httpx2.HTTPError, httpx2.StreamError):
                async for _ in chunks:
                    break

    async def _send(self, request: Request) -> AsyncStream[Any]:
        tools = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in request.tools]
        more: dict[str, Any] = {}
        if self._chat:
            if tools:
                more["tools"] = [{"type": "function", "function": tool} for tool in tools]
            if self._effort:
                more["reasoning_effort"] = self._effort
            messages = encodable(chat_messages(request.system, request.history))
            return cast("AsyncStream[Any]", await self._client.chat.completions.create(
                model=self._model, messages=messages, stream=True, stream_options={"include_usage": True}, **more,
            ))  # fmt: skip
        if tools:
            more["tools"] = [{"type": "function", "strict": False, **tool} for tool in tools]
        if self._effort:
            more["reasoning"] = {"effort": self._effort}
        if request.system.strip():
            more["instructions"] = encodable(request.system)
        return cast("AsyncStream[Any]", await self._client.responses.create(
            model=self._model, input=encodable(responses_input(request.history, self._source)), stream=True, store=False,
            include=["reasoning.encrypted_content"], **more,
        ))  # fmt: skip

    def _explain(self, error: Exception) -> ModelError:
        """Name what went wrong in one try."""
        host = self._client.base_url.host
        match error:
            case APIStatusError():
                body = error.body
                said = cast("dict[str, Any]", body).get("message") if isinstance(body, dict) else body
                code = f"{error.code or ''} {error.type or ''}"
                return self._failure(error.status_code, said or error.message, error.response.headers, code)
            case ErrorEvent():
                status = error.status or (429 if "rate_limit" in error.code else 400 if "invalid" in error.code else 500)
                return self._failure(400 if _OVERFLOW.search(error.code) else status, error.said, {}, error.code)
            case BadStream():
                return AttemptFailed(str(error))
            case APITimeoutError() if isinstance(error.__cause__, httpx2.ConnectTimeout):
                return AttemptFailed(f"no connection to {host} in {CONNECT_TIMEOUT_S:g} s")
            case APITimeoutError() | httpx2.TimeoutException():
                return AttemptFailed(f"nothing came from {host} for {self._read_timeout_s:g} s")
            case APIConnectionError() if isinstance(error.__cause__, httpx2.LocalProtocolError):
                return ModelSetupError("a request header cannot be sent; look at OPENAI_CUSTOM_HEADERS")
            case APIConnectionError() | httpx2.HTTPError():
                return AttemptFailed(f"the connection to {host} failed: {self._foreign(str(error.__cause__ or error))}")
            case UnicodeEncodeError():  # all other text has been made encodable
                return ModelSetupError("a request header cannot be sent; look at OPENAI_CUSTOM_HEADERS")
            case _:
                return AttemptFailed(f"the SDK failed: {self._foreign(str(error))}")

    def _failure(self, status: int, said: object, headers: Mapping[str, str], code: str) -> ModelError:
        """Choose the error for an HTTP status and what the API said with it."""
        text = said if isinstance(said, str) else json.dumps(said, default=str) if said else ""
        reason = f" ({status})" + (f": {self._foreign(text)}" if text.strip() else "")
        if _HOPELESS.search(code):
            return ModelRefused(f"{self.name}: the quota is used up{reason}")
        if may_pass_later(status):
            return AttemptFailed(_PASSING.get(status, "the API failed") + reason, retry_after_s=retry_after_s(headers))
        if status == HTTPStatus.UNAUTHORIZED:
            return ModelSetupError(f"{self.name}: the API key was refused{reason}; set a valid one: {_KEY_LINE}")
        if status == HTTPStatus.NOT_FOUND:
            return ModelSetupError(f"{self.name}: no such model, or a wrong --base-url{reason}")
        if status in {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE} and _OVERFLOW.search(f"{code} {text}"):
            return ContextFull(f"{self.name}: the context is full{reason}")
        why = {402: "payment is required", 403: "not permitted", 413: "the request is too large"}
        return ModelRefused(f"{self.name}: {why.get(status, 'the request was refused')}{reason}")

    def _foreign(self, text: str) -> str:
        for secret in sorted(self.secrets(), key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[key]")
        return quoted(text)
