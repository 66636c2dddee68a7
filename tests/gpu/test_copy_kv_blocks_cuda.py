"""Whole blocks between a CUDA device and the host; skipped where there is no device."""

from __future__ import annotations

import pytest
import torch
from kvtier.memory.block_copy import BlockOrder, copy_kv_blocks

from kvtier.errors import UnsupportedError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("planes", [False, True])
def test_blocks_go_out_and_come_back_permuted_bit_for_bit(planes: bool) -> None:
    first = (2,) if planes else ()
    here = torch.randn((*first, 8, 16, 4, 64), device="cuda")
    device = {"layer": here}
    expected = here.cpu()
    host = {"layer": torch.zeros((*first, 8, 4, 16, 64))}
    orders = (BlockOrder.NHD, BlockOrder.HND)
    copy_kv_blocks(device, host, [1, 7], [3, 0], "d2h", orders)
    device["layer"].zero_()
    copy_kv_blocks(host, device, [3, 0], [2, 5], "h2d", orders[::-1])
    at = len(first)
    for old, new in ((1, 2), (7, 5)):
        assert torch.equal(device["layer"].select(at, new).cpu(), expected.select(at, old))


def test_a_copy_in_the_wrong_direction_is_refused() -> None:
    device, host = torch.zeros((2, 1, 1, 1), device="cuda"), torch.zeros((2, 1, 1, 1))
    with pytest.raises(UnsupportedError, match="not in host memory"):
        copy_kv_blocks({"layer": device}, {"layer": host}, [0], [0], "h2d")
