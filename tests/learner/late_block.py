"""Rows of the movement watch that arrive late."""

from __future__ import annotations

from atoll.model import samples


class LateBlock(samples.Block):
    """Rows that arrive only after the third look, like those of a GPU that is steps behind."""

    waits = 0  # how often code has waited for rows

    def __init__(self, rows):
        super().__init__(rows)
        self._looks = 0

    @property
    def there(self):
        self._looks += 1
        return self._looks > 2

    def rows(self):
        LateBlock.waits += self._looks <= 2
        return super().rows()
