"""Claim: a torch without the private names that are needed is refused with one sentence that names them."""

from __future__ import annotations

import pytest

from osdp._torch import check
from osdp.errors import OsdpError


def test_this_torch_has_them_all() -> None:
    assert check.missing_names(check.NEEDED) == []


def test_missing_modules_classes_and_methods_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {
        "torch.distributed.fsdp._gone": (),
        "torch.distributed.fsdp.Gone": (),
        "torch.distributed.fsdp.FSDPModule": ("reshard", "gone"),
    }
    assert check.missing_names(gone) == [
        "torch.distributed.fsdp._gone",
        "torch.distributed.fsdp.Gone",
        "torch.distributed.fsdp.FSDPModule.gone",
    ]
    monkeypatch.setattr(check, "NEEDED", gone)
    with pytest.raises(OsdpError, match=r"FSDPModule\.gone, which osdp needs .* tested with torch>=2\.13,<2\.14"):
        check.check_torch()
