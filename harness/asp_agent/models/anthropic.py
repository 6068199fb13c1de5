"""Claude through the Messages API, and every server that speaks it.

The SDK sends the request and reads the stream; what the events mean is decided here. Its own helpers return a broken
stream as a whole message, and a truncated tool call as ``input={}`` (facts/models.md 1.4): unfit for a program that
runs what the model writes. So: the server-sent events as they come, our own accumulator, the exact text of the
arguments, and no turn without its terminal event (L2).

No exception that leaves here has an SDK exception behind it, and the API's words are quoted with every key cut out:
an SDK exception holds the request, and httpx2 prints the whole header when it finds a bad character in it.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, cast

import httpx2
from anthropic import (
    AnthropicError,
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncAnthropic,
    AsyncStream,
    DefaultAsyncHttpxClient,
    Timeout,
    omit,
)
from anthropic.types import MessageParam, OutputConfigParam, ToolUnionParam

from asp.errors import quoted
from asp_agent.errors import ContextFull, ModelError, ModelRefused, ModelSetupError
from asp_agent.messages import ModelEvent, Request, TextDelta, TurnDone
from asp_agent.models.anthropic_wire import Answer, BadStream, EventLines, encodable, messages
from asp_agent.models.retry import AttemptFailed, RetryPolicy, may_pass_later, retry_after_s

MAX_TOKENS = 16_000
READ_TIMEOUT_S = 300.0  # between two reads: the API sends pings, a slow local server may read its prompt for minutes
CONNECT_TIMEOUT_S = 10.0
_TAIL_S = 0.5  # how long the end of a stream is awaited after its turn is whole, so that the connection is used again

# In a stream that began with 200 the error's type stands for the status. A type not listed counts as the API's failure.
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_PASSING = {408: "timed out", 429: "rate limited", 504: "timed out", 529: "overloaded"}
_OVERFLOW = re.compile(
    r"prompt is too long|context.{0,20}exceeded|exceed\w* (the |this )?(model's )?(available |maximum )?context"
    r"|maximum context length|context_length_exceeded|greater than the context length|input is too long",
    re.IGNORECASE,
)
_SECRET_HEADER = re.compile(r"authorization|api-?key|token|secret|cookie", re.IGNORECASE)
_SHORTEST_SECRET = 4  # a header's value of a letter or two is no secret, and cutting it out would eat the text
_KEY_LINE = "export ANTHROPIC_API_KEY=..."


class AnthropicModel:
    """One model behind the Messages API. One connection pool; may be asked by several tasks at once."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        max_tokens: int = MAX_TOKENS,
        read_timeout_s: float = READ_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        effort: str | None = None,
    ) -> None:
        """Take the key, the address and the headers where the SDK finds them (ANTHROPIC_*, its profiles on disk).

        Raises ModelSetupError: no key, a key that cannot be in a header, an address or proxy that is none.
        """
        self.name = f"anthropic/{name}"
        self.scripted = False
        self._model = str(encodable(name))  # a command line may hold bytes that are not UTF-8
        self._source = ("anthropic", "messages", name)
        self._max_tokens = max_tokens
        self._effort = effort
        self._read_timeout_s = read_timeout_s
        self._retry = retry or RetryPolicy()
        self._sent_keys: set[str] = set()
        problem = ""
        try:
            timeout = Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
            # One of its own making the SDK closes in __del__: in a task of any loop, or with a complaint on stderr.
            http_client = DefaultAsyncHttpxClient(timeout=timeout)
            self._client = AsyncAnthropic(base_url=base_url, max_retries=0, timeout=timeout, http_client=http_client)
        except (AnthropicError, httpx2.InvalidURL, ImportError, ValueError) as error:
            problem = f"the anthropic SDK cannot be set up: {quoted(str(error))}"
        if problem:  # raised out here: nothing of the SDK's exception stays behind ours
            raise ModelSetupError(problem)
        self._check_client()

    def _check_client(self) -> None:
        client = self._client
        url = client.base_url
        if url.scheme not in {"http", "https"} or not url.host:
            message = "the model's address (--base-url or ANTHROPIC_BASE_URL) is not an http:// or https:// address"
            raise ModelSetupError(message)
        for variable, key in (("ANTHROPIC_API_KEY", client.api_key), ("ANTHROPIC_AUTH_TOKEN", client.auth_token)):
            if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
                message = f"{variable} holds a space, a line break or another character that no key has; set it again"
                raise ModelSetupError(message)
        headers = {header.lower() for header in client.default_headers}
        known = client.api_key or client.auth_token or client.credentials or headers & {"authorization", "x-api-key"}
        if not known:
            raise self._no_key()

    def _no_key(self) -> ModelSetupError:
        return ModelSetupError(f"no API key for {self.name}; set one: {_KEY_LINE}")

    def secrets(self) -> Sequence[str]:
        """Return the key or token, the values of secret headers and what has been sent as authorization so far."""
        client = self._client
        values = {client.api_key, client.auth_token, client.base_url.password, *self._sent_keys}
        headers = client.default_headers.items()
        values |= {_credential(v) for h, v in headers if isinstance(v, str) and _SECRET_HEADER.search(h)}
        return tuple(sorted(value for value in values if value))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    def stream(self, request: Request) -> AsyncGenerator[ModelEvent, None]:
        """Ask and yield events; the last one is TurnDone. See :class:`asp_agent.messages.Model` for what it raises."""
        return self._retry.stream(self.name, lambda: self._attempt(request))

    async def _attempt(self, request: Request) -> AsyncGenerator[TextDelta | TurnDone, None]:
        answer = Answer(self._source)
        try:
            async with aclosing(self._read(request, answer)) as pieces:
                async for piece in pieces:
                    yield TextDelta(piece)
            turn = answer.turn()
        except (AnthropicError, httpx2.HTTPError, BadStream, _ErrorEvent, UnicodeEncodeError, TypeError) as error:
            failure = self._explain(error)
            if failure is None:
                raise
        else:
            yield TurnDone(turn)
            return
        raise failure  # outside of the handler, so that no SDK exception is its context

    async def _read(self, request: Request, answer: Answer) -> AsyncGenerator[str, None]:
        """Ask, fill ``answer`` and yield its text as it comes."""
        stream = await self._send(request)
        self._remember_key(stream.response.request)
        # The bytes, not the SDK's events: those are coerced into its classes, and native items must not change.
        chunks = stream.response.aiter_bytes()
        lines = EventLines()
        try:
            async for chunk in chunks:
                for event in lines.feed(chunk):
                    if event.get("type") == "error":
                        raise _ErrorEvent(event)
                    if text := answer.add(event):
                        yield text
                    if answer.ended:
                        await _read_out(chunks)  # so that the connection is free for the next request
                        return
        finally:
            await stream.close()
            # Closed first, so this is an error at once; it ends each of the SDK's nested generators here and now,
            # where dropping them would leave tasks behind that close them some time later.
            await _read_out(chunks)

    async def _send(self, request: Request) -> AsyncStream[Any]:
        system = encodable(request.system)
        history = encodable(messages(request.history, self._source))
        tools = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ]
        return await self._client.messages.create(
            model=self._model,
            max_tokens=self._max_tokens,
            system=system if system.strip() else omit,  # an empty text is refused
            messages=cast("list[MessageParam]", history),
            tools=cast("list[ToolUnionParam]", tools) if tools else omit,
            cache_control={"type": "ephemeral"},  # a breakpoint that moves with the last block: all before it is cached
            output_config=cast("OutputConfigParam", {"effort": self._effort}) if self._effort else omit,
            stream=True,
        )

    def _explain(self, error: Exception) -> ModelError | None:  # noqa: C901 - one case for each failure
        """Name what went wrong in one try; None if it is a bug of ours."""
        host = self._client.base_url.host
        match error:
            case APIStatusError():
                self._remember_key(error.response.request)
                said = error.api_message if isinstance(error.api_message, str) else error.body
                return self._failure(error.status_code, said, error.response.headers)
            case _ErrorEvent():
                return self._failure(error.status, error.said, {})
            case BadStream():
                return AttemptFailed(str(error))
            case APITimeoutError() if isinstance(error.__cause__, httpx2.ConnectTimeout):
                return AttemptFailed(f"no connection to {host} in {CONNECT_TIMEOUT_S:g} s")
            case APITimeoutError() | httpx2.TimeoutException():
                return AttemptFailed(f"nothing came from {host} for {self._read_timeout_s:g} s")
            case APIConnectionError() if isinstance(error.__cause__, httpx2.LocalProtocolError):
                # Its text shows the whole header that cannot be written, escaped: it could not even be redacted.
                return ModelSetupError("a request header cannot be sent; look at ANTHROPIC_CUSTOM_HEADERS")
            case APIConnectionError() | httpx2.HTTPError():
                return AttemptFailed(f"the connection to {host} failed: {self._foreign(str(error.__cause__ or error))}")
            case AnthropicError():  # what is left: the SDK's profiles and tokens
                return ModelSetupError(f"{self.name}: the SDK found no usable login: {self._foreign(str(error))}")
            case UnicodeEncodeError():  # all other text has been made encodable
                return ModelSetupError("a request header cannot be sent; look at ANTHROPIC_CUSTOM_HEADERS")
            case TypeError() if "authentication method" in str(error):
                return self._no_key()
            case _:
                return None

    def _failure(self, status: int, said: object, headers: Mapping[str, str]) -> ModelError:
        """Choose the error for an HTTP status and what the API said with it."""
        text = said if isinstance(said, str) else json.dumps(said, default=str) if said else ""
        reason = f" ({status})" + (f": {self._foreign(text)}" if text.strip() else "")
        if may_pass_later(status):
            return AttemptFailed(_PASSING.get(status, "the API failed") + reason, retry_after_s=retry_after_s(headers))
        if status == HTTPStatus.UNAUTHORIZED:
            return ModelSetupError(f"{self.name}: the API key was refused{reason}; set a valid one: {_KEY_LINE}")
        if status == HTTPStatus.NOT_FOUND:
            return ModelSetupError(f"{self.name}: no such model, or a wrong --base-url{reason}")
        if status == HTTPStatus.BAD_REQUEST and _OVERFLOW.search(text):
            return ContextFull(f"{self.name}: the context is full{reason}")
        why = {402: "payment is required", 403: "not permitted", 413: "the request is too large"}
        return ModelRefused(f"{self.name}: {why.get(status, 'the request was refused')}{reason}")

    def _remember_key(self, request: httpx2.Request) -> None:
        for header in ("authorization", "x-api-key"):
            self._sent_keys.add(_credential(request.headers.get(header, "")))

    def _foreign(self, text: str) -> str:
        for secret in sorted(self.secrets(), key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[key]")
        return quoted(text)


def _credential(header: str) -> str:
    return header.rpartition(" ")[2]


class _ErrorEvent(Exception):
    """The API said "error" in a stream that had begun with status 200; the error's type stands for the status."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        given = event.get("error")
        error = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        super().__init__("error event")
        self.status = _STATUS_OF_TYPE.get(str(error.get("type")), HTTPStatus.INTERNAL_SERVER_ERROR)
        self.said = error.get("message")


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    """Read to the end or to the first error, within half a second; nothing that comes matters."""
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError):
        async with asyncio.timeout(_TAIL_S):
            async for _ in chunks:
                pass
