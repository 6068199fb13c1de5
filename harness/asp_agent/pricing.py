"""What a request costs, in dollars. Unknown is None and is shown as unknown: never as 0.

Prices come from ``--price`` or from genai-prices, whose data is in the package: nothing is asked of the network.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

from asp.errors import UsageError, quoted
from asp_agent.messages import Usage

Price: TypeAlias = Callable[[Usage], Decimal | None]
"""Return what a request with this usage costs in dollars; None if the usage is not known."""

_MILLION = 1_000_000
_NUMBER = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,9})?")
_FIGURES = range(2, 5)


@dataclass(frozen=True, slots=True)
class GivenPrice:
    """Dollars for a million tokens. ``input_usd`` is for input that no cache has to do with."""

    input_usd: Decimal
    output_usd: Decimal
    cache_read_usd: Decimal
    cache_write_usd: Decimal

    def __call__(self, usage: Usage) -> Decimal | None:
        """Return the cost of one request."""
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
        plain = max(0, usage.input_tokens - read - written)
        total = plain * self.input_usd + read * self.cache_read_usd + written * self.cache_write_usd
        return (total + usage.output_tokens * self.output_usd) / _MILLION


def parse_price(text: str) -> GivenPrice:
    """Read ``INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]]`` in dollars for a million tokens; what is left out costs as INPUT.

    Raises UsageError.
    """
    parts = text.split(",")
    if len(parts) not in _FIGURES or not all(_NUMBER.fullmatch(part.strip()) for part in parts):
        msg = f"--price is INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]] in dollars for a million tokens, not {quoted(text)}"
        raise UsageError(msg)
    figures = [Decimal(part.strip()) for part in parts]
    figures += [figures[0]] * (4 - len(figures))
    return GivenPrice(*figures)


def known_price(model: str, base_url: str | None) -> Price | None:
    """Return the list price of ``provider/name``, or None: an unknown model, or one behind an address that nobody knows."""
    provider, _, name = model.partition("/")
    if provider not in {"anthropic", "openai", "openai-chat"}:
        return None
    from genai_prices import Usage as Counted  # noqa: PLC0415 - 0.25 s that only a run with a real model pays
    from genai_prices import calc_price  # noqa: PLC0415 - the same

    def price(usage: Usage) -> Decimal | None:
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        counted = Counted(
            input_tokens=usage.input_tokens,  # all of it, as ours: what the caches had to do with is in it
            cache_read_tokens=usage.cache_read_tokens or 0,
            cache_write_tokens=usage.cache_write_tokens or 0,
            output_tokens=usage.output_tokens,
        )
        if base_url is not None:
            return calc_price(counted, name, provider_api_url=base_url).total_price
        return calc_price(counted, name, provider_id=provider.removesuffix("-chat")).total_price

    try:
        price(Usage(1, 0, 0, 1))
    except LookupError:
        return None
    return price


def context_window(model: str, base_url: str | None) -> int | None:
    """Return how many tokens the model's conversation may hold, None if that is not known."""
    provider, _, name = model.partition("/")
    if provider not in {"anthropic", "openai", "openai-chat"}:
        return None
    from genai_prices import Usage as Counted  # noqa: PLC0415 - as above
    from genai_prices import calc_price  # noqa: PLC0415 - as above

    counted = Counted(input_tokens=1, output_tokens=1)
    try:
        if base_url is not None:
            return calc_price(counted, name, provider_api_url=base_url).model.context_window
        return calc_price(counted, name, provider_id=provider.removesuffix("-chat")).model.context_window
    except LookupError:
        return None
