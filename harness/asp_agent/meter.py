"""What a run has used so far, and whether that is too much (L7: exit 3). Asked before each request and after each turn."""

from dataclasses import dataclass, field
from decimal import Decimal

from asp.errors import UsageError
from asp_agent.messages import Usage
from asp_agent.pricing import Price


@dataclass
class Meter:
    """Counts tokens and dollars. ``max_budget_usd`` and ``max_tokens_total`` are the caps; None is without."""

    price: Price | None = None
    max_budget_usd: Decimal | None = None
    max_tokens_total: int | None = None
    total: Usage = field(default_factory=Usage)
    _cost: Decimal = Decimal(0)
    _requests: int = 0
    _cost_known: bool = True
    _tokens_known: bool = True

    def __post_init__(self) -> None:
        """Raise UsageError for a budget that cannot be kept."""
        if self.max_budget_usd is not None and self.price is None:
            msg = "--max-budget-usd needs a price, and that of this model is not known; give it with --price INPUT,OUTPUT"
            raise UsageError(msg)

    @property
    def cost_usd(self) -> float | None:
        """The run's cost in dollars; None if any part of it is not known, or nothing was asked yet."""
        return float(self._cost) if self.price is not None and self._cost_known and self._requests else None

    def add(self, usage: Usage) -> None:
        """Count one request that the API answered."""
        self._requests += 1
        self.total = add_usage(self.total, usage)
        if usage.input_tokens is None or usage.output_tokens is None:
            self._tokens_known = False
        cost = self.price(usage) if self.price is not None else None
        if cost is None:
            self._cost_known = False
        else:
            self._cost += cost

    def over(self) -> tuple[str, str] | None:
        """Return (reason, message) if no further request may be made."""
        if self.max_budget_usd is not None:
            if self._cost >= self.max_budget_usd:
                return "max_budget_usd", f"the budget of ${self.max_budget_usd} is used up (${self._cost:.4f})"
            if not self._cost_known:
                return "cost_unknown", "the API did not say how many tokens a request took, so the budget cannot be kept"
        if self.max_tokens_total is not None:
            used = (self.total.input_tokens or 0) + (self.total.output_tokens or 0)
            if used >= self.max_tokens_total:
                return "max_tokens_total", f"the limit of {self.max_tokens_total:,} tokens was reached ({used:,})"
            if not self._tokens_known:
                return "tokens_unknown", "the API did not say how many tokens a request took, so their limit cannot be kept"
        return None


def add_usage(total: Usage, more: Usage) -> Usage:
    """Add tokens; what one side does not know counts as nothing, and stays unknown only if neither knows it."""

    def add(one: int | None, two: int | None) -> int | None:
        return None if one is None and two is None else (one or 0) + (two or 0)

    return Usage(
        add(total.input_tokens, more.input_tokens),
        add(total.cache_read_tokens, more.cache_read_tokens),
        add(total.cache_write_tokens, more.cache_write_tokens),
        add(total.output_tokens, more.output_tokens),
    )
