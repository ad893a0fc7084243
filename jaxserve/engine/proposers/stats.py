"""What came of speculation: plain counters for the metrics."""

from dataclasses import dataclass, field


@dataclass
class SpeculationStats:
    """Counters since the start.

    num_drafts: rows of steps that had drafts. num_drafted, num_accepted: tokens.
    num_accepted_per_position[j]: how often draft j was accepted (its predecessors were too).
    num_emitted: tokens that rows of decode steps yielded, with drafts or without; num_rows: those
    rows. Their ratio is the tokens per step of a stream. num_audited: tokens of steps with drafts
    that plain decoding drew again (draft_audit.py); num_audit_mismatches: how often another one.
    """

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_rows: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_audited: int = 0
    num_audit_mismatches: int = 0

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Note what a row of a decode step yielded: the accepted drafts and one token more."""
        self.num_rows += 1
        self.num_emitted += num_accepted + 1
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        per_position = self.num_accepted_per_position
        per_position.extend([0] * (num_drafted - len(per_position)))
        for position in range(num_accepted):
            per_position[position] += 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row yields in a step, on average; 1.0 before the first."""
        return self.num_emitted / self.num_rows if self.num_rows else 1.0

    def copy(self) -> "SpeculationStats":
        """What it is now, to be compared with later."""
        return self.since(SpeculationStats())

    def since(self, before: "SpeculationStats") -> "SpeculationStats":
        """What was counted after `before`, an earlier copy of it."""
        earlier = before.num_accepted_per_position
        earlier = earlier + [0] * (len(self.num_accepted_per_position) - len(earlier))
        return SpeculationStats(
            self.num_drafts - before.num_drafts,
            self.num_drafted - before.num_drafted,
            self.num_accepted - before.num_accepted,
            self.num_emitted - before.num_emitted,
            self.num_rows - before.num_rows,
            [now - then for now, then in zip(self.num_accepted_per_position, earlier, strict=True)],
            self.num_audited - before.num_audited,
            self.num_audit_mismatches - before.num_audit_mismatches,
        )
