"""What the host sends to rounds, as the device sees it.

Owns the views of a message and the page tables beside it. Ignores what a message says
(`engine.runner.round_plan`) and what becomes of it.

Shapes: B rows of a tier, G drafts, P page-table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.runner.round_plan import COLUMNS, message_size


@dataclass(slots=True)
class RoundInputs:
    """What the host sends: views of one message (`RoundPlan.message`), and the page tables."""

    message: torch.Tensor
    page_tables_BP: torch.Tensor
    drafts: int

    @staticmethod
    def empty(rows: int, drafts: int, columns: int, device: torch.device) -> RoundInputs:
        message = torch.zeros(message_size(rows, drafts), dtype=torch.int32, device=device)
        return RoundInputs(message, torch.zeros(rows, columns, dtype=torch.int32, device=device), drafts)

    @property
    def rows(self) -> int:
        return self.page_tables_BP.shape[0]

    def _column(self, name: str) -> torch.Tensor:
        place = COLUMNS.index(name)
        return self.message[place * self.rows : (place + 1) * self.rows]

    @property
    def slots_B(self) -> torch.Tensor:
        return self._column("slots")

    @property
    def most_B(self) -> torch.Tensor:
        return self._column("most")

    @property
    def least_B(self) -> torch.Tensor:
        return self._column("least")

    @property
    def room_B(self) -> torch.Tensor:
        return self._column("room")

    @property
    def order_B(self) -> torch.Tensor:
        """Rows by the slots of their adapters."""
        return self._column("order")

    @property
    def adapters_B(self) -> torch.Tensor:
        """Those slots, in that order."""
        return self._column("adapters")

    @property
    def _behind(self) -> torch.Tensor:
        """What comes after the columns."""
        return self.message[len(COLUMNS) * self.rows :]

    @property
    def budget_1(self) -> torch.Tensor:
        return self._behind[:1]

    @property
    def survival_BG(self) -> torch.Tensor:
        return self._behind[1 : 1 + self.rows * self.drafts].view(torch.float32).view(self.rows, -1)

    @property
    def drafts_BG(self) -> torch.Tensor:
        return self._behind[1 + self.rows * self.drafts :].view(self.rows, -1)
