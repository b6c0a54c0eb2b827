# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.3's attention on a machine without an accelerator.

Its language models attend by `flex_attention`, which has no backward on a CPU, or by a kernel for
GPUs. Here they attend by `scaled_dot_product_attention` with the same mask of documents, so that a
CPU and a GPU train the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torchtitan.models.common import attention

from titan_ft.config import ConfigError

_Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attend_densely() -> None:
    """Let torchtitan's two kinds of attention use a dense mask.

    The sparse mask is built without a compiler. models/common/attention.py. Test:
    host/test_titan_0_3.py.
    """
    attention._compiled_create_block_mask = create_block_mask
    attention.FlexAttention.forward = _attend_by_blocks
    attention.VarlenAttention.forward = _attend_packed


def _attend_by_blocks(
    self: Any,
    q_BLNH: torch.Tensor,  # noqa: N803  # the names by which torchtitan shards them
    k_BLNH: torch.Tensor,  # noqa: N803
    v_BLNH: torch.Tensor,  # noqa: N803
    *,
    attention_masks: BlockMask,
    score_mod: Any = None,
    **settings: Any,
) -> torch.Tensor:
    """Attend as `FlexAttention.forward` does; [batch, sequence, head, dim]."""
    if score_mod is not None:
        raise ConfigError(
            "model.flavor must attend without a change of scores on CPU, got one with it; use GPUs"
        )
    return _attend(q_BLNH, k_BLNH, v_BLNH, _dense(attention_masks), **settings)


def _attend_packed(
    self: Any,
    q_BLNH: torch.Tensor,  # noqa: N803  # the names by which torchtitan shards them
    k_BLNH: torch.Tensor,  # noqa: N803
    v_BLNH: torch.Tensor,  # noqa: N803
    *,
    attention_masks: attention.VarlenMetadata,
    **settings: Any,
) -> torch.Tensor:
    """Attend as `VarlenAttention.forward` does: within a document, and within a token's window.

    Shapes are [batch, sequence, head, dim].
    """
    batch, length = q_BLNH.shape[:2]
    packed = torch.arange(batch * length, device=q_BLNH.device)
    document = torch.searchsorted(attention_masks.cu_seq_q, packed, right=True).view(batch, length)
    before, after = self.window_size
    place = torch.arange(length, device=q_BLNH.device)
    distance = place[:, None] - place
    mask = document[:, :, None] == document[:, None, :]
    if before >= 0:
        mask &= distance <= before
    if after >= 0:
        mask &= distance >= -after
    return _attend(q_BLNH, k_BLNH, v_BLNH, mask[:, None], **settings)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: _Transform | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attend where a mask is true; [batch, sequence, head, dim].

    Args:
        mask: [batch, 1, query, key].
        out_transform: computes the result from the output and the logarithm of the weights' sum.
    """
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if out_transform is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    scores = scores.float().masked_fill(~mask, float("-inf"))
    out = (scores.softmax(dim=-1).to(value.dtype) @ value).transpose(1, 2)
    return out_transform(out, scores.logsumexp(dim=-1).transpose(1, 2))


def _dense(mask: BlockMask) -> torch.Tensor:
    """Return a mask as a tensor, [batch, 1, query, key]. It is built once for all layers."""
    kept: dict[str, Any] = vars(mask)
    if "titan_ft_dense" not in kept:
        batch, where = mask.kv_num_blocks.shape[0], mask.kv_num_blocks.device
        kept["titan_ft_dense"] = create_mask(
            mask.mask_mod, batch, 1, *mask.seq_lengths, device=where
        )
    dense: torch.Tensor = kept["titan_ft_dense"]
    return dense
