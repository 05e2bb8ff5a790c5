"""The rule for what is counted and told: when it becomes news, and again whenever it has doubled since."""


def doubled(count: int, told: int, first: int = 1) -> bool:
    """Whether to tell `count` now. `told`: what it was when it was told last, 0 if it was not; `first`: so many are
    news."""
    return count >= max(first, 2 * told)
