"""An audit of data that was never prepared."""

from __future__ import annotations

from launcher.corpus.audit import Audit, SplitAudit


def make_split(num_documents: int, num_packs: int, mean_length: float = 158.6) -> SplitAudit:
    return SplitAudit(
        num_rows=num_documents,
        num_documents=num_documents,
        rejected={},
        rejected_places={},
        num_tokens=round(num_documents * mean_length),
        num_trained=round(num_documents * mean_length / 4),
        num_cut=0,
        num_cut_tokens=0,
        num_untrained=0,
        num_duplicates=0,
        num_known=0,
        num_ends_trained=num_documents,
        histogram=(),
        mean_length=mean_length,
        max_length=512,
        num_packs=num_packs,
        capacity=512,
    )


def make_audit(num_documents: int = 2000, num_packs: int = 621, held_out: int = 200) -> Audit:
    splits = {"train": make_split(num_documents, num_packs), "test": make_split(held_out, max(1, held_out // 3))}
    return Audit(template="chatml", loss_on="completion", is_packed=True, splits=splits, sample=(), notes=())
