"""Figures as people read them in one line: tokens, money, time."""

from asp_agent.messages import Usage

_THOUSAND = 1000
_MINUTE_S = 60
_CENT_USD = 0.01


def tokens(count: int) -> str:
    """Return 987 as ``987``, 12345 as ``12.3k``, 1234567 as ``1.23M``."""
    if count < _THOUSAND:
        return str(count)
    if count < 999_950:  # noqa: PLR2004 - what would round to 1000.0k
        return f"{count / _THOUSAND:.1f}k"
    return f"{count / _THOUSAND**2:.2f}M"


def usage(total: Usage) -> str:
    """Return ``12.3k in (80% cached), 0.9k out``; unknown is said, never shown as 0."""
    if total.input_tokens is None and total.output_tokens is None:
        return "tokens unknown"
    into = "?" if total.input_tokens is None else tokens(total.input_tokens)
    out = "?" if total.output_tokens is None else tokens(total.output_tokens)
    cached = ""
    if total.input_tokens and total.cache_read_tokens:
        cached = f" ({round(100 * total.cache_read_tokens / total.input_tokens)}% cached)"
    return f"{into} in{cached}, {out} out"


def money(usd: float) -> str:
    """Return dollars: two digits from a cent upwards, four below, so that little is not nothing."""
    return f"${usd:.2f}" if usd >= _CENT_USD or not usd else f"${usd:.4f}"


def seconds(duration_s: float) -> str:
    """Return 3.21 as ``3.2 s`` and 75 as ``1:15``."""
    if duration_s < _MINUTE_S:
        return f"{duration_s:.1f} s"
    minutes, rest = divmod(round(duration_s), _MINUTE_S)
    hours, minutes = divmod(minutes, _MINUTE_S)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
